"""Doing something on all ranks so that all succeed, or all raise: no rank waits for one that gave up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mmfsdp.errors import MmfsdpError, ShardStateError

__all__ = ["Scope", "gather_objects", "is_group_pair", "on_all_ranks", "place_in", "scope_of", "shared"]

T = TypeVar("T")
Scope = Sequence["dist.ProcessGroup | None"]
"""Groups through which all ranks that shard together can talk, innermost first; None is the whole world."""


def scope_of(given: Any) -> Scope:
    """Return the groups through which the ranks of a mesh can talk.

    Args:
        given: A DeviceMesh, a process group, a (shard, replicate) pair of groups, or None for the whole world.

    Raises:
        ShardStateError: ``torch.distributed`` is not initialised.
    """
    if not dist.is_initialized():
        raise ShardStateError(
            "torch.distributed is not initialised. Start the program with torchrun and call "
            "torch.distributed.init_process_group() before sharding a model."
        )
    if isinstance(given, DeviceMesh):
        return [given.get_group(dim) for dim in reversed(range(given.ndim))]
    if isinstance(given, dist.ProcessGroup):
        return [given]
    return list(given) if is_group_pair(given) else [None]


def is_group_pair(given: Any) -> bool:
    """Tell whether ``given`` is a pair of process groups."""
    return isinstance(given, Sequence) and len(given) == 2 and all(isinstance(g, dist.ProcessGroup) for g in given)


def place_in(mesh: DeviceMesh) -> int:
    """Return this rank's place in the mesh, counted row by row; the first is 0."""
    place = 0
    for size, coordinate in zip(mesh.mesh.shape, mesh.get_coordinate() or [], strict=True):
        place = place * size + coordinate
    return place


def gather_objects(scope: Scope, item: T) -> list[T]:
    """Return every rank's ``item``, in the order of the mesh. Collective: every rank of the scope."""
    gathered: list[Any] = [item]
    for group in scope:
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, gathered, group=group)
        gathered = [entry for part in parts for entry in part]
    return gathered


def on_all_ranks(step: Callable[[], T], scope: Scope, *, share: bool = True) -> list[T]:
    """Run ``step`` on every rank and return all results; if it fails on any, raise on all. Collective.

    Args:
        step: What to do. Its result must be picklable if it is shared.
        scope: Who takes part.
        share: Whether to exchange results; otherwise the list holds this rank's alone.

    Raises:
        MmfsdpError: This rank's own error, or one of the same type that names the rank that failed.
    """
    failure: MmfsdpError | None = None
    result: Any = None
    try:
        result = step()
    except MmfsdpError as error:
        failure = error
    except Exception as error:
        # Foreign errors stop the others too, and go on as they are here.
        failure = MmfsdpError(f"{type(error).__name__}: {error}")
        gather_objects(scope, (failure, None))
        raise
    outcomes: list[tuple[MmfsdpError | None, Any]] = gather_objects(scope, (failure, result if share else None))
    if failure is not None:
        raise failure
    for rank, (other, _) in enumerate(outcomes):
        if other is not None:
            raise type(other)(f"Rank {rank} failed: {other.message}", **{**other.context, "rank": rank})
    return [value for _, value in outcomes] if share else [result]


def shared(step: Callable[[], T | None], scope: Scope) -> T:
    """Run ``step``, which does something on the first rank only, and return its result on all. Collective."""
    return on_all_ranks(step, scope)[0]  # type: ignore[return-value]
