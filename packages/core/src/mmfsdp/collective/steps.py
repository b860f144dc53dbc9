"""Steps that ranks do together: a step succeeds on all ranks or raises on all, so no rank waits for one that failed."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mmfsdp.collective.channels import Channel, GlooChannel, naming_lost_ranks, wait_timeout
from mmfsdp.errors import LostRankError, MmfsdpError, ShardStateError

__all__ = [
    "Scope",
    "all_equal",
    "any_of",
    "broadcast_object",
    "count_groups_alike",
    "gather_objects",
    "gather_to_first",
    "is_group_pair",
    "new_scope",
    "on_all_ranks",
    "place_in",
    "scatter_objects",
    "scope_of",
    "shared",
]

T = TypeVar("T")

_NOBODY = 1 << 62  # more than any place


@dataclass(frozen=True)
class Scope:
    """The ranks that act together, and how they exchange messages."""

    channel: Channel
    """How they exchange messages."""
    size: int
    """Number of ranks."""
    place: int
    """This rank's place among them, in the order of the mesh; the first is 0."""

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank."""
        return self.place == 0


_scopes: dict[tuple[int, ...], tuple[Any, Scope]] = {}


def scope_of(given: Any) -> Scope:
    """Return the scope of a mesh's ranks, which is made on first use. Collective: every rank of the mesh.

    Args:
        given: A DeviceMesh, a process group, a pair of groups that span a mesh, or None for the whole world.

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
    if scope is None or world is not dist.group.WORLD:  # groups end with the world they were made in
        scope = new_scope(given)
        _scopes[ranks] = dist.group.WORLD, scope
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
        if is_part:
            count_groups_alike(_groups_of(given))
        group = dist.new_group([*ranks], timeout=wait_timeout(), backend="gloo", use_local_synchronization=is_part)
    return Scope(GlooChannel(group, ranks), len(ranks), ranks.index(dist.get_rank()))


def count_groups_alike(groups: Sequence[dist.ProcessGroup]) -> None:
    """Make all ranks of some groups members of equally many groups, before they make another one. Collective.

    torch names a group that only its own ranks make after these ranks and the number of groups that the process has. If
    these numbers differ, the ranks wait for each other forever; torch has no public way to name a group.

    Args:
        groups: The groups of a mesh; every rank of them must call this.
    """
    names = dist.distributed_c10d._world.pg_names
    most = len(names)
    for group in groups:
        counts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(counts, most, group=group)
        most = max(counts)
    while len(names) < most:
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def is_group_pair(given: Any) -> bool:
    """Return whether ``given`` is a pair of process groups."""
    return isinstance(given, Sequence) and len(given) == 2 and all(isinstance(g, dist.ProcessGroup) for g in given)


def place_in(mesh: DeviceMesh) -> int:
    """Return this rank's place in the mesh, in row-major order; the first is 0."""
    place = 0
    for size, coordinate in zip(mesh.mesh.shape, mesh.get_coordinate() or [], strict=True):
        place = place * size + coordinate
    return place


def on_all_ranks(step: Callable[[], T], scope: Scope) -> T:
    """Run ``step`` on every rank; if it fails on any, raise on all. Collective: every rank of the scope.

    Costs one reduction of eight bytes, whatever the number of ranks.

    Args:
        step: What to do. It must not be collective itself, or the others would wait in it for the rank that failed.
        scope: The ranks that take part.

    Returns:
        What ``step`` returned on this rank.

    Raises:
        MmfsdpError: An error of the same type on every rank, the type of the first rank's that failed. Where this rank
            failed with an error of that type, its own is raised. Elsewhere the message names the rank that failed.
            Errors that are no MmfsdpError, exits and interrupts are raised as they are where they occurred.
        LostRankError: A rank does not take part.
    """
    failure: BaseException | None = None
    result: Any = None
    try:
        result = step()
    except BaseException as error:
        failure = error
    first = _NOBODY if failure is None else scope.place
    try:
        [origin] = scope.channel.lowest([first])
        told = broadcast_object(scope, _portable(failure), origin=origin) if origin != _NOBODY else None
    except LostRankError:
        if failure is not None:
            raise failure from None  # this rank's own error matters more than the lost ranks
        raise
    if told is None:
        return result  # type: ignore[no-any-return]
    is_own = scope.place == origin or type(failure) is type(told) or not isinstance(failure, MmfsdpError)
    if failure is not None and is_own:
        raise failure
    # Ranks that failed in different ways agree on the first one's error; a rank's own error is its cause.
    raise type(told)(f"Rank {origin} failed: {told.message}", **{**told.context, "rank": origin}) from failure


def shared(step: Callable[[], T | None], scope: Scope) -> T:
    """Run ``step``, which acts on the first rank only, and return its result on all ranks. Collective: every rank."""
    return broadcast_object(scope, on_all_ranks(step, scope))  # type: ignore[return-value]


def broadcast_object(scope: Scope, item: T, *, origin: int = 0) -> T:
    """Return one rank's ``item`` on all. Collective: every rank of the scope.

    Args:
        scope: The ranks that take part.
        item: What to send; it must be picklable. The items of other ranks are ignored.
        origin: The place of the rank that sends.
    """
    if scope.size == 1:
        return item
    sent = scope.channel.broadcast(item if scope.place == origin else None, origin)
    return item if scope.place == origin else sent


def gather_to_first(scope: Scope, item: T) -> list[T] | None:
    """Return the items of all ranks on the first, in the order of the mesh, and None on the others. Collective.

    Every other rank sends one message, whatever the number of ranks.
    """
    if not scope.is_first:
        scope.channel.send(item, 0)
        return None
    return [item, *(scope.channel.receive(place) for place in range(1, scope.size))]


def scatter_objects(scope: Scope, items: Sequence[T] | None) -> T:
    """Return on each rank the item that the first rank has for it. Collective: every rank of the scope.

    Args:
        scope: The ranks that take part.
        items: On the first rank one item per rank, in the order of the mesh; ignored on other ranks.
    """
    if not scope.is_first:
        received: T = scope.channel.receive(0)
        return received
    assert items is not None
    for place in range(1, scope.size):
        scope.channel.send(items[place], place)
    return items[0]


def gather_objects(scope: Scope, item: T) -> list[T]:
    """Return the items of all ranks on every rank, in the order of the mesh. Collective: every rank of the scope.

    Use it for small items and for errors: each rank receives data that grows with the number of ranks.
    """
    gathered = gather_to_first(scope, item)
    return broadcast_object(scope, gathered)  # type: ignore[arg-type] # only the first rank's list counts


def all_equal(scope: Scope, text: str) -> bool:
    """Return whether ``text`` is the same on every rank. Collective: every rank of the scope.

    Costs one reduction of sixteen bytes, whatever the number of ranks.
    """
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
    lowest, highest = scope.channel.lowest([digest, -digest])
    return lowest == -highest


def any_of(scope: Scope, flag: bool) -> bool:
    """Return whether ``flag`` is true on any rank. Collective: every rank of the scope."""
    return scope.channel.lowest([-flag]) == [-1]


def _groups_of(given: Any) -> list[dist.ProcessGroup]:
    if isinstance(given, DeviceMesh):
        return [*given.get_all_groups()]
    return [given] if isinstance(given, dist.ProcessGroup) else [*given]


def _ranks_of(given: Any) -> tuple[int, ...]:
    if isinstance(given, DeviceMesh):
        return tuple(int(rank) for rank in given.mesh.flatten())
    if isinstance(given, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(given))
    if is_group_pair(given):
        return _spanned(*given)
    return tuple(range(dist.get_world_size()))


def _spanned(outer: dist.ProcessGroup, inner: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the ranks of the mesh that two groups span: all members of the inner groups of the outer group's ranks."""
    rows: list[Any] = [None] * dist.get_world_size(outer)
    with naming_lost_ranks("the ranks compared the groups they are in"):
        dist.all_gather_object(rows, dist.get_process_group_ranks(inner), group=outer)
    return tuple(sorted(rank for row in rows for rank in row))


def _portable(failure: BaseException | None) -> MmfsdpError | None:
    """Return an error that can be sent to the other ranks and that stands for ``failure`` there."""
    if failure is None:
        return None
    if not isinstance(failure, MmfsdpError):
        kind = type(failure).__name__
        if isinstance(failure, Exception):
            return MmfsdpError(f"{kind}: {failure}" if str(failure) else kind)
        return LostRankError(f"It was ended by {kind}{f' ({failure})' if str(failure) else ''} and left the others.")
    try:
        pickle.loads(pickle.dumps(failure))
    except Exception:
        return MmfsdpError(f"{type(failure).__name__}: {failure}")
    return failure
