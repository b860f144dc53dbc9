"""Searches choices of settings, the fastest first, for those that fit, and rehearses as few as possible."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from mmfsdp.errors import MmfsdpError
from mmfsdp.rehearsal.fitting.bounds import Known, sending_seconds
from mmfsdp.rehearsal.fitting.candidates import Choice
from mmfsdp.rehearsal.fitting.probing import Estimate, Prober
from mmfsdp.rehearsal.result import Rehearsal

__all__ = ["Found", "Search", "search", "search_faster"]

_EQUAL = 0.02  # by which the peak computed from short copies may differ from the whole model's
_ALIKE = 0.03  # by which another step must be faster to be looked for
_SAME = 1e-9
_AS_GOOD = 0.01  # by which the times and the memory of steps that are as good differ at most
_FOLDED = 4  # choices that are as good as others, for each one to find, after which the search ends

_Sent = tuple[Choice, float]
"""A choice, and the seconds that it sends at least."""


@dataclass(frozen=True)
class Found:
    """Settings whose step was rehearsed with the whole model."""

    choice: Choice
    estimate: Estimate
    rehearsal: Rehearsal
    as_good: tuple[Choice, ...] = ()
    """Other choices, which change time and memory by less than a hundredth."""

    def is_as_good(self, estimate: Estimate) -> bool:
        """Return whether a step differs little in its time and memory."""
        own = self.estimate
        return _near(own.seconds, estimate.seconds) and _near(own.nbytes, estimate.nbytes)


@dataclass
class Search:
    """The result of a search.

    Attributes:
        fits: Steps that fit, the fastest first; of those that are as good, the simplest.
        faster: The next faster step, which does not fit.
        smallest: The step that needs least, if nothing fits.
        invalid: Choices that are impossible for the model, with the error.
        misses: Choices that do not fit, with their seconds.
    """

    fits: list[Found] = field(default_factory=list)
    faster: Found | None = None
    smallest: Found | None = None
    invalid: list[tuple[Choice, MmfsdpError]] = field(default_factory=list)
    misses: list[tuple[float, Choice]] = field(default_factory=list)


class _MisledError(Exception):
    """Short copies of the model say something else than the model."""


def search(prober: Prober, choices: Sequence[Choice], memory: int, count: int) -> Search:
    """Find the fastest choices that fit.

    Bounds decide where they can. Choices that they leave are rehearsed with short copies of the model, the most
    promising one first; those that win, with the whole model. Choices that are as good as one that was found are noted
    with it.

    Args:
        prober: Rehearses.
        choices: What to search.
        memory: Bytes of a device.
        count: How many choices to find.

    Raises:
        MmfsdpError: No choice is possible: the first error.
    """
    result = Search()
    left = [*_possible(prober, choices, result)]
    if not left:
        raise result.invalid[0][1]
    try:
        _fill(result, prober, left, memory, count)
    except _MisledError:
        prober.distrust()
        result.fits.clear()
        _fill(result, prober, left, memory, count)
    return result


def search_faster(result: Search, prober: Prober, choices: Sequence[Choice], memory: int) -> None:
    """Put the fastest of further choices first in a result, in place of its last one, if it fits and is faster.

    Args:
        result: The result of a search that has found what fits.
        prober: Rehearses.
        choices: A few choices, all of which are rehearsed.
        memory: Bytes of a device.
    """
    rehearsed = [(prober.estimate(choice), choice) for choice, _ in _possible(prober, choices, result)]
    fitting = [(estimate.seconds, choice) for estimate, choice in rehearsed if estimate.nbytes <= memory]
    seconds, choice = min(fitting, key=lambda item: item[0], default=(float("inf"), None))
    if choice is None or seconds > result.fits[0].estimate.seconds * (1 - _ALIKE):
        return
    try:
        found = _whole(prober, choice)
        if found.estimate.nbytes <= memory:
            result.fits = [found, *result.fits[:-1]]
            result.faster = _next_faster(prober, result)
    except _MisledError:  # what was found before stays; it was rehearsed with the whole model
        prober.distrust()


def _fill(result: Search, prober: Prober, left: Sequence[_Sent], memory: int, count: int) -> None:
    known = Known(prober.device)
    misses: list[Choice] = []
    folded = 0
    heap = [(sending, index, False) for index, (_, sending) in enumerate(left)]
    heapq.heapify(heap)
    while heap and len(result.fits) < count and folded < _FOLDED * count:
        bound, index, is_rehearsed = heapq.heappop(heap)
        choice, sending = left[index]
        if is_rehearsed:
            estimate = prober.estimate(choice)
            if estimate.nbytes <= memory:
                near = next((index for index, found in enumerate(result.fits) if found.is_as_good(estimate)), None)
                if near is not None:
                    found = result.fits[near]
                    result.fits[near] = replace(found, as_good=(*found.as_good, choice))
                    folded += 1
                    continue
                found = _whole(prober, choice)
                if found.estimate.nbytes <= memory:
                    result.fits.append(found)
                    continue
        else:
            plan = prober.plan(choice)
            if max(known.memory(choice, plan), _most_sharded(prober, choice)) <= memory:
                better = max(known.seconds(choice, plan), sending)
                is_next = better <= bound * (1 + _SAME) + _SAME
                if is_next:
                    estimate = prober.estimate(choice)
                    known.learn(choice, plan, estimate)
                    better = estimate.seconds * (1 - _ALIKE)
                heapq.heappush(heap, (better, index, is_next))
                continue
        misses.append(choice)
    if result.fits:
        result.fits = sorted(
            (_simplest(prober, found, memory) for found in result.fits), key=lambda found: found.estimate.seconds
        )
        result.misses = [*_timed(prober, misses, known)]
        result.faster = _next_faster(prober, result)
    else:
        result.smallest = _smallest(prober, left, known)


def _most_sharded(prober: Prober, choice: Choice) -> int:
    """Return the bytes of this step if it shards as much as possible; 0 if not known."""
    least = replace(choice, settings={**choice.settings, "sharding": {"strategy": "FULL_SHARD"}})
    return prober.estimate(least).nbytes if prober.knows(least) else 0


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= _AS_GOOD * max(one, other)


def _simplest(prober: Prober, found: Found, memory: int) -> Found:
    """Return the choice with the fewest settings of those that are as good, the others noted with it."""
    every = sorted((found.choice, *found.as_good), key=lambda choice: choice.simplicity)
    if every[0] is not found.choice and (simplest := _whole(prober, every[0])).estimate.nbytes <= memory:
        found = simplest
    return replace(found, as_good=tuple(choice for choice in every if choice is not found.choice))


def _timed(prober: Prober, misses: Sequence[Choice], known: Known) -> Iterator[tuple[float, Choice]]:
    for choice in misses:
        if prober.knows(choice):
            yield prober.estimate(choice).seconds, choice
        elif (derived := known.derived_seconds(choice, prober.plan(choice))) is not None:
            yield derived, choice


def _next_faster(prober: Prober, result: Search) -> Found | None:
    """Return the slowest of those that are faster than the fastest that fits."""
    best = result.fits[0].estimate.seconds
    faster = [miss for miss in result.misses if miss[0] < best]
    return _whole(prober, max(faster, key=lambda miss: miss[0])[1]) if faster else None


def _possible(prober: Prober, choices: Sequence[Choice], result: Search) -> Iterator[_Sent]:
    """Yield the choices that have a plan."""
    errors: dict[str, MmfsdpError | None] = {}
    sent: dict[str, float] = {}
    for choice in choices:
        if (error := _impossible(prober, choice, errors)) is not None:
            result.invalid.append((choice, error))
            continue
        key = f"{choice.loop} {choice.plan_key}"
        if key not in sent:
            sent[key] = sending_seconds(prober.plan(choice), choice, prober.device.links)
        yield choice, sent[key]


def _impossible(prober: Prober, choice: Choice, errors: dict[str, MmfsdpError | None]) -> MmfsdpError | None:
    """Return why a choice has no plan; None if it has one. ``errors`` keeps what is known."""
    for key, plan in ((choice.plan_key, prober.plan), (choice.modules_key, prober.exact_plan)):
        if key not in errors:
            errors[key] = None
            try:
                plan(choice)
            except MmfsdpError as error:
                errors[key] = error
        if errors[key] is not None:
            return errors[key]
    return None


def _whole(prober: Prober, choice: Choice) -> Found:
    """Rehearse the whole model.

    Raises:
        _MisledError: Its peak is not the one that short copies tell.
    """
    expected = prober.estimate(choice).peak.nbytes if prober.knows(choice) else None
    estimate = prober.whole(choice)
    if expected is not None and abs(expected - estimate.peak.nbytes) > _EQUAL * estimate.peak.nbytes:
        raise _MisledError
    return Found(choice, estimate, estimate.steps[0][1])


def _smallest(prober: Prober, left: Sequence[_Sent], known: Known) -> Found:
    """Return the choice that needs least memory."""
    heap = [(known.memory(choice, prober.plan(choice)), index, False) for index, (choice, _) in enumerate(left)]
    heapq.heapify(heap)
    while True:
        bound, index, is_rehearsed = heapq.heappop(heap)
        choice = left[index][0]
        if is_rehearsed:
            return _whole(prober, choice)
        least = max(known.memory(choice, prober.plan(choice)), _most_sharded(prober, choice))
        is_next = least <= bound
        if is_next:
            estimate = prober.estimate(choice)
            known.learn(choice, prober.plan(choice), estimate)
            least = estimate.nbytes
        heapq.heappush(heap, (least, index, is_next))
