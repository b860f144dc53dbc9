"""Builds a transformers model from a Hugging Face folder or its ``config.json``, without its weights."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch.nn as nn

from mmfsdp.errors import ConfigError
from mmfsdp.sharding.meta import parameters_on_meta

__all__ = ["config_of", "pretrained_model"]


def config_of(text: str) -> Path | None:
    """Return the ``config.json`` of transformers that a path names, the file or its folder; None if it is another path.

    Raises:
        ConfigError: The file is not JSON.
    """
    path = Path(text)
    found = path / "config.json" if path.is_dir() else path
    if found.name != "config.json" or not found.is_file():
        return None
    try:
        content = json.loads(found.read_text())
    except ValueError as error:
        raise ConfigError(f"{str(found)!r} is not JSON: {error}", file=str(found)) from None
    return found if isinstance(content, dict) and "model_type" in content else None


def pretrained_model(path: Path) -> nn.Module:
    """Return the model that a ``config.json`` of transformers describes, its parameters on the meta device.

    It is the class that ``architectures`` names, in the dtype of the config, and it keeps no cache of keys and values,
    as in training. No file of weights is read, and no code in the folder runs.

    Raises:
        ConfigError: transformers is not installed, or cannot build the model.
    """
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"{str(path)!r} describes a model of transformers, which cannot be imported ({error}). Install it with: "
            "pip install transformers",
            file=str(path),
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(path.parent, local_files_only=True)
        config.use_cache = False
        [name, *_] = config.architectures or ["AutoModel"]
        kind = getattr(transformers, name)
        with parameters_on_meta():
            model: nn.Module = kind.from_config(config) if name == "AutoModel" else kind(config)
    except Exception as error:  # transformers may raise anything
        raise ConfigError(
            f"transformers cannot build the model of {str(path)!r}: {type(error).__name__}: {error}. If its class is "
            "not in transformers, write a factory: package.module:function.",
            file=str(path),
        ) from error
    dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    return model.train() if dtype is None else model.to(dtype).train()
