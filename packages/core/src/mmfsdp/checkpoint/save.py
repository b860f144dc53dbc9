"""Saving a sharded model from all its ranks: whole or not at all."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mmfsdp.checkpoint.atomic import TargetExistsError, atomic_output, commit, discard, temporary_sibling
from mmfsdp.checkpoint.manifest import FileEntry, write_manifest
from mmfsdp.checkpoint.tree import map_leaves
from mmfsdp.collective import on_all_ranks, place_in, scope_of, shared
from mmfsdp.errors import CheckpointError, ConfigError, MmfsdpError, StateDictError
from mmfsdp.runtime import ShardedModel, sharded_model
from mmfsdp.state.boxes import box_of
from mmfsdp.state.model import model_state_dict
from mmfsdp.state.optimizer import optim_state_dict

__all__ = ["save_checkpoint", "write_checkpoint"]

Kind = Literal["full", "local"]


def save_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    kind: Kind = "full",
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Save a sharded model, and its optimizer. Collective: every rank.

    Args:
        path: ``full``: one ``.pth`` file that plain PyTorch loads. ``local``: a directory, a file per rank.
        model: A sharded model.
        optimizer: Built from its parameters.
        kind: ``full`` gathers on the first rank; ``local`` writes on every rank what it holds, the fastest.
        extra: More content beside ``state_dict`` and ``optimizer``, the same on every rank.
        overwrite: Replace what is there, once the new one is complete.

    Raises:
        CheckpointError: It could not be written; raised on every rank, and what was at ``path`` is untouched.
        ConfigError: ``kind`` is neither.
    """
    _check_kind(kind)
    extra = dict(extra or {})
    if taken := [key for key in ("state_dict", "optimizer", "mmfsdp") if key in extra]:
        raise ConfigError(f"extra holds {taken[0]!r}, which save_checkpoint() writes itself. Choose another key.")
    content: dict[str, Any] = {"state_dict": model_state_dict(model, "full" if kind == "full" else "sharded")}
    if optimizer is not None:
        content["optimizer"] = optim_state_dict(model, optimizer, "full" if kind == "full" else "sharded")
    write_checkpoint(path, {**content, **extra}, model, kind=kind, overwrite=overwrite)


def write_checkpoint(
    path: str | Path, content: Mapping[str, Any], model: nn.Module, *, kind: Kind = "full", overwrite: bool = True
) -> None:
    """Write content that is gathered already. Collective: every rank of the model's mesh.

    Args:
        path: A ``.pth`` file for ``full``, a directory for ``local``.
        content: Nested dicts and lists. ``full``: with whole tensors; only the first rank's is written. ``local``:
            every rank's own, DTensors where a tensor is sharded; a file per rank holds the local tensors and, under
            ``'mmfsdp'``, the box of the whole that each one is.
        model: The sharded model: its mesh says which ranks take part.
        kind: ``full`` or ``local``.
        overwrite: Replace what is there, once the new one is complete.

    Raises:
        CheckpointError: It could not be written; raised on every rank, and what was at ``path`` is untouched.
    """
    _check_kind(kind)
    state, target = sharded_model(model), Path(path)
    if kind == "full":
        _on_first(state, lambda: _write_full(target, content, overwrite))
    else:
        _write_local(target, content, state, overwrite)


def _check_kind(kind: str) -> None:
    if kind not in ("full", "local"):
        raise ConfigError(f"A checkpoint is saved as 'full' or 'local', got {kind!r}.")


def _write_full(target: Path, content: Mapping[str, Any], overwrite: bool) -> None:
    def check(path: str, leaf: Any) -> Any:
        if isinstance(leaf, DTensor):
            raise StateDictError(f"{path!r} is a shard; a full checkpoint is of whole tensors.", file=str(target))
        return leaf

    map_leaves(dict(content), check)
    with _as_checkpoint_error(target), atomic_output(target, overwrite=overwrite) as temporary:
        torch.save(dict(content), temporary)


def _write_local(target: Path, content: Mapping[str, Any], state: ShardedModel, overwrite: bool) -> None:
    scope = scope_of(state.mesh)
    rank, world_size = place_in(state.mesh), state.mesh.size()

    def begin() -> tuple[Path, str]:
        if target.exists() and not overwrite:
            raise TargetExistsError(f"{target} exists. Pass overwrite=True to replace it.", file=str(target))
        with _as_checkpoint_error(target):
            temporary = temporary_sibling(target)
            temporary.mkdir()
        return temporary, secrets.token_hex(8)

    temporary, save_id = shared(lambda: begin() if rank == 0 else None, scope)

    def write() -> FileEntry:
        path = temporary / f"rank{rank}.pth"
        with _as_checkpoint_error(path):
            torch.save(_localised(content, rank, world_size, save_id), path)
            return FileEntry.of(path)

    def finish(entries: list[FileEntry]) -> None:
        with _as_checkpoint_error(target):
            files = {f"rank{place}.pth": entry for place, entry in enumerate(entries)}
            write_manifest(temporary, save_id=save_id, world_size=world_size, files=files)
            commit(temporary, target, overwrite=overwrite)

    try:
        entries = on_all_ranks(write, scope)
        _on_first(state, lambda: finish(entries))
    except BaseException:
        if rank == 0:
            discard(temporary)
        raise


def _localised(content: Mapping[str, Any], rank: int, world_size: int, save_id: str) -> dict[str, Any]:
    boxes: dict[str, dict[str, list[int]]] = {}

    def localise(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        local = leaf
        if isinstance(leaf, DTensor):
            boxes[path] = {"shape": list(leaf.shape), "offsets": list(box_of(leaf).offsets)}
            local = leaf.to_local()
        local = local.detach().cpu()
        # A shard is a view into padded memory; torch.save would write all of it.
        if local.untyped_storage().nbytes() != local.numel() * local.element_size():
            local = local.clone()
        return local

    tree = map_leaves(dict(content), localise)
    header = {
        "format": "rank_local",
        "version": 1,
        "world_size": world_size,
        "rank": rank,
        "save_id": save_id,
        "tensors": boxes,
    }
    return {**tree, "mmfsdp": header}


def _on_first(state: ShardedModel, step: Callable[[], None]) -> None:
    first = place_in(state.mesh) == 0
    on_all_ranks(lambda: step() if first else None, scope_of(state.mesh))


class _as_checkpoint_error:  # noqa: N801 - reads as a statement
    """Whatever goes wrong (a full disk, what cannot be pickled) becomes ours, which travels and names the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, MmfsdpError):
            raise CheckpointError(
                f"Could not write {self._path.name}: {type(error).__name__}: {error}", file=str(self._path)
            ) from error
