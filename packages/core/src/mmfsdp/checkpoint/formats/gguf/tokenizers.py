"""Turns tokenizers of Hugging Face folders into key-values of GGUF: BPE of Llama 3 and Qwen2, and SentencePiece's BPE.

llama.cpp defines the keys and their meaning: ``gguf-py/gguf/constants.py``, ``gguf-py/gguf/vocab.py`` and
``convert_hf_to_gguf.py`` of https://github.com/ggml-org/llama.cpp. It splits text with code of its own, chosen by the
key ``tokenizer.ggml.pre``, so a tokenizer is translated only if its regular expression is the one of such code.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmfsdp.checkpoint.formats.gguf.gguf_files import flag, number, numbers, reals, text, texts
from mmfsdp.checkpoint.formats.gguf.sentence_pieces import SentencePiece, read_pieces
from mmfsdp.errors import ConfigError

__all__ = ["FILE", "translated"]

FILE = "tokenizer.json"
"""The tokenizer, as the library tokenizers stores it."""

_PIECES = "tokenizer.model"
_LIMIT = 200_000_000  # bytes
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
# What llama.cpp calls the code that splits text, by the regular expression and by whether words may be tokens unmerged.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITTERS = {(_WORDS % "{1,3}", True): "llama-bpe", (_WORDS % "", False): "qwen2"}
# What some tokenizers do not call special, and llama.cpp does.
_LOOKS_SPECIAL = re.compile(r"<\|.*\|>|<\uff5c.*\uff5c>|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\]", re.DOTALL)
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask"}
_ADDED_SCORE, _UNUSED_SCORE = -1000.0, -10000.0
_ADDED = ("bos", "eos", "sep")


def translated(folder: Path, rows: int) -> tuple[dict[str, bytes], str]:
    """Return the key-values of a folder's tokenizer; none, and why not, if llama.cpp would need other code for it.

    Args:
        folder: A Hugging Face folder.
        rows: How many tokens the model's embedding has; what no token has becomes one that is not used.

    Raises:
        ConfigError: The tokenizer has tokens without a row, or its files are malformed.
    """
    path, pieces = folder / FILE, read_pieces(folder / _PIECES)  # which llama.cpp takes first, too
    if not path.is_file() and pieces is None:
        return {}, f"{folder.name} has neither {FILE} nor {_PIECES} of SentencePiece's BPE"
    content, settings, config = (_read(folder / name) for name in (FILE, "tokenizer_config.json", "config.json"))
    try:
        if pieces is not None:
            own = _of_pieces(pieces, settings, _read(folder / "added_tokens.json"), rows, folder / _PIECES)
        elif (splitter := _splitter(content)) is not None:
            own = _of_bpe(content, settings, splitter, rows, path)
        else:
            return {}, f"{FILE} is not that of Llama 3 or Qwen2"
        specials = _specials(content, settings, config, _added(content, settings), rows)
        keys = {**own, **specials, **_template(folder, settings)}
    except (KeyError, TypeError, AttributeError, ValueError, struct.error) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"The tokenizer of {folder.name} is malformed: {type(error).__name__}: {error}. Save it again with "
            "transformers, or remove it to write no tokenizer.",
            file=str(path),
        ) from None
    return keys, ""


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    if path.stat().st_size > _LIMIT:
        raise ConfigError(f"{path.name} has more than {_LIMIT} bytes.", file=str(path))
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name} is not valid JSON: {error}.", file=str(path)) from None
    return content if isinstance(content, dict) else {}


def _parts(step: Any, key: str) -> list[dict[str, Any]]:
    """Return the steps of a sequence, or the one step."""
    return [] if not step else step[key] if step["type"] == "Sequence" else [step]


def _splitter(content: Mapping[str, Any]) -> str | None:
    """Return what llama.cpp calls the code that splits text like this tokenizer, if it has any."""
    model, steps = content["model"], _parts(content.get("pre_tokenizer"), "pretokenizers")
    if model.get("type") != "BPE" or [step["type"] for step in steps] != ["Split", "ByteLevel"]:
        return None
    split, to_bytes = steps
    plain = split["behavior"] == "Isolated" and not split["invert"]
    plain = plain and not to_bytes["add_prefix_space"] and not to_bytes["use_regex"]
    normal = [step["type"] for step in _parts(content.get("normalizer"), "normalizers")] in ([], ["NFC"])
    known = _SPLITTERS.get((split["pattern"].get("Regex"), bool(model.get("ignore_merges"))))
    return known if plain and normal and not model.get("byte_fallback") else None


def _added(content: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[int, tuple[str, bool]]:
    """Return the text of each token beside the vocabulary, and whether it is special."""
    listed = [(int(number), token) for number, token in (settings.get("added_tokens_decoder") or {}).items()]
    listed += [(token["id"], token) for token in content.get("added_tokens") or ()]
    return {number: (token["content"], bool(token["special"])) for number, token in listed}


def _of_bpe(
    content: Mapping[str, Any], settings: Mapping[str, Any], splitter: str, rows: int, path: Path
) -> dict[str, bytes]:
    names = {number: (token, _NORMAL) for token, number in content["model"]["vocab"].items()}
    names |= {token_id: _typed(token, special) for token_id, (token, special) in _added(content, settings).items()}
    _check(names, rows, path)
    listed = [names.get(token_id, (f"[PAD{token_id}]", _UNUSED)) for token_id in range(rows)]
    return {
        "tokenizer.ggml.model": text("gpt2"),
        "tokenizer.ggml.pre": text(splitter),
        "tokenizer.ggml.tokens": texts([token for token, _ in listed]),
        "tokenizer.ggml.token_type": numbers([kind for _, kind in listed]),
        "tokenizer.ggml.merges": texts([_merge(pair) for pair in content["model"]["merges"]]),
    }


def _of_pieces(
    pieces: Sequence[SentencePiece], settings: Mapping[str, Any], listed: Mapping[str, int], rows: int, path: Path
) -> dict[str, bytes]:
    names = {
        token_id: (token, score, _NORMAL if kind == _USER_DEFINED else kind)
        for token_id, (token, score, kind) in enumerate(pieces)
    }
    names |= {token_id: (token, _ADDED_SCORE, _USER_DEFINED) for token, token_id in listed.items()}
    for token_id, (token, special) in _added({}, settings).items():
        name, kind = _typed(token, special)
        names[token_id] = name, _ADDED_SCORE, kind
    _check(names, rows, path)
    tokens = [names.get(token_id, (f"[PAD{token_id}]", _UNUSED_SCORE, _UNUSED)) for token_id in range(rows)]
    spaced = settings.get("add_prefix_space")
    return {
        "tokenizer.ggml.model": text("llama"),
        "tokenizer.ggml.pre": text("default"),
        "tokenizer.ggml.tokens": texts([token for token, _, _ in tokens]),
        "tokenizer.ggml.scores": reals([score for _, score, _ in tokens]),
        "tokenizer.ggml.token_type": numbers([kind for _, _, kind in tokens]),
        **({"tokenizer.ggml.add_space_prefix": flag(spaced)} if isinstance(spaced, bool) else {}),
    }


def _typed(token: str, special: bool) -> tuple[str, int]:
    """Return a token beside the vocabulary as llama.cpp stores it, and its type."""
    if special or _LOOKS_SPECIAL.fullmatch(token):
        return token, _CONTROL
    return token.replace("\N{LOWER ONE EIGHTH BLOCK}", " "), _USER_DEFINED


def _check(names: Iterable[int], rows: int, path: Path) -> None:
    if not 0 <= min(names) <= max(names) < rows:
        raise ConfigError(
            f"{path.name} of {path.parent.name} has a token {max(names)}, and vocab_size of config.json is {rows}. "
            "Give the tokenizer of this model.",
            file=str(path),
        )


def _merge(pair: str | Sequence[str]) -> str:
    # A space within a part is written as the letter that stands for its byte.
    return (
        pair
        if isinstance(pair, str)
        else " ".join(part.replace(" ", "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}") for part in pair)
    )


def _specials(
    content: Mapping[str, Any],
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    added: Mapping[int, tuple[str, bool]],
    rows: int,
) -> dict[str, bytes]:
    """Return the numbers of tokens that mean something, and which are put around a text."""
    token_ids = {token: token_id for token_id, (token, _) in added.items()}
    given = {kind: settings.get(f"{kind}_token") for kind in _SPECIAL}
    names = {kind: token["content"] if isinstance(token, dict) else token for kind, token in given.items()}
    around: dict[str, bool] = {}
    for step in _parts(content.get("post_processor"), "processors"):
        template = step.get("single", []) if step["type"] == "TemplateProcessing" else []
        ends = {"bos": template[0], "eos": template[-1]} if len(template) > 1 else {}
        around |= {
            kind: item["SpecialToken"]["id"] == names[kind] for kind, item in ends.items() if "SpecialToken" in item
        }
    around |= {kind: flagged for kind in _ADDED if isinstance(flagged := settings.get(f"add_{kind}_token"), bool)}
    found: dict[str, bytes] = {}
    for kind, long in _SPECIAL.items():
        token_id = token_ids.get(names[kind] or "", config.get(f"{kind}_token_id"))
        if type(token_id) is int and 0 <= token_id < rows:
            found[f"tokenizer.ggml.{long}_token_id"] = number(token_id)
    return found | {f"tokenizer.ggml.add_{kind}_token": flag(value) for kind, value in around.items()}


def _template(folder: Path, settings: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the template of chats; of several, the one that is named ``default``."""
    given = settings.get("chat_template")
    if isinstance(given, list):
        given = {item["name"]: item["template"] for item in given}.get("default")
    if given is None and (path := folder / "chat_template.jinja").is_file():
        given = path.read_text("utf-8")
    return {"tokenizer.chat_template": text(given)} if isinstance(given, str) else {}
