"""Searches choices of settings, the fastest first, for those that fit, and rehearses as few as possible."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mmfsdp.errors import MmfsdpError
from mmfsdp.rehearsal.fitting.bounds import Known, sending_seconds
from mmfsdp.rehearsal.fitting.choices import Choice
from mmfsdp.rehearsal.fitting.probing import Estimate, Prober
from mmfsdp.rehearsal.result import Rehearsal

__all__ = ["Found", "Search", "search"]

_EQUAL = 0.02  # by which the peak that short copies tell may differ from that of the whole model
_ALIKE = 0.03  # by which another step must be faster to be looked for
_SAME = 1e-9

_Sent = tuple[Choice, float]
"""A choice, and the seconds that it sends at least."""


@dataclass(frozen=True)
class Found:
    """Settings whose step was rehearsed with the whole model."""

    choice: Choice
    estimate: Estimate
    rehearsal: Rehearsal


@dataclass
class Search:
    """What a search has found.

    Attributes:
        fits: Steps that fit, the fastest first.
        faster: The next faster step, which does not fit.
        smallest: The step that needs least, if nothing fits.
        invalid: Choices that are impossible for the model, with the error.
    """

    fits: list[Found] = field(default_factory=list)
    faster: Found | None = None
    smallest: Found | None = None
    invalid: list[tuple[Choice, MmfsdpError]] = field(default_factory=list)


class _MisledError(Exception):
    """Short copies of the model say something else than the model."""


def search(prober: Prober, choices: Sequence[Choice], memory: int, count: int) -> Search:
    """Find the fastest choices that fit.

    Bounds decide where they can. Choices that they leave are rehearsed with short copies of the model, the most
    promising one first; those that win, with the whole model.

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


def _fill(result: Search, prober: Prober, left: Sequence[_Sent], memory: int, count: int) -> None:
    known = Known(prober.device, prober.links)
    misses: list[Choice] = []
    heap = [(sending, place, False) for place, (_, sending) in enumerate(left)]
    heapq.heapify(heap)
    while heap and len(result.fits) < count:
        bound, place, is_rehearsed = heapq.heappop(heap)
        choice, sending = left[place]
        if is_rehearsed:
            if prober.estimate(choice).nbytes <= memory:
                found = _whole(prober, choice)
                if found.estimate.nbytes <= memory:
                    result.fits.append(found)
                    continue
        else:
            plan = prober.plan(choice)
            if known.memory(choice, plan) <= memory:
                better = max(known.seconds(choice, plan), sending)
                is_next = better <= bound * (1 + _SAME) + _SAME
                if is_next:
                    estimate = prober.estimate(choice)
                    known.learn(choice, plan, estimate)
                    better = estimate.seconds * (1 - _ALIKE)
                heapq.heappush(heap, (better, place, is_next))
                continue
        misses.append(choice)
    if result.fits:
        result.fits.sort(key=lambda found: found.estimate.seconds)
        result.faster = _next_faster(prober, result.fits[0].estimate.seconds, misses, known)
    else:
        result.smallest = _smallest(prober, left, known)


def _next_faster(prober: Prober, seconds: float, misses: Sequence[Choice], known: Known) -> Found | None:
    """Return the slowest of those that are faster than the fastest that fits."""
    near = []
    for choice in misses:
        if prober.knows(choice):
            near.append((prober.estimate(choice).seconds, choice))
        elif (derived := known.derived_seconds(choice, prober.plan(choice))) is not None:
            near.append((derived, choice))
    faster = [miss for miss in near if miss[0] < seconds]
    return _whole(prober, max(faster, key=lambda miss: miss[0])[1]) if faster else None


def _possible(prober: Prober, choices: Sequence[Choice], result: Search) -> Iterator[_Sent]:
    """Yield the choices that have a plan."""
    errors: dict[str, MmfsdpError] = {}
    sent: dict[str, float] = {}
    for choice in choices:
        try:
            if choice.plan_key in errors:
                raise errors[choice.plan_key]
            key = f"{choice.accumulate} {choice.plan_key}"
            if key not in sent:
                sent[key] = sending_seconds(prober.plan(choice), choice.accumulate, prober.links)
        except MmfsdpError as error:
            errors[choice.plan_key] = error
            result.invalid.append((choice, error))
        else:
            yield choice, sent[key]


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
    heap = [(known.memory(choice, prober.plan(choice)), place, False) for place, (choice, _) in enumerate(left)]
    heapq.heapify(heap)
    while True:
        bound, place, is_rehearsed = heapq.heappop(heap)
        choice = left[place][0]
        if is_rehearsed:
            return _whole(prober, choice)
        least = known.memory(choice, prober.plan(choice))
        is_next = least <= bound
        if is_next:
            estimate = prober.estimate(choice)
            known.learn(choice, prober.plan(choice), estimate)
            least = estimate.nbytes
        heapq.heappush(heap, (least, place, is_next))
