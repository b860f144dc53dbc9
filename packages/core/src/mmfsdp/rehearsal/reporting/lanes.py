"""Draws what runs when on the streams of a rank, and what the time of a step is spent on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mmfsdp.basics.pages.axes import phase_marks
from mmfsdp.basics.pages.markup import name_text, share, table, text
from mmfsdp.rehearsal.timing.step_time import SPENT, StepTime, human_seconds
from mmfsdp.rehearsal.timing.streams import STREAMS, Span

__all__ = ["STYLE", "duration", "spent_tables", "stream_lanes", "time_sentence"]

_MOST = 400  # spans of a stream; neighbours are joined until there are fewer
_ROWS = 12  # units whose communication is not hidden


def time_sentence(time: StepTime) -> str:
    """Return how long the step takes, within what, and what bounds it."""
    span = f"{human_seconds(time.low)} to {human_seconds(time.high)}"
    return (
        f"<p>On {text(time.device)} a step takes {duration(time.seconds)}, within {text(span)}. Most of it is "
        f"<b>{text(SPENT.get(time.bound, time.bound))}</b>. The interval covers {text(time.coverage)}.</p>"
    )


def stream_lanes(time: StepTime, longest: float) -> str:
    """Return a lane for each stream that is used, with a box for what runs on it.

    Args:
        time: The time of the step.
        longest: The seconds at the right edge, so that steps can be compared.
    """
    if not time.spans:
        return ""
    used = [stream for stream in STREAMS if any(span.stream == stream for span in time.spans)]
    lanes = []
    for stream in used:
        spans = [span for span in time.spans if span.stream == stream]
        boxes = "".join(_boxes(_joined(spans, longest), longest))
        busy = sum(span.end - span.begin for span in spans)
        title = f"{text(stream)} <small>{share(busy, time.seconds)} busy</small>"
        lanes.append(f'<div class="lane"><b>{title}</b><div class="track">{boxes}</div></div>')
    marks = phase_marks(_phases(time.spans), longest)
    return (
        f'<figure class="lanes"><div class="cells" role="group" aria-label="Streams over the step">'
        f'<div class="plot">{marks}</div>{"".join(lanes)}</div><output class="told"></output>'
        f"<figcaption>From left to right: {text(human_seconds(longest))}. Hatched boxes are communication; units "
        "alternate in colour.</figcaption></figure>"
    )


def spent_tables(time: StepTime) -> str:
    """Return tables of what the time is spent on, and of the units whose communication nothing hides."""
    rows = [
        (text(SPENT.get(name, name)), duration(seconds), share(seconds, time.seconds))
        for name, seconds in time.spent.items()
    ]
    parts = [table("What the step is spent on", ("", "time", "share"), rows)]
    exposed = sorted(time.exposed.items(), key=lambda item: -item[1])
    if exposed:
        units = [(_named(unit), duration(seconds), share(seconds, time.seconds)) for unit, seconds in exposed[:_ROWS]]
        if exposed[_ROWS:]:
            rest = sum(seconds for _, seconds in exposed[_ROWS:])
            units.append((f"{len(exposed) - _ROWS:,} more", duration(rest), share(rest, time.seconds)))
        parts.append(table("Communication that nothing hides", ("unit", "time", "share"), units))
    return f'<div class="tables">{"".join(parts)}</div>'


def _boxes(spans: Sequence[Span], longest: float) -> Iterator[str]:
    units: dict[str | None, int] = {}
    for span in spans:
        odd = units.setdefault(span.unit, len(units)) % 2
        look = " sent" if span.name != "compute" else ""
        long = human_seconds(span.end - span.begin)
        said = f"{_plain(span.unit)}: {span.name} in {span.phase}, {long}, from {human_seconds(span.begin)}"
        yield (
            f'<i class="span{" odd" if odd else ""}{look}" role="img" tabindex="-1" title="{text(said)}" '
            f'style="left:{100 * span.begin / longest:.3f}%;width:{100 * (span.end - span.begin) / longest:.3f}%"></i>'
        )


def _joined(spans: Sequence[Span], longest: float) -> list[Span]:
    """Return at most `_MOST` spans: join neighbours nearer than a pixel, then nearer than two, four, and so on."""
    near = longest / 2000
    found = [*spans]
    while len(found) > _MOST:
        made: list[Span] = []
        for span in found:
            last = made[-1] if made else None
            alike = (
                last is not None and last.phase == span.phase and (last.name == "compute") == (span.name == "compute")
            )
            if last is not None and alike and span.end - last.begin <= near:
                unit = last.unit if last.unit == span.unit else None
                made[-1] = Span(last.stream, last.name, unit, last.phase, last.begin, span.end)
            else:
                made.append(span)
        found, near = made, 2 * near
        if near > 4 * longest:
            break
    return found


def _phases(spans: Sequence[Span]) -> list[tuple[str, float]]:
    """Return the phases of the step with where each begins on the stream that computes."""
    found: list[tuple[str, float]] = []
    for span in sorted((span for span in spans if span.stream == "compute"), key=lambda span: span.begin):
        if not found or found[-1][0] != span.phase:
            found.append((span.phase, span.begin))
    return found


def duration(seconds: float) -> str:
    """Return a time with its unit. Programs read the seconds, and a pointer over it shows them."""
    return f'<data value="{seconds!r}" title="{seconds:.6g} seconds">{text(human_seconds(seconds))}</data>'


def _named(unit: str | None) -> str:
    return f"<code>{name_text(unit)}</code>" if unit else _plain(unit)


def _plain(unit: str | None) -> str:
    return "no unit" if unit is None else unit or "the root unit"


STYLE = """
.lanes .plot { height: 0; background: none; margin-left: 0; }
.lanes .plot .phase { bottom: auto; height: 1.4rem; }
.lane > b { display: block; font-size: .78rem; font-weight: 600; margin-top: .3rem; }
.lane small { font-weight: 400; }
.track { position: relative; height: 2rem; background: var(--soft); overflow: hidden; }
.span { position: absolute; top: 0; bottom: 0; min-width: 1px; background-color: #0072b2; }
.span.odd { background-color: #56b4e9; }
.span.sent { background-color: #009e73;
  background-image: repeating-linear-gradient(135deg, #0005 0 2px, #0000 2px 6px); }
.span.sent.odd { background-color: #56c4a4; }
.span:hover { filter: brightness(1.2); }
.span:focus-visible { outline: 3px solid var(--ink); outline-offset: -3px; }
"""
