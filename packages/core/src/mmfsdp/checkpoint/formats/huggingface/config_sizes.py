"""Compares weights with the sizes in a Hugging Face config: vocabulary, widths, number of layers, of known models."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mmfsdp.basics.arguments import argument
from mmfsdp.basics.dtypes import is_floating_point
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.huggingface.model_folders import CONFIG, read_config
from mmfsdp.errors import ConfigError

__all__ = ["check_sizes"]

_Shape = tuple[str | None, ...]


class _Model(NamedTuple):
    """How a family of transformers' models names the weights whose sizes its config states."""

    shapes: tuple[tuple[str, _Shape], ...]
    """Names as regular expressions, and which number of the config each dimension is; ``None`` for others."""
    layers: tuple[tuple[str, str], ...]
    """How names of layers begin, with their index as a group, and the number of the config that counts them."""


_WHOLE = ("vocab_size", "hidden_size")
_LLAMA = _Model(
    ((r"(model\.)?embed_tokens\.weight", _WHOLE), (r"lm_head\.weight", _WHOLE)),
    ((r"(?:model\.)?layers\.(\d+)\.", "num_hidden_layers"),),
)
_DENSE = _LLAMA._replace(
    shapes=(
        *_LLAMA.shapes,
        (r"(model\.)?layers\.\d+\.mlp\.(gate|up)_proj\.weight", ("intermediate_size", "hidden_size")),
        (r"(model\.)?layers\.\d+\.self_attn\.q_proj\.weight", ("num_attention_heads * head_dim", "hidden_size")),
        (r"(model\.)?layers\.\d+\.self_attn\.[kv]_proj\.weight", ("num_key_value_heads * head_dim", "hidden_size")),
    )
)
_GPT2 = _Model(
    ((r"(transformer\.)?wte\.weight", ("vocab_size", "n_embd")), (r"lm_head\.weight", ("vocab_size", "n_embd"))),
    ((r"(?:transformer\.)?h\.(\d+)\.", "n_layer"),),
)
_BERT = _Model(
    ((r"(\w+\.)?embeddings\.word_embeddings\.weight", ("vocab_size", None)),),
    ((r"(?:\w+\.)?encoder\.layer\.(\d+)\.", "num_hidden_layers"),),
)
# By model_type. Models with further layers for several tokens at once, such as DeepSeek-V3's, are left out.
_MODELS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _DENSE),
    **dict.fromkeys(
        (
            *("cohere", "cohere2", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt_oss", "granite", "granitemoe"),
            *("helium", "mixtral", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "phi", "phi3", "phimoe"),
            *("qwen2_moe", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2"),
        ),
        _LLAMA,
    ),
    **dict.fromkeys(("gpt2", "gptj", "gpt_bigcode"), _GPT2),
    "gpt_neox": _Model(
        ((r"(gpt_neox\.)?embed_in\.weight", _WHOLE), (r"embed_out\.weight", _WHOLE)),
        ((r"(?:gpt_neox\.)?layers\.(\d+)\.", "num_hidden_layers"),),
    ),
    "opt": _Model(
        ((r"((model\.)?decoder\.embed_tokens|lm_head)\.weight", ("vocab_size", None)),),
        ((r"(?:model\.)?decoder\.layers\.(\d+)\.", "num_hidden_layers"),),
    ),
    "bloom": _Model(
        ((r"(transformer\.)?word_embeddings\.weight", _WHOLE),), ((r"(?:transformer\.)?h\.(\d+)\.", "n_layer"),)
    ),
    "falcon": _Model(
        ((r"(transformer\.)?word_embeddings\.weight", _WHOLE),),
        ((r"(?:transformer\.)?h\.(\d+)\.", "num_hidden_layers"),),
    ),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra"), _BERT),
    **dict.fromkeys(
        ("t5", "mt5"),
        _Model(
            ((r"(transformer\.)?(shared|lm_head)\.weight", ("vocab_size", "d_model")),),
            (
                (r"(?:transformer\.)?encoder\.block\.(\d+)\.", "num_layers"),
                (r"(?:transformer\.)?decoder\.block\.(\d+)\.", "num_decoder_layers"),
            ),
        ),
    ),
}


def check_sizes(tensors: Mapping[str, TensorEntry], like: Path) -> None:
    """Compare weights with the config of a folder, if its model is a known one.

    Args:
        tensors: The weights that are to be written beside the config.
        like: The folder with the config.

    Raises:
        ConfigError: The config belongs to a model of other sizes; the message says what to change.
    """
    config = read_config(like)
    kind = config.get("model_type")
    model = _MODELS.get(kind) if isinstance(kind, str) else None
    if model is None:
        return
    problems = [*_wrong_shapes(tensors, model, config), *_wrong_layers(tensors, model, config)]
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ConfigError(
            f"The weights do not fit {CONFIG} of {str(like)!r}, and from_pretrained would raise or draw weights anew: "
            f"{'; '.join(problems[:3])}{more}. Give the folder of the model that was trained as {argument('like')}, or "
            f"change its {CONFIG}.",
            config="like",
        )


def _wrong_shapes(tensors: Mapping[str, TensorEntry], model: _Model, config: Mapping[str, Any]) -> Iterator[str]:
    for name, entry in tensors.items():
        if not is_floating_point(entry.dtype) or len(entry.shape) != 2:
            continue  # codes that are packed have other shapes
        keys = next((keys for pattern, keys in model.shapes if re.fullmatch(pattern, name)), ())
        for key, size in zip(keys, entry.shape, strict=False):
            wanted = _number(config, key)
            if wanted is not None and wanted != size:
                yield f"{name!r} has shape {[*entry.shape]}, but {key} is {wanted}"


def _wrong_layers(tensors: Mapping[str, TensorEntry], model: _Model, config: Mapping[str, Any]) -> Iterator[str]:
    for pattern, key in model.layers:
        wanted = _number(config, key)
        found = {int(match[1]) for match in (re.match(pattern, name) for name in tensors) if match}
        if not found or wanted is None:
            continue
        missing = next(index for index in range(len(found) + 1) if index not in found)
        if missing < wanted:
            yield f"layer {missing} is missing, but {key} is {wanted}"
        elif max(found) >= wanted:
            yield f"there is a layer {max(found)}, but {key} is {wanted}"


def _number(config: Mapping[str, Any], key: str | None) -> int | None:
    """Return a number of a config, or a product of two; ``None`` if it does not say."""
    if key is None:
        return None
    if " * " in key:
        first, second = (_number(config, part) for part in key.split(" * "))
        return None if first is None or second is None else first * second
    value = config.get(key)
    if value is None and key == "num_decoder_layers":
        value = config.get("num_layers")
    if value is None and key == "num_key_value_heads":
        value = config.get("num_attention_heads")
    if value is None and key == "head_dim":
        width, heads = (_number(config, name) for name in ("hidden_size", "num_attention_heads"))
        value = width // heads if width and heads and config.get("model_type") != "qwen3" else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None
