"""Draws one rehearsal, or several side by side, as one page of HTML that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mmfsdp.basics.pages.frame import html_page
from mmfsdp.basics.pages.markup import section, size, table, text
from mmfsdp.basics.text import human_range
from mmfsdp.errors import ConfigError
from mmfsdp.rehearsal.fakes.compiling import EAGER_INSTEAD
from mmfsdp.rehearsal.reporting import axes, curves, lanes, looks, memory, outline, treemap
from mmfsdp.rehearsal.reporting.curves import scaled_times
from mmfsdp.rehearsal.reporting.modules import module_tree
from mmfsdp.rehearsal.reporting.script import SCRIPT
from mmfsdp.rehearsal.reporting.side_by_side import compared
from mmfsdp.rehearsal.result import Rehearsal
from mmfsdp.rehearsal.timing.device_names import device_of
from mmfsdp.rehearsal.timing.device_specs import Device
from mmfsdp.rehearsal.timing.links import Links, links_of
from mmfsdp.rehearsal.timing.step_time import StepTime, human_seconds

__all__ = ["report"]


def report(
    *steps: Rehearsal,
    names: Sequence[str] | None = None,
    device: str | Device | None = None,
    links: str | Links | None = None,
) -> str:
    """Return a page of HTML that shows what a step holds and when, whose it is, what runs when, and what is sent.

    The page loads nothing, and works without scripts. It follows the reader's light or dark theme, fits phones and
    paper, and its charts can be read with the keyboard.

    Args:
        steps: What `rehearse` returned. Several are shown side by side, with their differences from the first one.
        names: A name for each of several; default: ``A``, ``B``, and so on.
        device: The device for times, with the same default as in `Rehearsal.time`.
        links: How ranks are connected; default: as the device usually is.

    Raises:
        ConfigError: There is no rehearsal, not one name for each, or no such device.
    """
    if not steps:
        raise ConfigError("report() needs a rehearsal. Write report(mmfsdp.rehearse(...)).")
    shown = [_letter(index) for index in range(len(steps))] if names is None else [*names]
    if len(shown) != len(steps):
        raise ConfigError(f"names has {len(shown)} names for {len(steps)} rehearsals. Give one for each, or none.")
    trees = [module_tree(step) for step in steps]
    top = memory.top_of(steps)
    peak = max(step.peak.nbytes for step in steps) or 1
    machines = [device_of(device or step.device or ("cpu" if step.device_type == "cpu" else "h100")) for step in steps]
    machines = [replace(machine, links=links_of(links, machine.links)) for machine in machines]
    times = [step.time(machine) for step, machine in zip(steps, machines, strict=True)]
    scaled = [
        scaled_times(step.plan.mesh, step.operators, step.collectives, machine)
        for step, machine in zip(steps, machines, strict=True)
    ]
    longest = max(time.seconds for time in times)

    def each(draw: Callable[[int], str]) -> str:
        columns = [(f"<h3>{text(shown[index])}</h3>" if steps[1:] else "") + draw(index) for index in range(len(steps))]
        return f'<div class="pair">{"".join(f"<div>{column}</div>" for column in columns)}</div>'

    parts = [
        _header(steps, shown),
        each(lambda index: _cards(steps[index], times[index])),
        section("differences", "What differs", compared(steps, times, shown)) if steps[1:] else "",
        section(
            "memory",
            "Memory over the step",
            looks.legend(memory.kinds_of(steps)),
            each(
                lambda index: (
                    memory.explained(steps[index])
                    + memory.memory_chart(steps[index], f"memory{index}", top)
                    + memory.held_table(steps[index])
                )
            ),
        ),
        section(
            "bytes",
            "Whose bytes the peak is",
            each(lambda index: treemap.treemap(trees[index], steps[index].peak.nbytes / peak)),
        ),
        section("modules", "Modules", each(lambda index: outline.outline(steps[index], trees[index]))),
        section(
            "time",
            "What runs when",
            each(
                lambda index: (
                    lanes.time_sentence(times[index])
                    + lanes.stream_lanes(times[index], longest)
                    + lanes.spent_tables(times[index])
                )
            ),
        ),
        section("scaling", "How it scales", curves.scaling_chart(scaled, shown)),
        section("sent", "What is sent", each(lambda index: _sent(steps[index]))),
        section("savings", "What lowers the peak most", each(lambda index: _savings(steps[index])))
        if any(step.savings for step in steps)
        else "",
        section("notes", "Notes of the plan", each(lambda index: _notes(steps[index]))),
        "<footer>Rehearsed on fake tensors, not measured. What is taken of a GPU includes what the caching allocator "
        "keeps, the CUDA context and buffers of NCCL, but not workspaces of convolutions. Units are binary.</footer>",
    ]
    style = (
        looks.STYLE + axes.STYLE + memory.STYLE + treemap.STYLE + outline.STYLE + lanes.STYLE + curves.STYLE + _STYLE
    )
    return html_page(
        f"A step of {_model(steps[0])}", looks.patterns() + "\n".join(filter(None, parts)), style=style, script=SCRIPT
    )


def _letter(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else str(index + 1)


def _model(step: Rehearsal) -> str:
    return step.plan.root.class_name


def _header(steps: Sequence[Rehearsal], names: Sequence[str]) -> str:
    lines = []
    for step, name in zip(steps, names, strict=True):
        head = f"<b>{text(name)}</b>: " if steps[1:] else ""
        plan = step.plan
        rest = f"rank {step.rank} of {step.mesh}, {plan.strategy} with {plan.engine}, to train on {step.device_type}"
        recomputed = "" if plan.activation_checkpointing is None else ", with activation checkpointing"
        lines.append(f"<li>{head}{text(rest)}{recomputed}{', offloaded to the CPU' if plan.cpu_offload else ''}</li>")
    return (
        f'<header><h1>A step of <code>{text(_model(steps[0]))}</code></h1><ul class="plain">{"".join(lines)}</ul>'
        "</header>"
    )


def _cards(step: Rehearsal, time: StepTime) -> str:
    taken = human_range(step.device_bytes())
    sent = sum(item.nbytes for item in step.collectives if item.ranks > 1)
    cards = [
        *([(taken, "taken of the GPU")] if step.device_type == "cuda" else []),
        (size(step.peak.nbytes), "at the peak"),
        (size(sum(step.static.values())), "between steps"),
        *([(size(step.cpu_bytes), "in CPU memory")] if step.on_cpu else []),
        (human_seconds(time.seconds), f"a step on {text(time.device)}"),
        (size(sent), "sent in the step"),
        (f"{step.plan.param_numel:,}", "parameters"),
        (f"{len(step.plan.units):,}", "shard units"),
    ]
    wide = step.device_type == "cuda"  # an interval takes the room of two
    cells = len(cards) + wide
    items = [f"<li><b>{value}</b> {label}</li>" for value, label in cards]
    if wide:
        items[0] = items[0].replace("<li>", '<li class="two">', 1)
    odd = " odd" if cells % 2 else ""
    return f'<ul class="cards{odd}" style="--half:{-(-cells // 2)}">{"".join(items)}</ul>'


def _sent(step: Rehearsal) -> str:
    rows = [
        (text(name), f"{ranks:,}", f"{stride:,}", f"{count:,}", size(nbytes))
        for (name, ranks, stride), (count, nbytes) in step.sent().items()
    ]
    if not rows:
        return "<p>The rank sends nothing.</p>"
    return table("Collectives of the step", ("collective", "ranks", "stride", "number", "bytes"), rows)


def _savings(step: Rehearsal) -> str:
    items = [
        f"<li>{size(saving.nbytes)} less with {text(saving.what)}, {saving.source}:<pre>{text(saving.write)}</pre></li>"
        for saving in step.savings
    ]
    return f"<p>Each change on its own:</p><ul>{''.join(items)}</ul>" if items else "<p>Not looked for.</p>"


def _notes(step: Rehearsal) -> str:
    own = (step.short_of_memory(), EAGER_INSTEAD if step.is_eager_instead else "")
    notes = [*(note.text for note in step.plan.notes), *filter(None, own)]
    if not notes:
        return "<p>None.</p>"
    return f"<ul>{''.join(f'<li>{text(note)}</li>' for note in notes)}</ul>"


_STYLE = """
h3 { font-size: 1rem; margin: .8rem 0 .3rem; }
.plain { list-style: none; padding: 0; margin: .3rem 0; color: var(--dim); }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); gap: 0 2rem; }
.pair > div { min-width: 0; container-type: inline-size; }
.pair .cards { display: grid; grid-template-columns: repeat(var(--half), 1fr); margin: .8rem 0 0; }
.pair .cards .two, .pair .cards.odd li:last-child { grid-column: span 2; }
@container (max-width: 36rem) { .pair .cards { grid-template-columns: 1fr 1fr; } }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--dim); font-size: .85rem; padding: .2rem 0; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line); font-weight: 400;
  vertical-align: top; }
thead th { color: var(--dim); font-size: .85rem; } .num { text-align: right; white-space: nowrap; }
th code { overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border-radius: .3rem;
  background: var(--soft); padding: .5rem; font-size: .8rem; }
details > summary { cursor: pointer; }
@media (max-width: 48rem) { table { font-size: .8rem; } th, td { padding-right: .45rem; }
  th .swatch { width: .8em; height: .8em; margin-right: .25em; } }
@media print { section { break-inside: avoid-page; } }
"""
