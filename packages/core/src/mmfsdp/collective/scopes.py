"""Finds the ranks that act together, and gives them a group of their own to exchange messages."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mmfsdp.basics.torch_releases import counted_groups, counts_every_group
from mmfsdp.collective.channels import Channel, GlooChannel, naming_lost_ranks, wait_timeout
from mmfsdp.errors import ShardStateError

__all__ = ["Scope", "World", "count_groups_alike", "is_group_pair", "new_scope", "rank_in", "scope_of", "spanned_rows"]


@dataclass(frozen=True)
class Scope:
    """The ranks that act together, and how they exchange messages."""

    channel: Channel
    """How they exchange messages."""
    size: int
    """Number of ranks."""
    rank: int
    """This rank among them, numbered in the order of the mesh; the first is 0."""

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank."""
        return self.rank == 0


class World:
    """The world that was initialised when this object was made. It does not keep the world's groups alive."""

    def __init__(self) -> None:
        self._group = weakref.ref(dist.group.WORLD)

    def is_current(self) -> bool:
        """Return whether that world still exists. Groups end with the world they were made in. Not collective."""
        return dist.is_initialized() and self._group() is dist.group.WORLD


_scopes: dict[tuple[int, ...], tuple[World, Scope]] = {}


def scope_of(given: Any) -> Scope:
    """Return the scope of a mesh's ranks, which is made on first use. Collective: every rank of the mesh.

    Args:
        given: A DeviceMesh, a process group, a pair of groups that span a mesh, or axes or None: the whole world.

    Raises:
        ShardStateError: ``torch.distributed`` is not initialised.
        LostRankError: A rank does not take part.
    """
    if not dist.is_initialized():
        raise ShardStateError(
            "torch.distributed is not initialised. Start the program with torchrun and call "
            "torch.distributed.init_process_group() before sharding a model."
        )
    ranks = _ranks_of(given)
    world, scope = _scopes.get(ranks, (None, None))
    if world is None or scope is None or not world.is_current():
        scope = new_scope(given)
        _scopes[ranks] = World(), scope
    return scope


def new_scope(given: Any) -> Scope:
    """Return a scope with a group of its own, for work beside other collectives. Collective: every rank of it.

    Args:
        given: See `scope_of`.

    Raises:
        LostRankError: A rank does not take part.
    """
    ranks = _ranks_of(given)
    is_part = len(ranks) < dist.get_world_size()
    with naming_lost_ranks("ranks met for the first time"):
        if is_part or counts_every_group():
            count_groups_alike(_groups_of(given))
        group = dist.new_group([*ranks], timeout=wait_timeout(), backend="gloo", use_local_synchronization=is_part)
    return Scope(GlooChannel(group, ranks), len(ranks), ranks.index(dist.get_rank()))


def count_groups_alike(groups: Sequence[dist.ProcessGroup]) -> None:
    """Make all ranks of some groups count equally many groups, before they make another one. Collective.

    torch names a group that only its own ranks make after these ranks and the number of groups that the process counts.
    If these numbers differ, the ranks wait for each other forever; torch has no public way to name a group.

    Args:
        groups: The groups of a mesh; every rank of them must call this.
    """
    most = counted_groups()
    for group in groups:
        counts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(counts, most, group=group)
        most = max(counts)
    while counted_groups() < most:
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def is_group_pair(given: Any) -> bool:
    """Return whether ``given`` is a pair of process groups."""
    return isinstance(given, Sequence) and len(given) == 2 and all(isinstance(g, dist.ProcessGroup) for g in given)


def spanned_rows(outer: dist.ProcessGroup, inner: dist.ProcessGroup) -> list[list[int]]:
    """Return the mesh that two groups span: for each rank of the outer group, its inner group. Collective: its ranks.

    Raises:
        LostRankError: A rank does not take part.
    """
    rows: list[Any] = [None] * dist.get_world_size(outer)
    with naming_lost_ranks("the ranks compared the groups they are in"):
        dist.all_gather_object(rows, dist.get_process_group_ranks(inner), group=outer)
    return rows


def rank_in(mesh: DeviceMesh) -> int:
    """Return this rank's number in the mesh, in row-major order; the first is 0."""
    rank = 0
    for size, coordinate in zip(mesh.shape, mesh.get_coordinate() or [], strict=True):
        rank = rank * size + coordinate
    return rank


def _groups_of(given: Any) -> list[dist.ProcessGroup]:
    if given is None or isinstance(given, Mapping):  # named axes are those of the whole world
        assert dist.group.WORLD is not None  # `scope_of` has checked it
        return [dist.group.WORLD]
    if isinstance(given, DeviceMesh):
        return [*given.get_all_groups()]
    return [given] if isinstance(given, dist.ProcessGroup) else [*given]


def _ranks_of(given: Any) -> tuple[int, ...]:
    if isinstance(given, DeviceMesh):
        return tuple(int(rank) for rank in given.mesh.flatten())
    if isinstance(given, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(given))
    if is_group_pair(given):
        return tuple(sorted(rank for row in spanned_rows(*given) for rank in row))
    return tuple(range(dist.get_world_size()))
