"""Loading a checkpoint into a sharded model: every rank reads the bytes that it needs, whoever wrote them."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch.optim import Optimizer

from mmfsdp.checkpoint.detect import open_layout
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.checkpoint.tree import map_leaves
from mmfsdp.collective import on_all_ranks, scope_of
from mmfsdp.errors import CorruptCheckpointError, FormatError, UnsafePickleError
from mmfsdp.runtime import sharded_model
from mmfsdp.state.model import load_model_state_dict
from mmfsdp.state.optimizer import load_optim_state_dict
from mmfsdp.state.report import LoadReport
from mmfsdp.state.stored import stored_tensors

__all__ = ["load_checkpoint", "read_checkpoint"]


def load_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
    safe_globals: Iterable[Any] = (),
) -> tuple[dict[str, Any], LoadReport]:
    """Load a checkpoint of any kind and world size into a sharded model. Collective: every rank.

    Args:
        path: What `save_checkpoint` wrote, a ``.pth`` of plain PyTorch (with a ``state_dict``, or bare), or a
            safetensors file.
        model: A sharded model.
        optimizer: Built from its parameters; loaded if given.
        strict: Raise if keys or shapes do not match.
        safe_globals: Classes that the file's pickle may hold besides tensors and plain data.

    Returns:
        The rest of the content, and what of the model did not match.

    Raises:
        CheckpointError: It cannot be read; raised on every rank.
        StateDictError: It does not fit; raised on every rank.
    """

    def read() -> dict[str, Any]:
        content = read_checkpoint(path, safe_globals=safe_globals)
        for key, what in (("state_dict", "weights"), ("optimizer", "optimizer state")):
            if key not in content and (key == "state_dict" or optimizer is not None):
                found = ", ".join(repr(name) for name in sorted(map(str, content))[:8]) or "nothing"
                raise FormatError(f"The checkpoint holds no {what} under {key!r}; it has {found}.", file=str(path))
        return content

    scope = scope_of(sharded_model(model).mesh)
    [content] = on_all_ranks(read, scope, share=False)
    report = load_model_state_dict(model, content.pop("state_dict"), strict=strict)
    if optimizer is not None:
        load_optim_state_dict(model, optimizer, content.pop("optimizer"))
    return content, report


def read_checkpoint(path: str | Path, *, safe_globals: Iterable[Any] = ()) -> dict[str, Any]:
    """Return a checkpoint's content with its tensors still on disk. Not collective.

    Args:
        path: See `load_checkpoint`.
        safe_globals: Classes that the file's pickle may hold besides tensors and plain data.

    Returns:
        The nested content, the weights under ``'state_dict'``. Tensors of one file are memory-mapped; those that
        ranks share are `mmfsdp.state.stored.StoredTensor`, which the loading functions take as they are.

    Raises:
        CheckpointNotFoundError: There is nothing at ``path``.
        IncompleteCheckpointError: A rank's file, or a part of a tensor, is missing.
        UnsafePickleError: The pickle holds classes that are neither safe nor in ``safe_globals``.
        FormatError: It is no checkpoint that is known.
    """
    # Whatever a pickle names is judged below, by torch's own restricted loader and the caller's list.
    layout = open_layout(path, trust=True)
    if layout.format.startswith("safetensors"):
        return {"state_dict": dict(stored_tensors(layout))}
    if layout.format not in ("torch_zip", "rank_local"):
        raise FormatError(
            f"{layout.path.name} is a checkpoint of the format {layout.format!r}, which can be converted but not "
            "loaded into a model. Write it as one file first: mmfsdp-cli convert "
            f"{layout.path.name} {layout.path.stem}_full.pth --keep all",
            file=str(layout.path),
        )
    file = layout.path / "rank0.pth" if layout.format == "rank_local" else layout.path
    content = _load(file, safe_globals)
    if not isinstance(content, dict):
        raise FormatError(f"{file.name} holds a {type(content).__name__}, not a state dict.", file=str(file))
    if layout.format == "rank_local":
        content = _with_shared(content, layout)
    if "state_dict" not in content and layout.is_flat:
        return {"state_dict": content}
    return dict(content)


def _load(file: Path, safe_globals: Iterable[Any]) -> Any:
    try:
        with torch.serialization.safe_globals(list(safe_globals)):
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).split("GLOBAL ")[-1].split(" was not")[0] if "GLOBAL" in str(error) else str(error)
        raise UnsafePickleError(
            f"{file.name} holds {reason}, which is neither tensor nor plain data. If you trust the file, pass that "
            "class in safe_globals.",
            file=str(file),
        ) from error
    except (RuntimeError, EOFError) as error:
        raise CorruptCheckpointError(f"{file.name} cannot be read: {error}", file=str(file)) from error


def _with_shared(content: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """What rank 0 holds a piece of becomes the whole."""
    boxes = content.pop("mmfsdp")["tensors"]
    stored = stored_tensors(layout)

    def replace(path: str, leaf: Any) -> Any:
        return stored[path] if path in boxes and isinstance(leaf, torch.Tensor) else leaf

    mapped: dict[str, Any] = map_leaves(content, replace)
    return mapped
