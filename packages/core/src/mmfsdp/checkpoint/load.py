"""Loading a checkpoint into a sharded model: every rank reads the bytes that it needs, whoever wrote them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch.optim import Optimizer

from mmfsdp.checkpoint.choosing.parts import MODEL_KEYS
from mmfsdp.checkpoint.detect import open_layout
from mmfsdp.checkpoint.layout import Chunk, Layout, TensorEntry, TensorRef
from mmfsdp.checkpoint.manifest import MANIFEST_NAME, read_manifest
from mmfsdp.checkpoint.online.loading import restricted_load, stored_content
from mmfsdp.checkpoint.tree import map_leaves
from mmfsdp.collective import on_all_ranks, scope_of
from mmfsdp.errors import CorruptCheckpointError, FormatError
from mmfsdp.runtime import sharded_model
from mmfsdp.state.model import load_model_state_dict
from mmfsdp.state.named_optimizer import renamed
from mmfsdp.state.optimizer import prepare_optim_load
from mmfsdp.state.report import LoadReport
from mmfsdp.state.stored import stored_tensors, whole_value

__all__ = ["load_checkpoint", "read_checkpoint", "reference_of"]

_OPTIMIZER_KEYS = ("optimizer", "optim")
_PREFIX = "module."


def load_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
    safe_globals: Iterable[Any] = (),
    reference: str | Path | Layout | None = None,
) -> tuple[dict[str, Any], LoadReport]:
    """Load a checkpoint of any kind and world size into a sharded model. Collective: every rank.

    Args:
        path: What `mmfsdp.checkpoint.open_layout` reads: what `save_checkpoint` wrote, a ``.pth`` of plain PyTorch
            (with a ``state_dict`` or ``model``, or bare), a directory of torch's distributed checkpoint, safetensors or
            ``.bin`` files with or without their index, or stock MMEngine's ``local``. A ``module.`` in front of all
            names is taken off.
        model: A sharded model.
        optimizer: Built from its parameters; loaded if given.
        strict: Raise if keys or shapes do not match.
        safe_globals: Classes that the file's pickle may hold besides tensors and plain data.
        reference: See `mmfsdp.checkpoint.open_layout`; by default `reference_of` the model.

    Returns:
        The rest of the content, and what of the model did not match.

    Raises:
        CheckpointError: It cannot be read; raised on every rank.
        StateDictError: It does not fit; raised on every rank, and nothing is changed.
    """
    state = sharded_model(model)

    def read() -> dict[str, Any]:
        content = read_checkpoint(path, safe_globals=safe_globals, reference=reference or reference_of(model))
        for key, what in (("state_dict", "weights"), ("optimizer", "optimizer state")):
            if key not in content and (key == "state_dict" or optimizer is not None):
                found = ", ".join(repr(name) for name in sorted(map(str, content))[:8]) or "nothing"
                raise FormatError(f"The checkpoint holds no {what} under {key!r}; it has {found}.", file=str(path))
        return _without_prefix(content, [param.fqn for param in state.plan.all_params()])

    content = on_all_ranks(read, scope_of(state.mesh))
    weights = content.pop("state_dict")
    # Whether everything fits is known before anything is changed.
    finish = prepare_optim_load(model, optimizer, content.pop("optimizer")) if optimizer is not None else None
    report = load_model_state_dict(model, weights, strict=strict)
    if finish is not None:
        finish()
    return content, report


def read_checkpoint(
    path: str | Path,
    *,
    safe_globals: Iterable[Any] = (),
    reference: str | Path | Layout | None = None,
) -> dict[str, Any]:
    """Return a checkpoint's content with its weights and optimizer state still on disk. Not collective.

    Args:
        path: See `load_checkpoint`.
        safe_globals: Classes that the file's pickle may hold besides tensors and plain data.
        reference: See `mmfsdp.checkpoint.open_layout`.

    Returns:
        The nested content, the weights under ``'state_dict'`` and the optimizer's state under ``'optimizer'``,
        whatever of the usual names they have in the checkpoint. Tensors of one ``.pth`` file are memory-mapped; others
        are `mmfsdp.state.stored.StoredTensor`, which the loading functions take as they are.

    Raises:
        CheckpointNotFoundError: There is nothing at ``path``.
        IncompleteCheckpointError: A rank's file, or a part of a tensor, is missing.
        CorruptCheckpointError: A file is damaged, or not the one that the manifest lists.
        UnsafePickleError: The pickle holds classes that are neither safe nor in ``safe_globals``.
        FormatError: It is no checkpoint that is known.
    """
    # Whatever a pickle names is judged below, by torch's own restricted loader and the caller's list.
    layout = open_layout(path, trust=True, reference=reference)
    if layout.format.startswith("safetensors"):
        return {"state_dict": dict(stored_tensors(layout))}
    if layout.format in ("torch_zip", "rank_local"):
        file = layout.path / "rank0.pth" if layout.format == "rank_local" else layout.path
        content = restricted_load(file, str(file), safe_globals)
        if layout.format == "rank_local":
            content = _with_shared(content, layout)
    else:
        if layout.format == "dcp" and (layout.path / MANIFEST_NAME).exists():
            _check_sizes(layout.path)
        content = stored_content(layout, safe_globals)
    if not isinstance(content, dict):
        raise FormatError(
            f"{layout.path.name} holds a {type(content).__name__}, not a state dict.", file=str(layout.path)
        )
    content = _with_usual_keys(dict(content), layout)
    return {key: value if _stays_on_disk(key) else _read_now(value) for key, value in content.items()}


def _check_sizes(directory: Path) -> None:
    """DCP's own metadata does not tell files of two saves apart; sizes often do, and cost nothing."""
    for name, entry in read_manifest(directory).files.items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != entry.size:
            found = f"has {path.stat().st_size} bytes" if path.is_file() else "is missing"
            raise CorruptCheckpointError(
                f"{name} {found} (expected {entry.size} by {MANIFEST_NAME}): it is damaged, or of another save.",
                file=str(path),
            )


def _with_usual_keys(content: dict[str, Any], layout: Layout) -> dict[str, Any]:
    if not isinstance(content.get("state_dict"), dict):
        if layout.is_flat:
            return {"state_dict": content}
        if len(content) == 1:  # torch's tutorial saves one object, such as {'app': {'model': ..., 'optim': ...}}
            [inner] = content.values()
            if isinstance(inner, dict) and any(isinstance(inner.get(key), dict) for key in MODEL_KEYS):
                content = dict(inner)
    for key, names in (("state_dict", MODEL_KEYS), ("optimizer", _OPTIMIZER_KEYS)):
        found = next((name for name in names if isinstance(content.get(name), dict)), key)
        if key not in content and found in content:
            content[key] = content.pop(found)
    return content


def _stays_on_disk(key: str) -> bool:
    return key == "optimizer" or str(key).endswith("state_dict")


def _read_now(value: Any) -> Any:
    return map_leaves(value, lambda _, leaf: whole_value(leaf))


def _without_prefix(content: dict[str, Any], own: list[str]) -> dict[str, Any]:
    """The content without the ``module.`` that DistributedDataParallel puts in front of every name."""
    weights = content["state_dict"]
    if any(name.startswith(_PREFIX) for name in own) or not all(str(name).startswith(_PREFIX) for name in weights):
        return content
    content = {**content, "state_dict": {name.removeprefix(_PREFIX): value for name, value in weights.items()}}
    if isinstance(content.get("optimizer"), dict):
        content["optimizer"] = renamed(content["optimizer"], _PREFIX)
    return content


def reference_of(model: nn.Module) -> Layout:
    """Return a sharded model's own names and shapes, for checkpoints that do not say them. Not collective.

    Weights that may have been in channels-last order when they were saved are left out: how they lie in a flat
    parameter cannot be told from the shape.
    """
    tensors: dict[str, TensorEntry] = {}
    for place, param in enumerate(sharded_model(model).plan.all_params()):
        if len(param.shape) in (4, 5) and param.shape[1] > 1 and math.prod(param.shape[2:]) > 1:
            continue
        whole = Chunk(Path("the model"), place, param.nbytes, (0,) * len(param.shape), param.shape)
        for name in (param.fqn, *param.aliases):
            tensors[name] = TensorEntry(name, param.dtype, param.shape, (whole,))
    return Layout(Path("the model"), "model", 1, tensors, {name: TensorRef(name) for name in tensors})


def _with_shared(content: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """What rank 0 holds a piece of becomes the whole."""
    boxes = content.pop("mmfsdp")["tensors"]
    stored = stored_tensors(layout)

    def replace(path: str, leaf: Any) -> Any:
        return stored[path] if path in boxes and isinstance(leaf, torch.Tensor) else leaf

    mapped: dict[str, Any] = map_leaves(content, replace)
    return mapped
