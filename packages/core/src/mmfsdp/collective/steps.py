"""Steps that ranks do together: a step succeeds on all ranks or raises on all, so no rank waits for one that failed."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mmfsdp.basics.masking import mask_url
from mmfsdp.collective.channels import kernel_of
from mmfsdp.collective.scopes import Scope
from mmfsdp.errors import LostRankError, MmfsdpError, RankMismatchError

__all__ = [
    "all_equal",
    "any_of",
    "broadcast_object",
    "check_same_arguments",
    "gather_objects",
    "gather_to_first",
    "on_all_ranks",
    "same_path",
    "scatter_objects",
    "share_page_cache",
    "shared",
]

T = TypeVar("T")

_NOBODY = 1 << 62  # more than any rank


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
    first = _NOBODY if failure is None else scope.rank
    try:
        [origin] = scope.channel.lowest([first])
        told = broadcast_object(scope, _portable(failure), origin=origin) if origin != _NOBODY else None
    except LostRankError:
        if failure is not None:
            raise failure from None  # this rank's own error matters more than the lost ranks
        raise
    if told is None:
        return result  # type: ignore[no-any-return]
    is_own = scope.rank == origin or type(failure) is type(told) or not isinstance(failure, MmfsdpError)
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
        origin: The rank that sends, numbered in the scope.
    """
    if scope.size == 1:
        return item
    sent = scope.channel.broadcast(item if scope.rank == origin else None, origin)
    return item if scope.rank == origin else sent


def gather_to_first(scope: Scope, item: T) -> list[T] | None:
    """Return the items of all ranks on the first, in the order of the mesh, and None on the others. Collective.

    Items travel along a tree: every other rank sends one message, and no rank receives more than log2(ranks).
    """
    held, step = [pickle.dumps(item)], 1  # of this rank and those that follow it; nobody on the way reads them
    while step < scope.size:
        if scope.rank % (2 * step):
            scope.channel.send(held, scope.rank - step)
            return None
        if scope.rank + step < scope.size:
            held += scope.channel.receive(scope.rank + step)
        step *= 2
    return [item, *map(pickle.loads, held[1:])]


def scatter_objects(scope: Scope, items: Sequence[T] | None) -> T:
    """Return on each rank the item that the first rank has for it. Collective: every rank of the scope.

    Items travel along the tree of `gather_to_first`: no rank sends more than log2(ranks) messages.

    Args:
        scope: The ranks that take part.
        items: On the first rank one item per rank, in the order of the mesh; ignored on other ranks.
    """
    reach = scope.rank & -scope.rank  # how many ranks, this one included, get theirs by way of this one
    if scope.is_first:
        assert items is not None
        held, reach = list(map(pickle.dumps, items)), 1 << (scope.size - 1).bit_length()
    else:
        held = scope.channel.receive(scope.rank - reach)
    while (reach := reach // 2) > 0:
        if scope.rank + reach < scope.size:
            scope.channel.send(held[reach:], scope.rank + reach)
            del held[reach:]
    if scope.is_first:
        assert items is not None
        return items[0]
    own: T = pickle.loads(held[0])
    return own


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


def share_page_cache(scope: Scope) -> bool:
    """Return whether all ranks run on one host. Collective: every rank of the scope."""
    return all_equal(scope, kernel_of())


def same_path(path: str | os.PathLike[str], scope: Scope) -> str:
    """Return the absolute path, or the URL, that all ranks gave. Collective: every rank of the scope.

    Raises:
        RankMismatchError: Ranks gave different paths, or relative paths in different working directories.
    """
    text = str(path)
    own = text if "://" in text else os.path.abspath(text)
    if all_equal(scope, own):
        return own
    given = gather_objects(scope, own)
    other = next(rank for rank, path in enumerate(given) if path != given[0])
    raise RankMismatchError(
        f"Ranks gave different paths of a checkpoint: rank 0 {mask_url(given[0])!r}, rank {other} "
        f"{mask_url(given[other])!r}. Give the "
        "same path on every rank. If a name contains the time, make it on one rank and broadcast it."
    )


def check_same_arguments(scope: Scope, call: str, given: Mapping[str, Any]) -> None:
    """Check that all ranks made a collective call with the same arguments. Collective: every rank of the scope.

    Ranks with other arguments would take other steps, and wait for each other. Costs one reduction of sixteen bytes.

    Args:
        scope: The ranks that made the call.
        call: What was called, for the message, such as ``"save_checkpoint()"``.
        given: The arguments that decide which steps a rank takes; the same names on every rank.

    Raises:
        RankMismatchError: An argument differs; raised on every rank.
    """
    own = {name: repr(value) for name, value in given.items()}
    if all_equal(scope, repr(own)):
        return
    all_given = gather_objects(scope, own)
    first, name, other = next(
        (all_given[0], name, rank)
        for rank, theirs in enumerate(all_given)
        for name in own
        if theirs[name] != all_given[0][name]
    )
    raise RankMismatchError(
        f"Ranks called {call} with different arguments: rank 0 with {name}={first[name]}, rank {other} with "
        f"{name}={all_given[other][name]}. Call it with the same arguments on every rank."
    )


def any_of(scope: Scope, flag: bool) -> bool:
    """Return whether ``flag`` is true on any rank. Collective: every rank of the scope."""
    return scope.channel.lowest([-flag]) == [-1]


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
