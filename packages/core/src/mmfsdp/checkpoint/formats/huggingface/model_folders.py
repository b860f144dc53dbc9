"""Makes a Hugging Face folder: its config, the files beside the weights, and the names of files."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmfsdp.basics.arguments import argument
from mmfsdp.basics.descriptors import is_remote
from mmfsdp.basics.dtypes import itemsize
from mmfsdp.basics.text import name_list
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.failed_downloads import stand_in
from mmfsdp.checkpoint.files.disk import at_home, checkpoint_path, is_offered, permission_errors
from mmfsdp.checkpoint.formats.common.source import MODEL_STEMS
from mmfsdp.checkpoint.formats.eight_bit.scaled_floats import quantization_config
from mmfsdp.checkpoint.integrity import inside
from mmfsdp.errors import ConfigError

__all__ = [
    "CONFIG",
    "companions",
    "dtype_notes",
    "like_folder",
    "quantized_config",
    "read_config",
    "weights_stem",
]

CONFIG = "config.json"
_MOST_TRIED = 100  # folders, for an error message
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
    for folder in [checkpoint_path(given)] if given is not None else [source, target]:
        with permission_errors(folder):
            if (folder / CONFIG).is_file():
                return folder
    if given is not None:
        raise ConfigError(
            f"{argument('like')} is {given!r}, which holds no {CONFIG}. Give a Hugging Face "
            f"folder.{at_home(Path(given))}",
            config="like",
        )
    raise ConfigError(
        f"{what} needs a {CONFIG}, and there is none in {str(source)!r}. Give a folder of the same model as "
        f"{argument('like')}{_near(source)}; its configuration and tokenizer are copied.",
        config="like",
    )


def _near(source: Path) -> str:
    """Return, for an error message, a folder with a config that lies within a checkpoint or above it."""
    with contextlib.suppress(OSError):
        within = [path for path in sorted(source.iterdir()) if path.is_dir()] if source.is_dir() else []
        for folder in (*within[:_MOST_TRIED], source.parent):
            if (folder / CONFIG).is_file():
                return f", such as {str(folder)!r}"
    return ""


def companions(like: Path, target: Path | None) -> dict[str, Path]:
    """Return the files beside the weights that the folder gets, by name: files of ``like``, and those there already.

    Args:
        like: A folder of the same model.
        target: What is replaced, if anything.

    Raises:
        ConfigError: The target holds a folder, which would be lost.
        FormatError: A file of ``like`` is a link out of it: what is there is not the model's to give away.
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
    if is_remote(like):
        paths |= {name: like / name for name in _COMPANIONS if name not in paths}
    for _, path in sorted(paths.items()):
        # The hub's cache holds links, to its own files. Hidden files belong to where they are.
        if is_offered(path) and not _WEIGHTS.fullmatch(path.name) and not path.name.startswith("."):
            found[path.name] = path if is_remote(path) else inside(like, path.name, like)
    return found


def weights_stem(like: Path) -> str:
    """Return what the names of a folder's weights begin with, so that the library of its config finds them.

    Args:
        like: A folder of the same model. diffusers states its release in every config that it writes.
    """
    return MODEL_STEMS["_diffusers_version" in read_config(like)]


def dtype_notes(tensors: Mapping[str, TensorEntry], like: Path, quantize: str | None) -> list[str]:
    """Return what to know about the dtypes of the weights, which the folder's config states, too.

    Args:
        tensors: The weights, before they are quantised.
        like: A folder of the same model.
        quantize: The setting of that name, which changes what the config says of it.
    """
    config = read_config(like)
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
    config = {key: value for key, value in read_config(folder).items() if key != "quantization_config"}
    if kind != "none":
        config["quantization_config"] = quantization_config(tensors, kind)
    return (json.dumps(config, indent=2) + "\n").encode()


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config of a folder's model.

    Raises:
        ConfigError: It is not valid JSON.
    """
    try:
        content = json.loads((folder / CONFIG).read_bytes())
    except (ValueError, RecursionError) as error:
        found = stand_in(folder / CONFIG)
        reason = f"{CONFIG} is not valid JSON: {error}." if found is None else found.message
        raise ConfigError(reason, file=str(folder / CONFIG)) from None
    return content if isinstance(content, dict) else {}
