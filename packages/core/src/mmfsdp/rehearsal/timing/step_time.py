"""`StepTime`: how long a step takes on a device, as a value that prints and becomes JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mmfsdp.basics.tables import Column, format_table
from mmfsdp.planning.tables.repeats import join_repeated
from mmfsdp.rehearsal.recording.step_records import Collective, Operator
from mmfsdp.rehearsal.timing.device_specs import Device
from mmfsdp.rehearsal.timing.links import Links, collective_seconds
from mmfsdp.rehearsal.timing.ranges import CASES
from mmfsdp.rehearsal.timing.roofline import operator_seconds, weight_of
from mmfsdp.rehearsal.timing.streams import Replay, Span, Work, replay

__all__ = ["SPENT", "StepTime", "beside", "busy_device", "human_seconds", "time_of", "usual_seconds", "works_of"]

SPENT = {
    "compute": "computing, bound by FLOPs",
    "memory": "computing, bound by memory bandwidth",
    "communication": "waiting for communication",
    "launches": "waiting for the CPU to issue operators",
    "host": "the optimizer on the CPU",
}
"""The meaning of each key of `StepTime.spent`."""


@dataclass(frozen=True)
class StepTime:
    """The time of one step of one rank, as a roofline of the device and a model of the links predict it."""

    device: str
    seconds: float
    low: float
    high: float
    coverage: str
    """The uncertainty that the interval from `low` to `high` covers."""
    compute: float
    """Seconds for which the device computes."""
    exposed: Mapping[str | None, float]
    """Seconds for which computing waits for the communication of a unit; ``''`` is the root, None belongs to none."""
    bound: str
    """The largest part of the step: ``compute``, ``memory``, ``communication``, ``launches`` or ``host``."""
    spent: Mapping[str, float]
    """Seconds of the step by their bound; they add up to the step."""
    flops: int
    """Floating-point operations of the rank."""
    utilization: float
    """Share of the device's peak that they reach, each in its dtype; recomputed ones count."""
    model_utilization: float
    """The same without recomputed ones: model FLOPs utilization (MFU) as in appendix B of https://arxiv.org/abs/2204.02311,
    except that attention behind a causal mask does not count here."""
    spans: tuple[Span, ...]
    """The operations of each stream, with their times."""

    def describe(self) -> dict[str, Any]:
        """Return plain values only."""
        exposed = [{"unit": unit, "seconds": seconds} for unit, seconds in self.exposed.items()]
        others = ("device", "exposed", "spent", "spans")
        return {
            "device_name": self.device,
            **{name: value for name, value in vars(self).items() if name not in others},
            "spent": dict(self.spent),
            "exposed": exposed,
            "spans": [asdict(span) for span in self.spans],
        }

    def table(self, *, rows: int = 5, width: int | None = None) -> str:
        """Return what the step is spent on, and the units whose communication nothing hides, as aligned text.

        Args:
            rows: How many units to show.
            width: The longest line in characters; None for no limit.
        """
        span = f"{human_seconds(self.low)} to {human_seconds(self.high)}"
        lines = [f"Step on {self.device}: {human_seconds(self.seconds)} ({span}), bound by {self.bound}"]
        used = f"{_human_flops(self.flops)} per rank, {self.utilization:.0%} of the device's peak"
        is_repeating = self.model_utilization < self.utilization
        lines.append(used + (f", {self.model_utilization:.0%} without what is recomputed" if is_repeating else ""))
        spent = [
            (SPENT[name], human_seconds(seconds), f"{seconds / self.seconds:.0%}")
            for name, seconds in self.spent.items()
            if seconds >= 0.005 * self.seconds
        ]
        columns = [Column("spent on"), Column("time", right=True), Column("share", right=True)]
        lines += ["", *format_table(columns, spent, width)]
        exposed = _joined(self.exposed)
        if exposed:
            shown = [(name, human_seconds(seconds)) for name, seconds in exposed[:rows]]
            lines += ["", "Communication that nothing hides, by unit:", ""]
            lines += format_table([Column("unit", wraps=True), Column("time", right=True)], shown, width)
            if exposed[rows:]:
                rest = sum(seconds for _, seconds in exposed[rows:])
                lines.append(f"... and {human_seconds(rest)} in {len(exposed) - rows} more rows")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


def time_of(
    operators: Sequence[Operator],
    collectives: Sequence[Collective],
    device: Device,
    links: Links | None = None,
    *,
    bounds: bool = True,
) -> StepTime:
    """Return the time of a step. Pure.

    Args:
        operators: What the CPU issues, in order, collectives among them.
        collectives: The collectives, in the same order.
        device: The device.
        links: The links between ranks; default: those that the device usually has.
        bounds: Find the least and the most, too; without, both are the usual time, which takes a third to find.
    """
    cases = CASES if bounds else ("usual",)
    found = {case: _replayed(operators, collectives, device, links or device.links, case) for case in cases}
    usual = found["usual"]
    spent = {name: usual.spent[name] for name in SPENT}
    ideal = sum(item.flops / device.peak(item.dtype) for item in operators if item.flops)
    again = sum(item.flops / device.peak(item.dtype) for item in operators if item.flops and item.is_repeated)
    return StepTime(
        device=device.name,
        seconds=usual.seconds,
        low=found.get("best", usual).seconds,
        high=found.get("worst", usual).seconds,
        coverage=device.coverage,
        compute=spent["compute"] + spent["memory"],
        exposed={unit: seconds for unit, seconds in usual.exposed.items() if seconds},
        bound=max(spent, key=lambda name: spent[name]),
        spent=spent,
        flops=sum(item.flops for item in operators),
        utilization=ideal / usual.seconds if usual.seconds else 0.0,
        model_utilization=(ideal - again) / usual.seconds if usual.seconds else 0.0,
        spans=tuple(usual.spans),
    )


def usual_seconds(operators: Sequence[Operator], collectives: Sequence[Collective], device: Device) -> float:
    """Return the seconds of a step that `time_of` states, with the links that the device usually has. Pure."""
    return _replayed(operators, collectives, device, device.links, "usual").seconds


def _replayed(
    operators: Iterable[Operator], collectives: Sequence[Collective], device: Device, links: Links, case: str
) -> Replay:
    device = busy_device(collectives, device)
    return replay([*works_of(operators, collectives, device, links, case)], is_async=device.is_async)


def busy_device(collectives: Iterable[Collective], device: Device) -> Device:
    """Return a device as fast as it is in this step: by itself, if nothing goes to other ranks."""
    return device.by_itself() if all(item.ranks == 1 for item in collectives) else device


def works_of(
    operators: Iterable[Operator], collectives: Iterable[Collective], device: Device, links: Links, case: str
) -> Iterator[Work]:
    """Yield what the CPU issues, with the time that each takes. Pure.

    Args:
        operators: Operators, with as many collectives among them as ``collectives`` has.
        collectives: The collectives.
        device: The device.
        links: The links between ranks.
        case: One of `CASES`.
    """
    index = CASES.index(case)
    reached, spread = links.reached[index], device.spread[index]
    issues = {name: seconds * spread for name, seconds in device.issues.items()}
    known: dict[tuple[Any, ...], tuple[float, str, float]] = {}
    sent = iter(collectives)
    for item in operators:
        issue = issues.get(item.role, issues.get(item.phase, device.issue[index]))
        if "::" not in item.name:
            seconds = collective_seconds(next(sent), links, reached)
            yield Work(item.name, item.unit, item.phase, item.role, seconds, issue, is_sent=True)
            continue
        if item.role == "host":
            seconds = weight_of(item) * issue + item.nbytes / device.host[index]
            yield Work(item.name, item.unit, item.phase, "host", 0.0, seconds)
            continue
        key = item.name, item.shapes, item.nbytes, item.dtype
        if key not in known:
            known[key] = *operator_seconds(item, device, case), weight_of(item)
        seconds, bound, weight = known[key]
        yield Work(item.name, item.unit, item.phase, item.role, seconds, weight * issue, bound=bound)


def beside(predicted: float, measured: float, shown: Callable[[Any], str]) -> str:
    """Return a prediction, what was measured, and how much the prediction is too high, as text."""
    return f"{shown(predicted)} predicted, {shown(measured)} measured ({predicted / measured - 1:+.1%})"


def human_seconds(seconds: float) -> str:
    """Return a time with a unit: ``'4.21 ms'``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _human_flops(flops: float) -> str:
    return f"{flops / 1e15:.3g} PFLOP" if flops >= 1e15 else f"{flops / 1e12:.3g} TFLOP"


def _joined(exposed: Mapping[str | None, float]) -> list[tuple[str, float]]:
    """Return names and seconds, equal layers as one, the longest first."""
    names = {None: "(no unit)", "": "(root)"}
    items = [(names.get(unit, unit or ""), seconds) for unit, seconds in exposed.items()]
    # Neighbours wait about as long as each other, but not exactly.
    keyed = [(name, float(f"{seconds:.1g}")) for name, seconds in items]
    joined = [(same.name, sum(items[index][1] for index in same.members)) for same in join_repeated(keyed)]
    return sorted(joined, key=lambda row: -row[1])
