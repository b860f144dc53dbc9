"""Says what the shape of a difference suggests: a factor, some ranks, the last rows, swapped or stale values."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mmfsdp.parity.comparing.assembling import Assembled
from mmfsdp.parity.records.record_files import EACH, Key
from mmfsdp.parity.sketching.figures import Figures, cosine, distance, factor, where

__all__ = ["diagnose"]

_SURE = 0.01  # what a factor leaves, as a share
_NEAR = 0.005  # of a factor that has a name
_LAST = 0.8  # where along the first dimension the last rows begin

Run = Mapping[Key, Assembled]


def diagnose(
    key: Key, reference: Run, other: Run, worlds: tuple[int, int], limit: float
) -> tuple[str, tuple[int, ...]]:
    """Return what a difference suggests, and the ranks that are wrong if only some are.

    Args:
        key: The tensor that differs.
        reference: The reference's tensors.
        other: The same of the run that differs.
        worlds: The ranks of both runs.
        limit: How far the tensors may be apart, as a share.
    """
    one, two = reference[key], other[key]
    rows = _wrong_rows(one, two, limit)
    if rows:
        why, _ = _of_values(key, reference, other, worlds, limit)
        return f"{why}{'; ' if why else ''}only of {_ranks(rows)}", rows
    return _of_values(key, reference, other, worlds, limit)


def _of_values(
    key: Key, reference: Run, other: Run, worlds: tuple[int, int], limit: float
) -> tuple[str, tuple[int, ...]]:
    one, two = reference[key], other[key]
    a, b = one.figures, two.figures
    assert a is not None
    assert b is not None
    ranks = _wrong_ranks(a, two, limit)
    if key.kind == "setting" and key.name.startswith(EACH):
        return _of_settings(key, one, two, reference), ()
    if key.kind == "setting":
        mean = " on average" if math.prod(one.shape) > 1 else ""
        b_mean, a_mean = b.total / math.prod(two.shape), a.total / math.prod(one.shape)
        return f"the optimizer is set to {b_mean:.6g}{mean}, and to {a_mean:.6g} in the reference", ()
    if b.odd != a.odd:
        return f"{b.odd} elements are infinite or NaN, {a.odd} in the reference", ranks
    if ranks and len(ranks) < len(two.held):
        return f"only {_ranks(ranks)} {'differs' if len(ranks) == 1 else 'differ'} from the reference", ranks
    if b.square == 0:
        return "all elements are zero: the contribution is missing", ()
    if one.dtype == "int64" or not one.is_float:
        return "other data or indices", ()
    if found := _elsewhere(key, a, b, reference, limit):
        return found, ()
    best, rest = factor(a, b)
    if rest < max(_SURE, limit) and abs(best - 1) > max(limit, 1e-6) and f"{best:.4g}" != "1":
        return _named_factor(best, worlds), ()
    center, spread = where(a, b)
    if len(one.shape) > 1 and one.shape[0] > 4 and center - 2 * spread > _LAST:
        return f"only the last rows differ, around row {int(center * one.shape[0])} of {one.shape[0]}", ()
    alike = cosine(a, b)
    # A distance within which sketches of the same distribution differ by their random numbers alone.
    if key.kind == "output" and alike < 0.995 and abs(b.norm / max(a.norm, 1e-300) - 1) < 0.3:
        return "about the same size but other values: other random numbers, such as dropout, or other weights", ()
    if alike > 0.3 and b.norm < 0.98 * a.norm:
        return f"smaller, and {alike:.0%} aligned with the reference: a contribution may be missing", ()
    if alike > 0.3 and b.norm > 1.02 * a.norm:
        return f"larger, and {alike:.0%} aligned with the reference: a contribution may be counted twice", ()
    return ("" if alike > 0.9995 else f"{alike:.1%} aligned with the reference"), ()


def _of_settings(key: Key, one: Assembled, two: Assembled, reference: Run) -> str:
    """Say which parameter's setting differs, if it is only one."""
    assert one.figures is not None
    assert two.figures is not None
    center, spread = where(one.figures, two.figures)
    last = one.shape[0] - 1
    names = sorted(other.name for other in reference if (other.step, other.kind) == (key.step, "parameter"))
    if spread * last > 0.4 or len(names) != one.shape[0]:
        return "other settings of several parameters"
    apart = two.figures.total - one.figures.total
    return f"the optimizer's setting for {names[round(center * last)]!r} is {apart:+.6g} from the reference"


def _wrong_ranks(a: Figures, two: Assembled, limit: float) -> tuple[int, ...]:
    if len(two.held) < 2 or not two.apart_ranks:
        return ()
    size = max(a.norm, 1e-300)
    return tuple(rank for rank, held in two.held.items() if not distance(a, held) / size <= limit)


def _wrong_rows(one: Assembled, two: Assembled, limit: float) -> tuple[int, ...]:
    """Return the ranks whose samples alone differ: with as many ranks in the reference, or if they are not finite."""
    if one.figures is not None and not one.figures.odd and any(rows.odd for rows in two.rows.values()):
        wrong = tuple(rank for rank, rows in two.rows.items() if rows.odd)
    elif one.rows.keys() == two.rows.keys():
        size = max((rows.norm for rows in one.rows.values()), default=0.0) or 1e-300
        wrong = tuple(rank for rank, rows in two.rows.items() if not distance(one.rows[rank], rows) / size <= limit)
    else:
        return ()
    return wrong if 0 < len(wrong) < len(two.rows) else ()


def _elsewhere(key: Key, a: Figures, b: Figures, reference: Run, limit: float) -> str:
    """Say which other tensor of the reference the values belong to."""
    close = max(limit, 1e-6) * max(b.norm, 1e-300)
    shape = reference[key].shape
    if key.step > 0 and key.kind in ("parameter", "buffer", "output", "state"):
        before = reference.get(Key(key.step - 1, key.kind, key.name, key.call))
        if before is not None and before.figures is not None and distance(before.figures, b) <= close:
            return "the values of the step before: stale weights or a step that was skipped"
    for other, tensor in reference.items():
        beside = (other.step, other.kind) == (key.step, key.kind) and other != key and tensor.shape == shape
        if beside and tensor.figures is not None and distance(tensor.figures, b) <= close < distance(tensor.figures, a):
            return f"the values of {other.name!r} in the reference: swapped"
    return ""


def _named_factor(best: float, worlds: tuple[int, int]) -> str:
    n = max(worlds)
    named = {
        -1.0: "a sign",
        float(n): f"a factor of {n}, the number of ranks: summed instead of averaged",
        1 / n: f"a factor of 1/{n}, the number of ranks: averaged or divided twice",
        math.sqrt(n): f"a factor of sqrt({n}): a norm over one shard, or a mean over part of the batch",
        1 / math.sqrt(n): f"a factor of 1/sqrt({n}): a norm over one shard, or a mean over part of the batch",
    }
    for value, text in named.items():
        if (n > 1 or value == -1.0) and abs(best / value - 1) < _NEAR:
            return text
    for k in (2, 3, 4, 8, 16):
        for value, text in ((float(k), f"a factor of {k}"), (1 / k, f"a factor of 1/{k}")):
            if abs(best / value - 1) < _NEAR:
                return f"{text}, as of {k} micro-batches that are summed, or divided twice"
    return f"a factor of {best:.4g}"


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
