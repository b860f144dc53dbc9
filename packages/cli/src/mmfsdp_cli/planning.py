"""``mmfsdp-cli plan``: shows how a model would be sharded, for any number of ranks, without starting one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mmfsdp_cli.charts import bar_chart
from mmfsdp_cli.console import reporting_errors, say, say_lines, terminal_width
from mmfsdp_cli.help import Command, argument
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
from mmfsdp_cli.rehearsing import rehearsed, timeline_chart
from mmfsdp_cli.reporting import free_target, write_report
from mmfsdp_cli.settings import with_settings

if TYPE_CHECKING:
    import torch.nn as nn

    from mmfsdp import ShardPlan
    from mmfsdp.frontends import ReadConfig
    from mmfsdp.planning import MemoryEstimate
    from mmfsdp.torch_style import Translated

__all__ = ["mesh_of", "plan_command", "print_plan"]

_VIEW = "What to show"


def _devices() -> Iterable[str]:
    from mmfsdp.rehearsal import devices

    return devices()


def _optimizers() -> Iterable[str]:
    from mmfsdp.planning import OPTIMIZERS

    return OPTIMIZERS


@click.command("plan", cls=Command)
@argument("model", help="package.module:factory, or the path of an MMEngine config.")
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
    help="adamw, sgd-momentum, ...; or how many tensors it keeps per parameter. By default that of a config.",
)
@several(
    "--batch",
    "batch",
    section="Settings",
    metavar="[NAME=]SHAPE[:DTYPE]",
    help="Rehearse a step with what one rank gets: 4x512x1024, or input_ids=1x4096:int64 for each argument.",
)
@option(
    "--device",
    section="Settings",
    metavar="NAME",
    shell_complete=completing(_devices),
    help="With --batch, also the time of the step on a100, h100, h200, b200, rtx4090 or cpu.",
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
    batch: tuple[str, ...],
    device: str | None,
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

    The weights take no memory here, and no process is started.

    Exit codes: 0 done; 2 the model, a setting or the number of ranks is wrong, or torch is missing.
    """
    if sum((tree, chart, as_json, other is not None)) > 1:
        raise click.UsageError("Give one of --tree, --chart, --json and --diff.")
    if batch and other is not None and html is None:
        raise click.UsageError("Give --batch or --diff, not both, unless --html shows both steps.")
    if html is not None and not batch:
        raise click.BadParameter("needs --batch: the page shows a rehearsed step.", param_hint="--html")
    if html is not None:
        free_target(html, overwrite=overwrite)
    if optimizer is not None and not batch and (chart or other is not None):
        raise click.BadParameter("not with --chart and --diff, which do not show the memory.", param_hint="--optimizer")
    if device is not None and not batch:
        raise click.BadParameter("the time of a step needs --batch.", param_hint="--device")
    wanted = key_values(changes, "--set")
    with reporting_errors():
        from mmfsdp.basics import require_torch

        require_torch("mmfsdp-cli plan")
        built, source = model_of(model, model_arguments)
        if optimizer is None and source is not None:
            optimizer = source.optimizer()
        ranks = ranks or "8"
        plan = _plan(built, ranks, _settings(built, source, config, wanted))
        advised = config is None and source is not None and not source.shards()
        step = rehearsed(built, plan, batch, optimizer) if batch else None
        time = None if step is None or device is None else step.time(device)
        second = None if other is None else _plan(built, ranks, _settings(built, None, other, wanted))
        if html is not None and step is not None:
            steps = [step] if second is None else [step, rehearsed(built, second, batch, optimizer)]
            write_report(steps, [str(config or model), str(other)][: len(steps)], html, device, overwrite=overwrite)
        if second is not None:
            difference = plan.diff(second)
            say_lines(difference.splitlines() or ["The plans are the same."], limit)
        elif as_json:
            about: dict[str, Any] = {} if source is None else {"plan_is_suggested": advised}
            if step is not None:
                about["rehearsal"] = step.describe()
                about |= {} if time is None else {"time": time.describe()}
            click.echo(json.dumps({**plan.to_dict(), "memory": _memory(plan, optimizer).describe(), **about}, indent=2))
        elif chart and step is not None:
            click.echo(timeline_chart(step, terminal_width() or 80))
        elif chart:
            click.echo(bar_chart(plan, every_unit=every_unit, limit=limit, width=terminal_width() or 80))
        else:
            memory = _memory(plan, optimizer) if step is None else step  # before anything is printed: it may fail
            if advised:
                say(f"{model} shards nothing. With the advice of 'mmfsdp-cli doctor', and with --set if given:\n")
            print_plan(plan, tree=tree, every_unit=every_unit, limit=limit)
            say(f"\n{memory}")
            if time is not None:
                say(f"\n{time.table(width=terminal_width())}")
            if optimizer is None and batch:
                say("\nWith AdamW; for another one: --optimizer sgd, sgd-momentum, adam.")
            elif optimizer is None:
                say("\nFor the optimizer's state: --optimizer adamw, sgd-momentum, ...")


def print_plan(plan: ShardPlan, *, tree: bool = False, every_unit: bool = False, limit: int = 0) -> None:
    """Print a plan as a table or tree that fits the terminal.

    Args:
        plan: The plan.
        tree: Print a tree.
        every_unit: Show each unit; by default equal layers share a row.
        limit: Rows to show; 0 shows all.
    """
    shown = plan.tree(every_unit=every_unit) if tree else plan.table(every_unit=every_unit, width=terminal_width())
    head, body, end = (part.splitlines() for part in (*shown.split("\n\n", 2), "", "")[:3])
    titles = 0 if tree else 2  # the titles of the table and a rule
    rows = body[titles:]
    say("\n".join(head), bold=True)
    say("")
    say("\n".join(body[:titles]), bold=True) if titles else None
    say_lines(rows, limit)
    say("\n" + "\n".join(end))


def _memory(plan: ShardPlan, optimizer: str | None) -> MemoryEstimate:
    from mmfsdp.planning import estimate_memory

    return estimate_memory(plan, int(optimizer) if optimizer is not None and optimizer.isdecimal() else optimizer)


def mesh_of(ranks: str) -> int | tuple[int, int]:
    """Return the number of ranks that ``8`` stands for, or the (replicate, shard) pair of ``2x4``.

    Raises:
        ConfigError: It is neither.
    """
    from mmfsdp.checkpoint import Ranks

    mesh = Ranks.parse(ranks)
    return (mesh.replicas, mesh.shards) if "x" in ranks else mesh.count


def _settings(model: nn.Module, source: ReadConfig | None, config: Path | None, changes: dict[str, Any]) -> Translated:
    from mmfsdp import ShardConfig
    from mmfsdp.torch_style import Translated

    if config is None and source is not None:
        means = source.settings(model)
        if not changes:
            return means
        settings = with_settings(means.config.to_dict(), changes)
        replaced = any(path.split(".")[0] == "wrap" for path in changes)
        return Translated(
            ShardConfig.from_dict(settings),
            None if replaced else means.policy,
            means.param_init_fn,
            means.check_fn,
            means.ignored_modules,
            means.ignored_params,
        )
    from mmfsdp.config import read_settings

    return Translated(ShardConfig.from_dict(with_settings({} if config is None else read_settings(config), changes)))


def _plan(model: nn.Module, ranks: str, means: Translated) -> ShardPlan:
    import mmfsdp

    return mmfsdp.plan(
        model,
        means.config,
        mesh_of(ranks),
        policy=means.policy,
        check_fn=means.check_fn,
        ignored_modules=means.ignored_modules,
        ignored_params=means.ignored_params,
    )
