"""Draws how the time of a step grows with the number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from mmfsdp.basics.pages.axes import level_lines
from mmfsdp.basics.pages.markup import name_text, share, table, text
from mmfsdp.planning.plan_records import MeshSpec
from mmfsdp.rehearsal.recording.step_records import Collective, Operator
from mmfsdp.rehearsal.reporting.lanes import duration
from mmfsdp.rehearsal.timing.device_specs import Device
from mmfsdp.rehearsal.timing.links import Links
from mmfsdp.rehearsal.timing.step_time import StepTime, human_seconds, time_of

__all__ = ["STYLE", "scaled_times", "scaling_chart"]

_LINES = 5
_LOOKS = (  # colour, dashes of the line, corners of its dots
    ("#0072b2", "none", "50%"),
    ("#e69f00", "8 4", "0"),
    ("#009e73", "2 3", "50% 0"),
    ("#cc79a7", "10 3 2 3", "0 50%"),
)
_LABELLED = 2  # every second number of ranks has a label

Times = Mapping[int, StepTime]

_RANKS = tuple(1 << power for power in range(13))
"""1 to 4,096."""


def scaling_chart(many: Sequence[Times], names: Sequence[str]) -> str:
    """Return curves of the time of a step by the number of ranks, a band for the interval of each, and tables.

    Args:
        many: Times by number of ranks, for each rehearsal.
        names: The names of the rehearsals.
    """
    shown = [(index, times, name) for index, (times, name) in enumerate(zip(many, names, strict=True)) if times]
    if not shown:
        return "<p>A step on one rank sends nothing. Rehearse it on two ranks or more to see how it scales.</p>"
    top = 1.05 * max(time.high for _, times, _ in shown for time in times.values())
    drawn = "".join(_curve(times, top, index) for index, times, _ in shown)
    dots = "".join(_dots(times, name if many[1:] else "", top, index) for index, times, name in shown)
    labels = "".join(f'<span style="left:{_across(count) / 10:.2f}%">{count:,}</span>' for count in _RANKS[::_LABELLED])
    keys = "".join(f'<li><i class="line c{index % len(_LOOKS)}"></i>{name_text(name)}</li>' for index, _, name in shown)
    legend = f'<ul class="legend">{keys}</ul>' if many[1:] else ""
    first = min(min(times) for _, times, _ in shown)
    last = max(max(times) for _, times, _ in shown)
    said = f"Time of a step on {first:,} to {last:,} ranks"
    return (
        f'{legend}<figure class="curves"><div class="cells plot" role="group" aria-label="{said}">'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">{drawn}</svg>'
        f'{level_lines(_seconds(top))}{dots}</div><div class="ranks">{labels}</div><output class="told"></output>'
        f"<figcaption>From left to right: the number of ranks, each with the same batch. Derived from one rehearsal: "
        "what is sent goes to more ranks, and the optimizer's shards shrink. The bands are the intervals."
        f"</figcaption></figure>{''.join(_table(times, name if many[1:] else '') for _, times, name in shown)}"
    )


def _across(count: int) -> float:
    """Return the position of a number of ranks on the horizontal axis, from 0 to 1000."""
    return 20 + 960 * (count.bit_length() - 1) / (len(_RANKS) - 1)


def _curve(times: Times, top: float, index: int) -> str:
    def line(points: Sequence[tuple[int, float]]) -> str:
        return " ".join(f"{_across(count):.1f},{1000 - 1000 * seconds / top:.1f}" for count, seconds in points)

    high = [(count, time.high) for count, time in times.items()]
    low = [(count, time.low) for count, time in reversed([*times.items()])]
    usual = [(count, time.seconds) for count, time in times.items()]
    return (
        f'<polygon class="c{index % len(_LOOKS)}" points="{line([*high, *low])}"/>'
        f'<polyline class="c{index % len(_LOOKS)}" points="{line(usual)}"/>'
    )


def _dots(times: Times, name: str, top: float, index: int) -> str:
    made = []
    for count, time in times.items():
        head = f"{name}, {count:,} ranks" if name else f"{count:,} ranks"
        span = f"{human_seconds(time.low)} to {human_seconds(time.high)}"
        said = f"{head}: {human_seconds(time.seconds)} ({span}), bound by {time.bound}"
        made.append(
            f'<i class="dot c{index % len(_LOOKS)}" role="img" tabindex="-1" title="{text(said)}" '
            f'style="left:{_across(count) / 10:.2f}%;bottom:{100 * time.seconds / top:.2f}%"></i>'
        )
    return "".join(made)


def _seconds(top: float) -> Iterator[tuple[float, str]]:
    """Yield round times up to the top of a chart, as shares of it with their labels."""
    step = 1e-9
    while top / step > _LINES:
        step *= 2 if f"{step:e}"[0] != "2" else 2.5  # 1, 2, 5, 10
    for index in range(1, int(top / step) + 1):
        yield index * step / top, human_seconds(index * step)


def _table(times: Times, name: str) -> str:
    base = next(iter(times.values())).seconds
    rows = [
        (
            f"{count:,}",
            duration(time.seconds),
            f"{duration(time.low)} to {duration(time.high)}",
            duration(sum(time.exposed.values())),
            share(base, time.seconds) if time.seconds else "",
        )
        for count, time in times.items()
    ]
    fewest = "1 rank" if min(times) == 1 else f"{min(times):,} ranks"
    titles = ("ranks", "time", "interval", "communication that nothing hides", f"speed of a rank, relative to {fewest}")
    caption = f"How {name} scales" if name else "How it scales"
    return f"<details><summary>{text(caption)}: {len(rows)} rows</summary>{table(caption, titles, rows)}</details>"


def _looks() -> str:
    rules = []
    for index, (colour, dashes, corners) in enumerate(_LOOKS):
        rules.append(
            f".curves polygon.c{index}{{fill:{colour}}}.curves polyline.c{index}{{stroke:{colour};"
            f"stroke-dasharray:{dashes}}}.dot.c{index},.line.c{index}{{background-color:{colour};"
            f"border-radius:{corners}}}"
        )
    return "\n".join(rules)


STYLE = f"""
.curves .plot {{ height: 15rem; }}
.curves polyline {{ fill: none; stroke-width: 2.5; vector-effect: non-scaling-stroke; }}
.curves polygon {{ opacity: .18; }}
.curves .ranks {{ position: relative; margin-left: var(--gutter); height: 1.2rem; font-size: .75rem;
  color: var(--dim); }}
.curves .ranks span {{ position: absolute; transform: translateX(-50%); }}
.curves .dot {{ width: 11px; height: 11px; margin: 0 0 -5.5px -5.5px; border: 2px solid var(--page); }}
{_looks()}
"""


def scaled_times(
    mesh: MeshSpec,
    operators: Sequence[Operator],
    collectives: Sequence[Collective],
    device: Device,
    links: Links | None = None,
    ranks: Iterable[int] = _RANKS,
) -> dict[int, StepTime]:
    """Return the time of the same step, with the same batch per rank, on other numbers of ranks. Pure.

    Groups of ranks grow: those that shard, or, if the mesh replicates, those that average over replicas. What is
    gathered and reduced stays the same; what the optimizer and clipping read and write shrinks with the shards. Padding
    and copies of shards are left as they are.

    Args:
        mesh: The mesh of the rehearsal.
        operators: Its operators.
        collectives: Its collectives.
        device: The device.
        links: The links between ranks; default: those that the device usually has.
        ranks: The numbers of ranks. Those that a replica of the mesh does not divide are left out.

    Returns:
        Times by number of ranks; none if the rehearsal had one rank, which sends nothing.
    """
    found: dict[int, StepTime] = {}
    if mesh.world_size == 1:
        return found
    fixed = mesh.shard if mesh.replicate > 1 else 1
    for count in ranks:
        if count % fixed:
            continue
        share = mesh.shard / count if mesh.replicate == 1 else 1.0
        found[count] = time_of(
            [_with_shards(item, share) for item in operators],
            [_with_ranks(item, mesh, count) for item in collectives],
            device,
            links,
        )
    return found


def _with_shards(item: Operator, share: float) -> Operator:
    if share == 1 or not item.nbytes or not item.is_of_shards:
        return item
    return replace(item, nbytes=max(round(item.nbytes * share), 1))


def _with_ranks(item: Collective, mesh: MeshSpec, count: int) -> Collective:
    if item.ranks == mesh.world_size:
        return replace(item, ranks=count)
    if item.ranks == mesh.replicate and item.stride == mesh.shard:
        return replace(item, ranks=count // mesh.shard)
    return item
