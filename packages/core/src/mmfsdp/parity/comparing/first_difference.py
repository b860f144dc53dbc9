"""Compares two records, and finds the first tensor in the order of computation that differs. It needs no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path

from mmfsdp.errors import ConfigError
from mmfsdp.parity.comparing.assembling import Assembled, assemble
from mmfsdp.parity.comparing.comparison import Compared, Comparison, Difference
from mmfsdp.parity.comparing.diagnosis import diagnose
from mmfsdp.parity.comparing.tolerances import EPS, Tolerances, rounded_share
from mmfsdp.parity.records.record_files import CHANGED, Entry, Key, RankRecord, read_record
from mmfsdp.parity.records.whole_tensors import differing_elements, kept_wholes, read_whole
from mmfsdp.parity.sketching.figures import distance

__all__ = ["compare"]

_Differ = Callable[..., None]
_MUST_BE_IN_BOTH = (
    "gradient before clipping",
    "gradient",
    "update",
    "state",
    "parameter",
    "initial parameter",
    "buffer",
)


def compare(
    a: str | Path, b: str | Path, *, perturbed: Sequence[str | Path] = (), rtol: float | None = None
) -> Comparison:
    """Compare two recordings of a training loop, of any numbers of ranks. Needs no torch and no ranks.

    Tensors are matched by name, step and call. The distance of two tensors is estimated from their sketches, with a
    standard error of 13 % of it.

    Args:
        a: The folder of the reference, as given to `mmfsdp.recording`.
        b: The folder of the other run.
        perturbed: Folders of runs of the reference with ``perturb=1``, ``2``, ...: how far they are from it is the
            yardstick. Three are enough. Without any, tensors may be apart by the square root of the coarsest dtype's
            precision: 3e-4 in float32, 9e-2 in bfloat16; in step k by k + 1 times as much.
        rtol: How far apart tensors may be as a share of their norm, instead of all that. It does not apply to the
            settings of the optimizer, which must be equal.

    Raises:
        CheckpointNotFoundError: A folder holds no record.
        FormatError: A file in one is not part of a record.
        ConfigError: ``rtol`` is negative.
    """
    if rtol is not None and not rtol >= 0:
        raise ConfigError(f"compare() needs rtol >= 0, got {rtol}.", config="rtol")
    records = [read_record(Path(folder)) for folder in (a, b, *perturbed)]
    one, two, *again = [assemble(record) for record in records]
    worlds = _world(records[0]), _world(records[1])
    tolerances = Tolerances(one, two, again, rtol)
    found = Comparison(str(a), str(b), worlds, notes=_notes(one, two, records[0], records[1]))
    shared = {key.step for key in one} & {key.step for key in two}
    until = min(_whole_until(record) for record in records[:2])
    for key, tensor in one.items():
        if key not in two and key.step >= until:
            found.skipped["a record ends in its step"] += key.step in shared
        elif key.step in shared:
            _compare(tensor, two.get(key), one, two, tolerances, found)
    _show_elements(
        found, [(Path(folder), kept_wholes(record)) for folder, record in zip((a, b), records, strict=False)]
    )
    _add_changed(found, (one, two), records, shared)
    for (mine, yours), keys in found.dtypes.items():
        rest = f", and so are {len(keys) - 1} more" if len(keys) > 1 else ""
        found.notes.append(f"{keys[0]} is {mine} in the reference and {yours} in the other run{rest}.")
    for key in two.keys() - one.keys():
        if key.step in shared and key.step < until and key.kind in _MUST_BE_IN_BOTH and _has(one, key):
            found.differences.append(Difference(key, None, 0.0, 0.0, 0.0, "the reference has no such tensor", (), None))
    return found


def _compare(
    tensor: Assembled, other: Assembled | None, one: dict[Key, Assembled], two: dict[Key, Assembled],
    tolerances: Tolerances, found: Comparison,
) -> None:  # fmt: skip
    key = tensor.key
    before = found.compared[-1].key if found.compared and not found.differences else None

    def differ(far: float | None, limit: float, why: str, ranks: tuple[int, ...] = ()) -> None:
        a = 0.0 if tensor.figures is None else tensor.figures.norm
        b = 0.0 if other is None or other.figures is None else other.figures.norm
        found.differences.append(Difference(key, far, limit, a, b, why, ranks, before))

    if other is None:
        if key.kind in _MUST_BE_IN_BOTH and _has(two, key):
            differ(None, 0.0, "the other run has no such tensor: a contribution is missing")
        return
    if tensor.figures is None or other.figures is None:
        if not (tensor.held and other.held and tensor.held.keys() == other.held.keys()):
            found.skipped[tensor.missing or other.missing] += 1
            return
        _own(tensor, other, tolerances, found, differ)
        return
    if tensor.shape != other.shape:
        if key.kind in _MUST_BE_IN_BOTH:
            differ(None, 0.0, f"shapes {tensor.shape} and {other.shape}")
        else:
            found.skipped["shapes differ: other batches, or no dimension of samples"] += 1
        return
    limit = tolerances.of(tensor)
    far = distance(tensor.figures, other.figures) / tolerances.size(tensor)
    together = tolerances.between_ranks(tensor)
    apart = other.apart > together and tensor.apart <= together
    if not far <= limit or apart:
        why, ranks = diagnose(key, one, two, found.worlds, limit)
        if far <= limit:
            ranks = ranks or other.apart_ranks
            which = ", ".join(map(str, ranks))
            why = f"ranks that must be equal are {other.apart:.1e} apart; wrong: {which}"
        differ(max(far, other.apart) if apart else far, limit, why, ranks)
    elif tensor.dtype != other.dtype:
        found.dtypes[tensor.dtype, other.dtype].append(key)
    found.compared.append(Compared(key, far, limit, not (far <= limit) or apart))


def _show_elements(found: Comparison, wholes: Sequence[tuple[Path, dict[Key, list[tuple[int, Entry]]]]]) -> None:
    """Add to each difference which elements differ, of tensors that both runs have kept whole."""
    for index, difference in enumerate(found.differences):
        if difference.distance is None or not all(difference.key in kept for _, kept in wholes):
            continue
        one, other = (read_whole(folder, kept[difference.key]) for folder, kept in wholes)
        if one is not None and other is not None and one.shape == other.shape:
            text = differing_elements(one, other, difference.limit)
            found.differences[index] = replace(difference, why="; ".join(filter(None, (difference.why, text))))


def _own(tensor: Assembled, other: Assembled, tolerances: Tolerances, found: Comparison, differ: _Differ) -> None:
    """Compare what each rank has for itself, if both runs have the same ranks."""
    limit = tolerances.of(tensor)
    wrong, worst = [], 0.0
    for rank, mine in tensor.held.items():
        far = distance(mine, other.held[rank]) / max(mine.norm, 1e-300)
        worst = max(worst, far)
        if not far <= limit:
            wrong.append(rank)
    if wrong:
        differ(worst, limit, f"what ranks {', '.join(map(str, wrong))} have for themselves differs", tuple(wrong))
    found.compared.append(Compared(tensor.key, worst, limit, bool(wrong)))


def _has(run: dict[Key, Assembled], key: Key) -> bool:
    """Return whether a run has tensors of a key's kind in its step, as far as it was recorded."""
    return any(other.kind == key.kind and other.step == key.step for other in run)


def _whole_until(record: Sequence[RankRecord]) -> float:
    """Return the first step that a rank may have recorded only in part, because its record ends before the run did."""
    last = [max((entry.key.step for entry in rank.entries), default=0) for rank in record if rank.cut]
    return min(last, default=math.inf)


def _world(record: Sequence[RankRecord]) -> int:
    return max(int(rank.head["world"]) for rank in record)


def _notes(
    one: dict[Key, Assembled], two: dict[Key, Assembled], a: Sequence[RankRecord], b: Sequence[RankRecord]
) -> list[str]:
    notes = []
    for name, record in (("the reference", a), ("the other run", b)):
        world = _world(record)
        missing = sorted({*range(world)} - {rank.head["rank"] for rank in record})
        if missing:
            notes.append(f"Of {name}, the files of ranks {', '.join(map(str, missing))} of {world} are missing.")
        notes += [f"Rank {rank.head['rank']} of {name}: {rank.cut}." for rank in record if rank.cut]
    for setting in ("model", "optimizer"):
        values = [record[0].head.get(setting) for record in (a, b)]
        if values[0] != values[1]:
            notes.append(f"The {setting} is {values[0]} in the reference and {values[1]} in the other run.")
    for name, mine, yours in (("the reference", one, two), ("the other run", two, one)):
        steps = {key.step for key in mine} - {key.step for key in yours}
        if steps:
            notes.append(f"Only {name} has {len(steps)} of its steps, from step {min(steps)} on.")
        only = Counter(key.kind for key in mine if key not in yours and key.step not in steps)
        only.pop("setting", None)  # the same parameters may be in other groups
        notes += [f"Only {name} has {count} tensors of kind {kind!r}." for kind, count in only.items()]
    return notes


def _add_changed(
    found: Comparison, runs: tuple[Mapping[Key, Assembled], Mapping[Key, Assembled]],
    records: Sequence[Sequence[RankRecord]], shared: Set[int],
) -> None:  # fmt: skip
    """Add, at the beginning of their step, parameters that one run changed since the step before, and the other not.

    Rounding of a few elements does not count as a change: runs that clamp weights may differ by that much.

    Args:
        found: What was found otherwise; it gets the differences.
        runs: The tensors of the reference and of the other run.
        records: What their ranks have recorded.
        shared: The steps that both have.
    """
    for (mine, other), record, text in (
        (runs, records[0], "it changed after the step before in the reference, and not in the other run"),
        (runs[::-1], records[1], "it changed after the step before, and not in the reference: stale weights or a copy"),
    ):
        changed = [key for key in mine if key.kind == CHANGED and key not in other and key.step in shared]
        if not changed:
            continue
        entries = [(rank.head["rank"], {entry.key: entry for entry in rank.entries}) for rank in record]
        for key in reversed(changed):  # each is put before those that follow it
            held = {rank: (of[key], of[left]) for rank, of in entries if key in of and (left := _left(key, of)) in of}
            if _is_rounding([*held.values()]):
                continue
            ranks = tuple(held) if len(held) < len(record) else ()
            on = f" on ranks {', '.join(map(str, ranks))} alone" if ranks else ""
            later = (at for at, item in enumerate(found.differences) if item.key.step >= key.step)
            index = next(later, len(found.differences))
            last = [item.key for item in found.compared if item.key.step < key.step] if index == 0 else []
            a, b = (
                tensor.figures.norm if (tensor := run.get(_left(key, run))) and tensor.figures else 0.0 for run in runs
            )
            difference = Difference(key, None, 0.0, a, b, f"{text}{on}", ranks, last[-1] if last else None)
            found.differences.insert(index, difference)


def _left(key: Key, run: Container[Key]) -> Key:
    """Return the key of what the step before has left: a parameter may have several updates in it."""
    found = Key(key.step - 1, "parameter", key.name, 0)
    while (later := replace(found, call=found.call + 1)) in run:
        found = later
    return found


def _is_rounding(held: Sequence[tuple[Entry, Entry]]) -> bool:
    """Return whether a parameter changed by no more than rounding a few elements; of ranks' parts now and before."""
    if not held:
        return False
    far = math.hypot(*(distance(now.figures, before.figures) for now, before in held))
    norm = math.hypot(*(before.figures.norm for _, before in held))
    count = sum(math.prod(now.sizes) for now, _ in held)
    return far <= rounded_share(EPS.get(held[0][0].dtype, 0.0), count) * norm
