"""Checks that all ranks have the same program, model and settings, and reports which rank differs in what."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NoReturn, Self, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn

from mmfsdp import __version__
from mmfsdp.basics.text import name_list
from mmfsdp.collective.channels import kernel_of
from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import all_equal, broadcast_object, gather_objects, on_all_ranks
from mmfsdp.errors import RankMismatchError
from mmfsdp.planning.fingerprints import describe
from mmfsdp.planning.schema import ShardPlan
from mmfsdp.sharding.devices import current_accelerator

__all__ = ["Agreement", "check_same_machine", "check_same_plan", "check_same_versions"]

T = TypeVar("T")


class Agreement:
    """Lets ranks that go through many steps end together when one of them fails. Collective: every rank of the scope.

    Ranks agree after each step, and once more at the end. A rank that fails in between takes part in the next
    agreement of the others, instead of leaving them to wait for it.

    Args:
        scope: The ranks that take part.

    Example:
        >>> with Agreement(scope) as agreed:  # doctest: +SKIP
        ...     for unit in units:
        ...         agreed(lambda: make(unit))
        ...         shard(unit)
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._is_over = False

    def __call__(self, step: Callable[[], T]) -> T:
        """Run ``step``, which must not be collective itself; see `on_all_ranks`."""
        try:
            return on_all_ranks(step, self._scope)
        except BaseException:
            self._is_over = True
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        def outcome() -> None:
            if error is not None:
                raise error

        if not self._is_over:
            on_all_ranks(outcome, self._scope)


def check_same_versions(scope: Scope) -> None:
    """Check that all ranks have the same versions of torch and mmfsdp. Collective: every rank of the scope.

    Raises:
        RankMismatchError: They differ; raised on every rank.
    """
    _check_same(scope, f"torch {torch.__version__}, mmfsdp {__version__}", "Install the same versions on every host.")


def check_same_machine(scope: Scope) -> None:
    """Check that ranks see devices of the same type, and on one host equally many. Collective: every rank of the scope.

    Ranks with other types would make other calls; two of one host that see other devices may choose the same one.

    Raises:
        RankMismatchError: They differ; raised on every rank.
    """
    accelerator = current_accelerator()
    count = 0 if accelerator is None else torch.accelerator.device_count()
    seen = f"{count} {accelerator} device{'s' if count > 1 else ''}" if accelerator else "no accelerator"
    if all_equal(scope, seen):
        return
    found = gather_objects(scope, (dist.get_rank(), kernel_of(), accelerator, seen))
    hosts: dict[str, set[str]] = {}
    for _, host, _, theirs in found:
        hosts.setdefault(host, set()).add(theirs)
    if len({kind for _, _, kind, _ in found}) == 1 and all(len(seen_there) == 1 for seen_there in hosts.values()):
        return
    advice = (
        "Give every process of a host equally many devices, of the same type on all hosts (look at "
        "CUDA_VISIBLE_DEVICES), or set init.device: cpu."
    )
    _refuse_different([rank for rank, *_ in found], [theirs for *_, theirs in found], advice)


def check_same_plan(model: nn.Module, plan: ShardPlan, scope: Scope) -> None:
    """Check that all ranks have equal models and plans. Collective: every rank of the scope.

    This usually takes one reduction of sixteen bytes. If ranks differ, two of them send their models or plans.

    Raises:
        RankMismatchError: They differ; raised on every rank.
    """
    text = plan.to_json(indent=None)
    if all_equal(scope, text):
        return
    found = gather_objects(scope, (dist.get_rank(), plan.fingerprint, hashlib.sha256(text.encode()).hexdigest()))
    ranks, models, settings = map(list, zip(*found, strict=True))
    if len(set(models)) > 1:
        first, second = _two_that_differ(models)
        lines = list(describe(model))
        ours, theirs = (broadcast_object(scope, lines, origin=rank) for rank in (first, second))
        only_ours = [line for line in ours if line not in set(theirs)]
        only_theirs = [line for line in theirs if line not in set(ours)]
        ours_rank, theirs_rank = ranks[first], ranks[second]
        _refuse(
            f"Ranks {ours_rank} and {theirs_rank} were given different models. "
            f"Only rank {ours_rank} has: {only_ours[:2] or 'nothing more'}; "
            f"only rank {theirs_rank} has: {only_theirs[:2] or 'nothing more'}. Build the same model on every rank.",
            ranks,
            models,
        )
    first, second = _two_that_differ(settings)
    ours_text, theirs_text = (broadcast_object(scope, text, origin=rank) for rank in (first, second))
    difference = ShardPlan.from_json(ours_text).diff(ShardPlan.from_json(theirs_text))
    _refuse(
        f"Ranks {ranks[first]} and {ranks[second]} were given different settings for the same model:\n"
        f"{difference}\nUse the same config and policy on every rank.",
        ranks,
        settings,
    )


def _check_same(scope: Scope, mine: str, advice: str) -> None:
    if all_equal(scope, mine):
        return
    ranks, found = map(list, zip(*gather_objects(scope, (dist.get_rank(), mine)), strict=True))
    _refuse_different(ranks, found, advice)


def _refuse_different(ranks: Sequence[int], found: Sequence[str], advice: str) -> NoReturn:
    told = "; ".join(f"{_listed(alike)} {text}" for text, alike in _alike(ranks, found).items())
    raise RankMismatchError(f"Ranks differ: {told}. {advice}")


def _refuse(what: str, ranks: Sequence[int], found: Sequence[str]) -> NoReturn:
    alike = "; ".join(name_list(group) for group in _alike(ranks, found).values())
    raise RankMismatchError(what + (f" Ranks that are alike: {alike}." if len(ranks) > 2 else ""))


def _two_that_differ(found: Sequence[str]) -> tuple[int, int]:
    """Return the first rank with the most common value, and the first rank with another value."""
    usual = max(found, key=found.count)
    return found.index(usual), next(rank for rank, item in enumerate(found) if item != usual)


def _alike(ranks: Sequence[int], found: Sequence[str]) -> dict[str, list[int]]:
    """Return the ranks that have each value, the most common value first."""
    groups: dict[str, list[int]] = {}
    for rank, item in zip(ranks, found, strict=True):
        groups.setdefault(item, []).append(rank)
    return dict(sorted(groups.items(), key=lambda pair: -len(pair[1])))


def _listed(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {name_list(ranks)} have"
