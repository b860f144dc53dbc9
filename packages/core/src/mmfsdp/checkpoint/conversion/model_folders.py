"""Makes a Hugging Face folder: the files beside the weights, tied weights written once, names as its model has them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmfsdp.basics.descriptors import RemoteLike
from mmfsdp.basics.dtypes import itemsize
from mmfsdp.basics.text import name_list
from mmfsdp.checkpoint.conversion import quantizing, scaled_floats
from mmfsdp.checkpoint.files.disk import at_home, place
from mmfsdp.checkpoint.files.elements import equal_data
from mmfsdp.checkpoint.files.scales import not_restored, scales_of
from mmfsdp.checkpoint.formats.registry import INDEX_SUFFIX, MODEL_FILES, open_layout
from mmfsdp.checkpoint.layout import TensorEntry
from mmfsdp.checkpoint.tree import common_prefix
from mmfsdp.errors import ConfigError, closest

__all__ = [
    "CONFIG",
    "Ties",
    "also_the_head",
    "check_names",
    "companions",
    "copy_companion",
    "dtype_notes",
    "like_folder",
    "quantized_config",
    "weights_stem",
    "without_ties",
]

CONFIG = "config.json"
_WEIGHTS = re.compile(
    r".+\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|gguf|onnx|ot|tflite|distcp|npz|mlmodel)|.+\.index\.json"
    r"|manifest\.json|\.metadata|\..+\.mmfsdp-\w+"
)
# What lies beside weights, to be asked for where a server does not list it.
_COMPANIONS = (
    *(CONFIG, "generation_config.json", "preprocessor_config.json", "processor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja", "chat_template.json"),
)
_ADAPTED = re.compile(r"\.(base_layer|lora_[AB]|lora_embedding_[AB])\.")
# In the order in which transformers and diffusers prefer them.
_OWN_WEIGHTS = (
    *(name + suffix for name in MODEL_FILES for suffix in ("", INDEX_SUFFIX)),
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)

# What transformers ties when config.json does not say otherwise: `_tied_weights_keys` of its models.
_INPUTS = r"(.*\.)?(shared|wte|embed_tokens|word_embeddings|embed_in|tok_embeddings|embeddings?)\.weight"
_TIES = (
    (r"(.*\.)?(lm_head|embed_out|lm_head\.decoder|cls\.predictions\.decoder|predictions\.decoder)\.weight", _INPUTS),
    (r"(.*\.)?(lm_head|(cls\.)?predictions)\.decoder\.bias", r"(.*\.)?(lm_head|predictions)\.bias"),
    (r"(.*\.)?(encoder|decoder)\.embed_tokens\.weight", r"(.*\.)?shared\.weight"),
)


def like_folder(given: str | None, source: Path, target: Path, what: str = "A Hugging Face folder") -> Path:
    """Return the folder whose files a Hugging Face folder gets: the given one, the source, or what is at the target.

    Args:
        given: A folder that the user gave.
        source: What is converted.
        target: What is written.
        what: What that is, for errors.

    Raises:
        ConfigError: None of them has a ``config.json``.
    """
    for folder in [place(given)] if given is not None else [source, target]:
        if (folder / CONFIG).is_file():
            return folder
    if given is not None:
        raise ConfigError(
            f"'like' is {given!r}, which holds no {CONFIG}. Give a Hugging Face folder.{at_home(Path(given))}",
            config="like",
        )
    raise ConfigError(
        f"{what} needs a {CONFIG}, and there is none in {str(source)!r}. Give a folder of the same model as 'like'; "
        "its configuration and tokenizer are copied.",
        config="like",
    )


def companions(like: Path, target: Path | None) -> dict[str, Path]:
    """Return the files beside the weights that the folder gets, by name: those of ``like``, and what is there already.

    Args:
        like: A folder of the same model.
        target: What is replaced, if anything.

    Raises:
        ConfigError: The target holds a folder, which would be lost.
    """
    found = {}
    if target is not None and target.is_dir():
        for path in sorted(target.iterdir()):
            if path.is_dir():
                raise ConfigError(
                    f"The directory {str(target)!r} is not replaced: it also holds the directory {path.name!r}. Move "
                    "it away, or choose another path."
                )
            if not _WEIGHTS.fullmatch(path.name):
                found[path.name] = path
    paths = {path.name: path for path in like.iterdir()}
    if isinstance(like, RemoteLike):
        paths |= {name: like / name for name in _COMPANIONS if name not in paths}
    for _, path in sorted(paths.items()):
        # The hub's cache holds links. Hidden files belong to where they are.
        there = path.is_offered() if isinstance(path, RemoteLike) else path.is_file()
        if there and not _WEIGHTS.fullmatch(path.name) and not path.name.startswith("."):
            found[path.name] = path
    return found


def copy_companion(file: Path, to: Path) -> None:
    """Copy a file that `companions` found: on this machine, or on a server."""
    if isinstance(file, RemoteLike):
        to.write_bytes(file.read_bytes())
    else:
        shutil.copyfile(file, to)


def weights_stem(like: Path) -> str:
    """Return what the names of a folder's weights begin with, so that the library of its config finds them.

    Args:
        like: A folder of the same model. diffusers states its release in every config that it writes.
    """
    return Path(MODEL_FILES["_diffusers_version" in _config(like)]).stem


def without_ties(tensors: Mapping[str, TensorEntry], like: Path) -> tuple[dict[str, TensorEntry], tuple[str, ...]]:
    """Return the tensors to write, and notes: tied weights once, under the names that the folder's model has.

    Args:
        tensors: The weights by name.
        like: A folder of the same model. Where it has weights, names and shapes must be theirs.

    Raises:
        ConfigError: Names or shapes are not those of the model, or weights that its config ties differ.
    """
    ties = Ties.of(like)
    kept = dict(tensors)
    notes = []
    for name, first in ties.candidates(tensors):
        if not equal_data(tensors[name], tensors[first]):
            ties.refuse_unequal(name, first)
            continue
        del kept[name]
        notes.append(f"{name} is tied to {first} and written once")
    check_names(kept, {*tensors}, like)
    return kept, tuple(notes)


@dataclass(frozen=True)
class Ties:
    """Which weights the model of a folder may tie."""

    like: Path
    """The folder."""
    stated: bool | None
    """What its config says; ``None`` if nothing, which transformers takes for yes."""
    own: frozenset[str]
    """The names of its weights, if it has any."""

    @classmethod
    def of(cls, like: Path) -> Ties:
        """Read the config and the names of a folder."""
        stated = _config(like).get("tie_word_embeddings")
        return cls(like, stated if isinstance(stated, bool) else None, frozenset(_weights(like)))

    @property
    def possible(self) -> bool:
        """Whether the config lets the model tie weights."""
        return self.stated is not False

    def candidates(self, tensors: Mapping[str, TensorEntry]) -> Iterator[tuple[str, str]]:
        """Yield names that may be second names, and the first name of each."""
        if not self.possible:
            return
        dropped: set[str] = set()
        for second, first in _TIES:
            for name, entry in tensors.items():
                if name in dropped or name in self.own or not re.fullmatch(second, name):
                    continue
                same = [
                    other
                    for other, its in tensors.items()
                    if other not in (name, *dropped)
                    and re.fullmatch(first, other)
                    and (its.shape, its.dtype) == (entry.shape, entry.dtype)
                ]
                if same:
                    dropped.add(name)
                    yield name, same[0]

    def refuse_unequal(self, second: str, first: str) -> None:
        """Raise if two weights that differ would be tied when the folder is loaded.

        Raises:
            ConfigError: They would.
        """
        if self.stated or (self.own and second not in self.own):
            raise ConfigError(
                f"{CONFIG} of {self.like.name} ties {second!r} to {first!r}, but they differ: a model loaded from the "
                f'folder would lose the first. Set "tie_word_embeddings" to false in its {CONFIG}.',
                file=str(self.like / CONFIG),
            )


def also_the_head(folder: Path, names: Collection[str], changed: Iterable[str]) -> str | None:
    """Return a weight that changes and that the model of a folder uses as its head, too, as no file holds one.

    Args:
        folder: The folder, which need not have a config.
        names: The names of all weights.
        changed: The names of those that change.
    """
    head, inputs = _TIES[0]
    if any(re.fullmatch(head, name) for name in names) or not (folder / CONFIG).is_file():
        return None
    tied = _config(folder).get("tie_word_embeddings") is True
    return next((name for name in changed if tied and re.fullmatch(inputs, name)), None)


def dtype_notes(tensors: Mapping[str, TensorEntry], like: Path, quantize: str | None) -> list[str]:
    """Return what to know about the dtypes of the weights, which the folder's config states, too.

    Args:
        tensors: The weights, before they are quantised.
        like: A folder of the same model.
        quantize: The setting of that name, which changes what the config says of it.
    """
    config = _config(like)
    stated = config.get("dtype", config.get("torch_dtype"))
    floats = {entry.dtype for entry in tensors.values() if "float" in entry.dtype}
    plain = all("float" in entry.dtype and itemsize(entry.dtype) > 1 for entry in tensors.values())
    if quantize is None and plain and config.get("quantization_config"):
        return [
            f"{CONFIG} has a quantization_config, and no weight is quantised: remove it, or transformers expects codes"
        ]
    if not isinstance(stated, str) or not floats or stated in floats:
        return []
    return [
        f"{CONFIG} says {stated}, and the weights are {name_list(sorted(floats), quoted=False)}: transformers may "
        "cast them"
    ]


def quantized_config(folder: Path, tensors: Mapping[str, TensorEntry], kind: str) -> bytes:
    """Return the config of a folder's model with how its weights are quantised, or without that.

    Args:
        folder: The folder whose config it is.
        tensors: The weights as they are written.
        kind: What the setting ``quantize`` says.
    """
    config = {key: value for key, value in _config(folder).items() if key != "quantization_config"}
    if kind == "fp8":
        config["quantization_config"] = quantizing.quantization_config(tensors)
    elif kind != "none":
        config["quantization_config"] = scaled_floats.quantization_config(tensors, kind)
    return (json.dumps(config, indent=2) + "\n").encode()


def _is_needless(name: str, kept: Mapping[str, TensorEntry]) -> bool:
    """Tell whether a tensor is the scale of codes that are written as numbers."""
    weight = re.sub(r"(weight_scale(_inv)?|input_scale)$", "weight", name)
    return weight != name and weight in kept and itemsize(kept[weight].dtype) > 1


def check_names(kept: Mapping[str, TensorEntry], given: set[str], like: Path) -> None:
    """Compare what will be written with the weights of a folder, if it has any.

    Args:
        kept: The tensors to write.
        given: The names of all tensors, second names of tied ones included.
        like: A folder of the same model.

    Raises:
        ConfigError: Names or shapes differ; the message says which, and what to write.
    """
    expected = _weights(like)
    if (adapted := next((name for name in kept if name not in expected and _ADAPTED.search(name)), None)) is not None:
        raise ConfigError(
            f"{adapted!r} is a name that PEFT gives to the weights of a model with an adapter, and from_pretrained "
            "does not load it from such a folder. Convert a checkpoint with recipe='peft-to-base' for the base, and "
            "with 'peft-to-adapter' for the adapter; merge-lora then merges the two.",
            config="recipe",
        )
    if not expected:
        return
    missing = [name for name in expected if name not in given and not _is_needless(name, kept)]
    unexpected = [name for name in kept if name not in expected]
    shapes = [name for name in kept if name in expected and kept[name].shape != expected[name].shape]
    problems = [
        *([f"it lacks {name_list(missing, 4)}"] if missing else []),
        *([f"it has {name_list(unexpected, 4)} besides"] if unexpected else []),
        *(f"{name!r} has shape {[*kept[name].shape]} (expected {[*expected[name].shape]})" for name in shapes[:2]),
    ]
    if problems:
        remedy = f" {codes}" if (codes := not_restored(kept)) else ""
        if not remedy and scales_of(kept):
            remedy = " Its weights are codes of 8 bits. Add quantize='none', which restores them."
        if not remedy:
            hint = closest(unexpected[0], missing) if unexpected else ""
            if prefix := common_prefix(unexpected, missing):
                hint = f" Most names match without {prefix!r}: set 'strip_prefix' to it."
            remedy = (
                f"{hint} Use a 'recipe', 'strip_prefix' or 'rename' for other names and 'exclude' for what is too "
                "much. If the model has changed on purpose, give a folder without weights as 'like'."
            )
        raise ConfigError(
            f"The checkpoint does not fit the weights in {str(like)!r}: {'; '.join(problems)}.{remedy}", config="like"
        )


def _config(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / CONFIG).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{CONFIG} is not valid JSON: {error}.", file=str(folder / CONFIG)) from None
    return content if isinstance(content, dict) else {}


def _weights(folder: Path) -> Mapping[str, TensorEntry]:
    for name in _OWN_WEIGHTS:
        if (folder / name).is_file():
            return open_layout(folder / name).tensors
    return {}
