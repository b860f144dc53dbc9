"""Draws the memory of a rank over a step, by kind, and explains its peak."""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from mmfsdp.basics.pages.axes import level_lines, phase_marks
from mmfsdp.basics.pages.markup import exact, json_data, name_text, share, size, table, text
from mmfsdp.basics.text import human_bytes, human_range
from mmfsdp.rehearsal.recording.step_records import KINDS
from mmfsdp.rehearsal.reporting.looks import key_of
from mmfsdp.rehearsal.reporting.modules import owner_of
from mmfsdp.rehearsal.result import Rehearsal

__all__ = ["STYLE", "explained", "held_table", "kinds_of", "memory_chart", "top_of"]

_POINTS = 180
_LINES = 5  # with sizes
_ROWS = 40  # of the table of modules
_ROOM = 1.25  # of the peak; what the allocator takes above it is off the chart, which is about the curve
_EDGE = 2.0  # percent of the chart, for a band that is off it
_FAR = 60.0  # percent of the chart; a peak beyond has its label on the left
_Series = Sequence[tuple[int, dict[str, int]]]


def kinds_of(steps: Sequence[Rehearsal]) -> list[str]:
    """Return the kinds of memory of any step, in the order in which charts stack them."""
    found = {item.kind for step in steps for item in step.allocations if item.nbytes}
    return [kind for kind in KINDS if kind in found]


def top_of(steps: Sequence[Rehearsal]) -> int:
    """Return the bytes at the top of charts that can be compared."""
    peak = max(step.peak.nbytes for step in steps)
    reserved = max(max(_reserved(step)) for step in steps)
    return int(1.06 * max(1, peak, min(reserved, int(_ROOM * peak))))


def memory_chart(step: Rehearsal, chart: str, top: int) -> str:
    """Return bytes by kind over the step as stacked areas, with a slider that reads them.

    Args:
        step: The rehearsal.
        chart: An id that nothing else on the page has.
        top: The bytes at the top of the chart.
    """
    series = step.timeline(_POINTS)
    kinds = [kind for kind in KINDS if any(kind in counts for _, counts in series)]
    spots = [moment for moment, _ in series]
    begins = [begin for _, begin in step.phases]
    phases = [step.phases[max(bisect(begins, moment) - 1, 0)][0] for moment in spots]
    data = {"moments": spots, "last": step.last, "phases": phases, "top": top} | {
        "kinds": [
            {"name": kind, "key": key_of(kind), "bytes": [one.get(kind, 0) for _, one in series]} for kind in kinds
        ]
    }
    left, height = 100 * step.peak.moment / (step.last + 1), 100 * step.peak.nbytes / top
    before, low, high = f"Memory of rank {step.rank} over the step", *_reserved(step)
    said = f"{before}: it rises to {exact(step.peak.nbytes)} in {step.peak.phase}."
    band = ""
    if high:
        bottom = min(100 * low / top, 100 - _EDGE)
        thick = max(min(100 * high / top, 100) - bottom, 0.5)
        band = (
            f'<i class="band" style="bottom:{bottom:.2f}%;height:{thick:.2f}%" '
            f'title="{text(_band_text(low, high, top))}"></i>'
        )
    return (
        f'<figure class="memory" data-series="{chart}-data"><div class="plot">{phase_marks(step.phases, step.last + 1)}'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" aria-label="{text(said)}">'
        f"{_areas(series, kinds, step.last + 1, top)}</svg>{level_lines(_sizes(top))}{band}"
        f'<i class="peak{" far" if left > _FAR else ""}" style="left:{left:.2f}%;bottom:{height:.2f}%">'
        f'<span>peak {human_bytes(step.peak.nbytes)}</span></i><i class="cursor" hidden></i></div>'
        f'<label class="slide">Moment of the step<input type="range" min="0" max="{len(series) - 1}" '
        f'value="{_highest(series)}"></label><output class="reading"></output>'
        f"<figcaption>{_caption(low, high, top)}</figcaption></figure>{json_data(f'{chart}-data', data)}"
    )


def explained(step: Rehearsal) -> str:
    """Return a sentence that says when the peak is reached, and what most of it is."""
    peak = step.peak
    if not peak.nbytes:
        return "<p>The rank holds nothing.</p>"
    most = sorted(peak.by_kind.items(), key=lambda item: -item[1])[:2]
    parts = [f"{share(nbytes, peak.nbytes)} of it is <b>{text(kind)}</b>" for kind, nbytes in most]
    modules: Counter[str] = Counter()
    for name, kind, nbytes, _ in step.held():
        if kind == most[0][0]:
            modules[name] += nbytes
    name, nbytes = modules.most_common(1)[0]
    where = f" of <code>{name_text(peak.module)}</code>" if peak.module else ""
    whose = f"<code>{name_text(name)}</code>" if name else owner_of(most[0][0])
    return (
        f"<p>Rank {step.rank} holds most, {size(peak.nbytes)}, in {text(peak.phase)}{where}. {', '.join(parts)}. "
        f"Most {text(most[0][0])} belongs to {whose}: {size(nbytes)}.</p>"
    )


def held_table(step: Rehearsal) -> str:
    """Return tables of what is held at the peak: by kind, and by module."""
    peak = step.peak
    kinds = dict.fromkeys([*peak.by_kind, *step.static])
    rows = [
        (
            f'<i class="swatch k-{key_of(kind)}"></i>{text(kind)}',
            size(peak.by_kind.get(kind, 0)),
            share(peak.by_kind.get(kind, 0), peak.nbytes),
            size(step.static.get(kind, 0)),
        )
        for kind in kinds
    ]
    rows.append(("together", size(peak.nbytes), "100 %", size(sum(step.static.values()))))
    held = step.held()
    modules = [
        (f"<code>{name_text(name)}</code>" if name else owner_of(kind), text(kind), f"{count:,}", size(nbytes))
        for name, kind, nbytes, count in held[:_ROWS]
    ]
    if held[_ROWS:]:
        modules.append((f"{len(held) - _ROWS:,} more rows", "", "", size(sum(row[2] for row in held[_ROWS:]))))
    by_module = table("Held at the peak, by module", ("module", "kind", "modules", "bytes"), modules, names=2)
    return (
        table("By kind", ("kind", "at the peak", "share", "between steps"), rows)
        + f"<details><summary>Whose bytes: {len(held):,} rows by module</summary>{by_module}</details>"
    )


def _areas(series: _Series, kinds: Sequence[str], end: int, top: int) -> str:
    """Return the areas, the highest first: each covers the lower part of the one before it."""
    heights: list[list[float]] = []
    sums = [0] * len(series)
    for kind in kinds:
        sums = [low + counts.get(kind, 0) for low, (_, counts) in zip(sums, series, strict=True)]
        heights.append([1000 - 1000 * value / top for value in sums])
    # A span lasts from the middle between its moment and the one before to the middle between it and the next.
    spots = [moment for moment, _ in series]
    edges = [0.0, *((a + b) / 2 for a, b in pairwise(spots)), float(end)]
    drawn = []
    for kind, line in reversed([*zip(kinds, heights, strict=True)]):
        path, last = ["M0 1000"], None
        for begin, height in zip(edges, line, strict=False):
            if height != last:
                path.append(f"H{1000 * begin / end:.1f}V{height:.1f}")
                last = height
        drawn.append(f'<path fill="url(#fill-{key_of(kind)})" d="{"".join(path)}H1000V1000Z"/>')
    return "".join(drawn)


def _sizes(top: int) -> Iterator[tuple[float, str]]:
    """Yield round numbers of bytes up to the top of a chart, as shares of it with their labels."""
    step = 1
    while top / step > _LINES:
        step *= 2
    for nbytes in range(step, top + 1, step):
        yield nbytes / top, human_bytes(nbytes).replace(".00", "")


def _highest(series: _Series) -> int:
    totals = [sum(counts.values()) for _, counts in series]
    return totals.index(max(totals)) if totals else 0


def _reserved(step: Rehearsal) -> tuple[int, int]:
    return step.reserved() if step.device_type != "cpu" else (0, 0)


def _caption(low: int, high: int, top: int) -> str:
    steps = "From left to right: every allocation and release of the step, in order. "
    return steps + (f"The hatched band: {text(_band_text(low, high, top))}." if high else "")


def _band_text(low: int, high: int, top: int) -> str:
    span = human_range((low, high))
    beyond = ", above this chart" if low > top else ", which ends above this chart" if high > top else ""
    return f"what the caching allocator takes from the device, {span}{beyond}"


STYLE = """
.memory .plot { height: 20rem; }
.memory svg path { stroke: var(--page); stroke-width: .7; vector-effect: non-scaling-stroke; }
.band { left: 0; right: 0; border: solid var(--warn); border-width: 1px 0; min-height: 2px;
  background: repeating-linear-gradient(45deg, var(--warn) 0 1px, #0000 1px 6px); }
.plot .peak { width: 11px; height: 11px; margin: 0 0 -5.5px -5.5px; border: 2px solid var(--ink); border-radius: 50%;
  background: var(--page); pointer-events: none; }
.peak span { position: absolute; left: 12px; bottom: -4px; white-space: nowrap; font-size: .8rem; font-weight: 600;
  line-height: 1.2; padding: 0 .25rem; background: var(--page); border-radius: .2rem; }
.peak.far span { left: auto; right: 12px; }
.cursor { top: 0; border-left: 1px solid var(--ink); pointer-events: none; }
.slide { display: none; font-size: .8rem; color: var(--dim); margin-left: var(--gutter); }
.js .slide { display: block; }
.slide input { display: block; width: 100%; margin: 0; accent-color: var(--mark); }
.reading { display: flex; flex-wrap: wrap; gap: .1rem .9rem; font-size: .85rem; min-height: 3.2rem;
  align-content: flex-start; font-variant-numeric: tabular-nums; }
@container (max-width: 40rem) { .memory .plot { height: 15rem; } .reading { min-height: 6rem; } }
@media print { .js .slide { display: none; } }
"""
