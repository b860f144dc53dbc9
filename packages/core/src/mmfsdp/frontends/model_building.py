"""Builds a model by its name on a command line: an importable factory, a config, or the shapes in a checkpoint."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from mmfsdp.basics.dtypes import is_floating_point, to_torch
from mmfsdp.basics.references import resolve_reference
from mmfsdp.checkpoint import TensorEntry, open_layout
from mmfsdp.checkpoint.tree import part_tensors
from mmfsdp.errors import ConfigError, MmfsdpError
from mmfsdp.frontends.config_readers import ReadConfig, is_readable, read_config
from mmfsdp.sharding.meta import parameters_on_meta

__all__ = ["build_model", "is_config_path"]

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def is_config_path(text: str) -> bool:
    """Return whether ``text`` is the path of a config rather than a reference such as ``'package.module:factory'``."""
    return ":" not in text or Path(text).exists()


def build_model(text: str, arguments: Mapping[str, Any] | None = None) -> tuple[nn.Module, ReadConfig | None]:
    """Build a model without the memory of its parameters. Not collective.

    Args:
        text: ``'package.module:factory'``, where the factory is a class, a function or an ``nn.Module``; or the path
            of a config that an installed reader knows, such as MMEngine's, of a ``config.json`` of transformers or its
            folder, or of any checkpoint. Of a checkpoint only names and shapes are known: its model has no forward.
        arguments: Keyword arguments of the factory.

    Returns:
        The model, its parameters on the meta device, and the config that describes it, if it came from one.

    Raises:
        ConfigError: There is no such factory or config, it fails, or it does not give an ``nn.Module``.
    """
    if is_config_path(text):
        if arguments:
            raise ConfigError(f"{text!r} is a path; arguments ({', '.join(arguments)}) are for factories.")
        if (described := _config_of(text)) is not None:
            return _pretrained_model(described), None
        if Path(text).exists() and not is_readable(text):
            return _skeleton_of(text), None
        config = read_config(text)
        return config.model(), config
    try:
        factory = resolve_reference(text)
    except MmfsdpError:
        raise
    except Exception as error:  # importing the user's module may raise anything
        raise ConfigError(f"Importing {text!r} failed: {type(error).__name__}: {error}") from error
    if isinstance(factory, nn.Module) and not arguments:
        return factory, None
    if not callable(factory) or isinstance(factory, nn.Module):
        raise ConfigError(f"{text!r} is not a factory of a model, but {factory!r}. Name a class or a function.")
    try:
        with parameters_on_meta():
            model = factory(**(arguments or {}))
    except Exception as error:
        given = ", ".join(f"{name}={value!r}" for name, value in (arguments or {}).items())
        raise ConfigError(f"{text}({given}) failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{text!r} must return an nn.Module, got {model!r} (type {type(model).__name__}).")
    return model, None


def _config_of(text: str) -> Path | None:
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


def _pretrained_model(path: Path) -> nn.Module:
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


class Skeleton(nn.Module):
    """A module whose parameters a checkpoint names. It has no forward, so a step of it cannot be rehearsed."""

    def forward(self, *_: object, **__: object) -> None:
        raise ConfigError("A checkpoint has no forward. Name the model itself to rehearse a step.")


def _skeleton_of(path: str | Path) -> Skeleton:
    """Return modules with the names, shapes and dtypes of a checkpoint's weights, on the meta device.

    Running statistics of batch norm and tensors that are not floating are buffers, all others trained parameters.
    Numbered modules make a list, whose members of equal shapes have one class, so that ``wrap: auto`` finds the blocks.

    Args:
        path: Any checkpoint that `mmfsdp.checkpoint.open_layout` reads.

    Raises:
        ConfigError: The checkpoint holds no weights, or a name is both a tensor's and a module's.
        MmfsdpError: It cannot be read.
    """
    tensors = part_tensors(open_layout(path), "model")
    if not tensors:
        raise ConfigError(f"{str(path)!r} holds no weights to plan for.")
    root = Skeleton()
    _fill(root, tensors, "")
    return root


def _fill(module: nn.Module, tensors: Mapping[str, TensorEntry], prefix: str) -> None:
    below: dict[str, dict[str, TensorEntry]] = {}
    own: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        head, dot, rest = name.partition(".")
        if dot:
            below.setdefault(head, {})[rest] = entry
        else:
            own[head] = entry
    classes: dict[tuple[object, ...], type[Skeleton]] = {}
    for head, inner in below.items():
        if head in own or not head:
            raise ConfigError(f"{prefix + head!r} is the name of a tensor, and of a module with other tensors.")
        is_list = len(inner) > 1 and all(name.partition(".")[0].isdigit() and "." in name for name in inner)
        if inner.keys() <= {"weight", "bias"} and "weight" in inner and len(inner["weight"].shape) == 2:
            # As large embeddings and heads do, it may become a unit of its own.
            child: nn.Module = nn.Linear(1, 1, bias=False, device="meta")
        else:
            child = nn.ModuleList() if is_list else _class_for(inner, module, classes)()
        _fill(child, inner, f"{prefix}{head}.")
        module.add_module(head, child)
    for name, entry in own.items():
        value = torch.empty(entry.shape, dtype=to_torch(entry.dtype), device="meta")
        if name in _STATISTICS or not is_floating_point(entry.dtype):
            module.register_buffer(name, value)
        else:
            module.register_parameter(name, nn.Parameter(value))


def _class_for(
    tensors: Mapping[str, TensorEntry], parent: nn.Module, classes: dict[tuple[object, ...], type[Skeleton]]
) -> type[Skeleton]:
    """Return a class of its own for equal members of a list."""
    if not isinstance(parent, nn.ModuleList):
        return Skeleton
    shapes = tuple(_shapes(tensors))
    if shapes not in classes:
        classes[shapes] = type(f"Block{len(classes) or ''}", (Skeleton,), {})
    return classes[shapes]


def _shapes(tensors: Mapping[str, TensorEntry]) -> Iterator[object]:
    for name, entry in sorted(tensors.items()):
        yield name, tuple(entry.shape), entry.dtype
