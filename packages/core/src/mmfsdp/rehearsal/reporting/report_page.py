"""Draws one rehearsal, or several side by side, as one page of HTML that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mmfsdp.basics.pages import axes
from mmfsdp.basics.pages.frame import html_page
from mmfsdp.basics.pages.markup import name_text, section, size, table, text, verdict
from mmfsdp.errors import ConfigError
from mmfsdp.rehearsal.fakes.compiling import EAGER_INSTEAD
from mmfsdp.rehearsal.reporting import curves, lanes, looks, memory, outline, treemap
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
    machines = [device_of(device or step.device or ("cpu" if step.device_type == "cpu" else "h100")) for step in steps]
    machines = [replace(machine, links=links_of(links, machine.links)) for machine in machines]
    times = [step.time(machine) for step, machine in zip(steps, machines, strict=True)]
    scaled = [
        scaled_times(step.plan.mesh, step.operators, step.collectives, machine)
        for step, machine in zip(steps, machines, strict=True)
    ]
    longest = max(time.seconds for time in times)

    maps = treemap.treemaps(trees)

    def each(draw: Callable[[int], str], *, named: bool = True) -> str:
        heads = [f"<h3>{name_text(name)}</h3>" if steps[1:] and named else "" for name in shown]
        columns = "".join(f"<div>{head}{draw(index)}</div>" for index, head in enumerate(heads))
        return f'<div class="pair">{columns}</div>'

    parts = [
        each(
            lambda index: (
                _header(steps[index], machines[index], shown[index] if steps[1:] else "")
                + _cards(steps[index], times[index])
            ),
            named=False,
        ),
        "" if device or steps[0].device or steps[0].device_type == "cpu" else _ASSUMED,
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
            '<p class="note">Colours are modules, patterns are kinds of memory, and areas are bytes.</p>',
            each(lambda index: maps[index]),
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


def _header(step: Rehearsal, machine: Device, name: str) -> str:
    """Return whether a step fits, and what was rehearsed."""
    plan, memory = step.plan, machine.memory if step.device_type == "cuda" else 0
    state = ""
    if memory and step.device_bytes()[1] <= memory:
        state = "good"
    elif memory and not step.retries(memory).fits[1]:
        state = "bad"
    about = f"<b>{name_text(name)}</b>: a" if name else "A"
    rest = f"rank {step.rank} of {step.mesh}, {plan.strategy} with {plan.engine}, to train on {machine.name}"
    recomputed = "" if plan.activation_checkpointing is None else ", with activation checkpointing"
    offloaded = ", offloaded to the CPU" if plan.cpu_offload else ""
    line = f"{about} step of <code>{text(_model(step))}</code>, {text(rest)}{recomputed}{offloaded}."
    return verdict(state, text(step.verdict(memory or None)), f"{_gauge(step, memory)}<p>{line}</p>")


def _gauge(step: Rehearsal, memory: int) -> str:
    """Return a bar: what the process takes of a GPU for certain, what it may take, and what is left."""
    if not memory:
        return ""
    low, high = step.device_bytes()
    whole = max(memory, high)
    parts = (("least", low), ("most", high - low))
    inner = "".join(f'<b class="{kind}" style="width:{100 * nbytes / whole:.2f}%"></b>' for kind, nbytes in parts)
    return f'<i class="gauge" aria-hidden="true" style="--memory:{100 * memory / whole:.2f}%">{inner}</i>'


def _cards(step: Rehearsal, time: StepTime) -> str:
    sent = sum(item.nbytes for item in step.collectives if item.ranks > 1)
    cards = [
        (size(step.peak.nbytes), "at the peak"),
        (size(sum(step.static.values())), "between steps"),
        *([(size(step.cpu_bytes), "in CPU memory")] if step.on_cpu else []),
        (human_seconds(time.seconds), f"a step on {text(time.device)}"),
        (size(sent), "sent in the step"),
        (f"{step.plan.param_numel:,}", "parameters"),
        (f"{len(step.plan.units):,}", "shard units"),
    ]
    return f'<ul class="cards">{"".join(f"<li><b>{value}</b> {label}</li>" for value, label in cards)}</ul>'


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


_ASSUMED = '<p class="note">No device was named: times and the memory of the GPU are those of an H100.</p>'
_STYLE = """
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); gap: 0 2rem; }
.pair > div { min-width: 0; }
.gauge { display: flex; position: relative; height: .8rem; border-radius: .4rem; overflow: hidden; margin: .5rem 0;
  background: linear-gradient(90deg, var(--line) var(--memory), var(--warn) 0); }
.gauge .least { background: var(--mark); }
.gauge .most { background: repeating-linear-gradient(135deg, var(--mark) 0 3px, #0000 3px 6px); }
"""
