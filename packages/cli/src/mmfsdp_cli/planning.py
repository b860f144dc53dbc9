"""``mmfsdp-cli plan``: shows how a model would be sharded, for any number of ranks, without starting one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mmfsdp_cli.charts import bar_chart
from mmfsdp_cli.console import reporting_errors, say, say_lines, terminal_width
from mmfsdp_cli.fitting import print_fit
from mmfsdp_cli.help import Command, argument
from mmfsdp_cli.measuring import measured, ranks_at_hand, together
from mmfsdp_cli.modelling import key_values, model_of
from mmfsdp_cli.options import (
    PATH,
    completing,
    config_file,
    flag,
    json_report,
    limit,
    model_arguments,
    option,
    ranks,
    several,
)
from mmfsdp_cli.plans import memory_of, planned, print_plan, settings_of
from mmfsdp_cli.rehearsing import advised, rehearsed, step_of, timeline_chart
from mmfsdp_cli.reporting import free_target, write_report

if TYPE_CHECKING:
    import torch.nn as nn

    from mmfsdp import ShardPlan
    from mmfsdp.frontends import TrainingStep
    from mmfsdp.rehearsal import Measured

__all__ = ["plan_command"]

_VIEW = "What to show"


def _devices() -> Iterable[str]:
    from mmfsdp.rehearsal import devices

    return devices()


def _optimizers() -> Iterable[str]:
    from mmfsdp.planning import OPTIMIZERS

    return OPTIMIZERS


def _samples(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    if value is None or value == "own" or (value.isdecimal() and int(value) > 0):
        return value
    raise click.BadParameter(f"{value!r} is neither a number of samples nor 'own'.")


@click.command("plan", cls=Command)
@argument(
    "model", help="package.module:factory, or the path of an MMEngine config, a Hugging Face folder or a checkpoint."
)
@model_arguments
@ranks("Model", "Number of ranks to plan for, 8 by default")
@config_file("Settings as JSON, TOML or YAML; by default those of an MMEngine config, if MODEL is one.")
@several(
    "--set",
    "changes",
    section="Settings",
    metavar="PATH=VALUE",
    help='One setting: sharding.strategy=NO_SHARD, \'wrap.classes=["Encoder", "Decoder"]\'.',
)
@option(
    "--optimizer",
    section="Settings",
    metavar="NAME|N",
    shell_complete=completing(_optimizers),
    help="adamw, sgd-momentum, ...; or how many tensors it keeps per parameter. By default that of a config. To "
    "rehearse, any class of torch.optim, or package.module:Class.",
)
@several(
    "--optimizer-arg",
    "optimizer_arguments",
    section="Settings",
    metavar="KEY=VALUE",
    help="An argument of the rehearsed optimizer; may be repeated.",
)
@several(
    "--batch",
    "batch",
    section="Settings",
    metavar="[NAME=]SHAPE[:DTYPE]",
    help="Rehearse a step with what one rank gets: 4x512x1024, or input_ids=1x4096:int64 for each argument.",
)
@option(
    "--batch-dim",
    section="Settings",
    metavar="N",
    type=click.IntRange(min=0),
    help="The dimension of --batch that counts samples, for micro-batches: 1 for TOKENSxSAMPLES; by default 0.",
)
@option(
    "--device",
    section="Settings",
    metavar="NAME|FILE",
    shell_complete=completing(_devices),
    help="With --batch, also the time of the step: on a100, h100, h200, b200, rtx4090, cpu, or a calibrated device.",
)
@option(
    "--batch-size",
    section="Settings",
    metavar="N|own",
    callback=_samples,
    help="Rehearse a step of an MMEngine config with N samples per rank, or its own number, from its data pipeline.",
)
@option(
    "--assume",
    section="Settings",
    metavar="SHARE",
    type=click.FloatRange(0, 1),
    help="For models that ask for values of tensors: masks select this share of elements, such as 0.1.",
)
@option(
    "--fit",
    "memory",
    section="Settings",
    metavar="SIZE",
    help="With --batch: the fastest settings that fit into this memory, such as 80GiB; what is given here stays.",
)
@flag(
    "--measure",
    "measures",
    section="Settings",
    help="With --batch: also run a few real steps on the CPU at hand, on one rank or on those of torchrun, and print "
    "predicted beside measured.",
)
@flag("--tree", section=_VIEW, help="Show the units as a tree of modules.")
@flag("--chart", section=_VIEW, help="Show the bytes of units as bars; with --batch, memory over the step.")
@option("--diff", "other", section=_VIEW, type=PATH, metavar="FILE", help="Show what these settings would change.")
@flag("--all", "every_unit", section=_VIEW, help="Show each unit; by default equal layers share a row.")
@option("--html", section="Output", type=PATH, metavar="FILE", help="Write a page that shows the rehearsed step.")
@flag("--force", "overwrite", section="Output", help="Replace an existing page.")
@limit
@json_report
def plan_command(
    model: str,
    model_arguments: tuple[str, ...],
    ranks: str | None,
    config: Path | None,
    changes: tuple[str, ...],
    optimizer: str | None,
    optimizer_arguments: tuple[str, ...],
    batch: tuple[str, ...],
    batch_dim: int | None,
    device: str | None,
    batch_size: str | None,
    assume: float | None,
    memory: str | None,
    measures: bool,
    tree: bool,
    chart: bool,
    other: Path | None,
    every_unit: bool,
    html: Path | None,
    overwrite: bool,
    limit: int,
    as_json: bool,
) -> None:
    """Show how a model would be sharded and the memory of a step, for any number of ranks. Needs torch.

    The weights take no memory here, unless --measure runs real steps, and no process is started.

    Exit codes: 0 done; 2 the model, a setting or the number of ranks is wrong, or torch is missing.
    """
    if sum((tree, chart, as_json, other is not None)) > 1:
        raise click.UsageError("Give one of --tree, --chart, --json and --diff.")
    rehearses = bool(batch) or batch_size is not None
    if batch and batch_size is not None:
        raise click.UsageError("Give --batch or --batch-size, not both.")
    if rehearses and other is not None and html is None:
        raise click.UsageError("Give --batch or --diff, not both, unless --html shows both steps.")
    if html is not None and not rehearses:
        raise click.BadParameter("needs --batch: the page shows a rehearsed step.", param_hint="--html")
    if html is not None:
        free_target(html, overwrite=overwrite)
    if optimizer is not None and not rehearses and (chart or other is not None):
        raise click.BadParameter("not with --chart and --diff, which do not show the memory.", param_hint="--optimizer")
    if device is not None and not rehearses:
        raise click.BadParameter("the time of a step needs --batch.", param_hint="--device")
    if batch_dim is not None and not batch:
        raise click.BadParameter("needs --batch, whose samples it counts.", param_hint="--batch-dim")
    if memory is not None and not rehearses:
        raise click.BadParameter("needs --batch: steps are rehearsed.", param_hint="--fit")
    if memory is not None and (tree or chart or html is not None or other is not None):
        raise click.UsageError("--fit prints settings. Drop --tree, --chart, --html and --diff.")
    if measures and not rehearses:
        raise click.BadParameter("needs --batch: a step is run.", param_hint="--measure")
    if measures and (memory is not None or other is not None or assume is not None):
        raise click.UsageError("--measure runs the step of one plan. Drop --fit, --diff and --assume.")
    wanted = key_values(changes, "--set")
    with reporting_errors(), together() if measures else nullcontext():
        from mmfsdp.basics import require_torch

        require_torch("mmfsdp-cli plan")
        built, source = model_of(model, model_arguments)
        step = step_of(built, source, batch, batch_size, optimizer, key_values(optimizer_arguments, "--optimizer-arg"))
        if optimizer is None and source is not None:
            optimizer = source.optimizer()
        ranks = ranks_at_hand(ranks) if measures else ranks or "8"
        if memory is not None and step is not None:
            given = memory, ranks, config, wanted, device or "h100", assume, batch_dim or 0
            print_fit(built, source, step, *given, as_json=as_json)
            return
        means = settings_of(built, source, config, wanted)
        plan = planned(built, ranks, means)
        suggested = config is None and source is not None and not source.shards()
        real = _measured(built, plan, step, device, as_json=as_json) if measures and step is not None else None
        found = time = None
        if real is not None:
            found, time = real.rehearsal, real.predicted
        elif step is not None:
            with _static_part(plan, step, as_json=as_json):
                found = (
                    rehearsed(built, plan, step, assume)
                    if chart
                    else advised(built, means, ranks, step, assume, batch_dim or 0)
                )
            time = None if device is None else found.time(device)
        second = None if other is None else planned(built, ranks, settings_of(built, None, other, wanted))
        if html is not None and step is not None and found is not None:
            steps = [found] if second is None else [found, rehearsed(built, second, step, assume)]
            write_report(steps, [str(config or model), str(other)][: len(steps)], html, device, overwrite=overwrite)
        if second is not None:
            difference = plan.diff(second)
            say_lines(difference.splitlines() or ["The plans are the same."], limit)
        elif as_json:
            about: dict[str, Any] = {} if source is None else {"plan_is_suggested": suggested}
            if found is not None:
                about["rehearsal"] = found.describe()
                about |= {} if time is None else {"time": time.describe()}
                about |= {} if real is None else {"measured": real.describe()}
            known = optimizer if found is None else _known(optimizer)
            click.echo(json.dumps({**plan.to_dict(), "memory": memory_of(plan, known).describe(), **about}, indent=2))
        elif chart and found is not None:
            click.echo(timeline_chart(found, terminal_width() or 80))
        elif chart:
            click.echo(bar_chart(plan, every_unit=every_unit, limit=limit, width=terminal_width() or 80))
        else:
            needed = memory_of(plan, optimizer) if found is None else found  # before anything is printed: it may fail
            if suggested:
                say(f"{model} shards nothing. With the advice of 'mmfsdp-cli doctor', and with --set if given:\n")
            print_plan(plan, tree=tree, every_unit=every_unit, limit=limit)
            say(f"\n{needed}")
            if time is not None:
                say(f"\n{time.table(width=terminal_width())}")
            if real is not None:
                say(f"\n{real}", bold=True)
            for sentence in () if step is None else step.assumed:
                say(f"\nRehearsed with {sentence}.")
            if optimizer is None and batch:
                say("\nWith AdamW; for another one: --optimizer sgd-momentum, torch.optim:Adagrad, ...")
            elif found is not None:
                pass
            elif optimizer is None:
                say("\nFor the optimizer's state: --optimizer adamw, sgd-momentum, ...")


def _measured(model: nn.Module, plan: ShardPlan, step: TrainingStep, device: str | None, *, as_json: bool) -> Measured:
    """Return real steps beside the predicted one; if the rehearsal fails, print what needs none before the error."""
    with _static_part(plan, step, as_json=as_json):
        return measured(model, plan, step, device)


@contextmanager
def _static_part(plan: ShardPlan, step: TrainingStep, *, as_json: bool) -> Iterator[None]:
    """Print what needs no rehearsal before the error of one."""
    from mmfsdp.errors import RehearsalError

    try:
        yield
    except RehearsalError:
        if not as_json:
            print_plan(plan)
            say(f"\n{memory_of(plan, _known(step.optimizer))}\n")
        raise


def _known(optimizer: object) -> str | None:
    """Return the optimizer if `estimate_memory` knows its name."""
    return optimizer if isinstance(optimizer, str) and optimizer.lower() in _optimizers() else None
