"""``mmfsdp-cli plan``: shows how a model would be sharded, for any number of ranks, without starting one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import click

from mmfsdp_cli.options.choices import ModelChoice, takes_model
from mmfsdp_cli.options.plans import memory_of, planned, print_plan, say_suggested, settings_of
from mmfsdp_cli.options.shared import PATH, completing, flag, json_report, limit, option
from mmfsdp_cli.printing.charts import bar_chart
from mmfsdp_cli.printing.console import reporting_errors, say, say_lines, terminal_width
from mmfsdp_cli.printing.help import Command

__all__ = ["plan_command"]

_VIEW = "What to show"


def _optimizers() -> Iterable[str]:
    from mmfsdp.planning import OPTIMIZERS

    return OPTIMIZERS


@click.command("plan", cls=Command)
@takes_model("Number of ranks to plan for, 8 by default")
@option(
    "--optimizer",
    section="Settings",
    metavar="NAME|N",
    shell_complete=completing(_optimizers),
    help="adamw, sgd-momentum, ...; or how many tensors it keeps per parameter. By default that of a config.",
)
@flag("--tree", section=_VIEW, help="Show the units as a tree of modules.")
@flag("--params", section=_VIEW, help="Show which axes divide each parameter, and what becomes of its gradient.")
@flag("--chart", section=_VIEW, help="Show the bytes of units as bars.")
@option("--diff", "other", section=_VIEW, type=PATH, metavar="FILE", help="Show what these settings would change.")
@flag("--all", "every_unit", section=_VIEW, help="Show each unit; by default equal layers share a row.")
@limit
@json_report
def plan_command(
    chosen: ModelChoice,
    optimizer: str | None,
    tree: bool,
    params: bool,
    chart: bool,
    other: Path | None,
    every_unit: bool,
    limit: int,
    as_json: bool,
) -> None:
    """Show how a model would be sharded, for any number of ranks. Needs torch.

    The weights take no memory here, and no process is started. For activations and time: mmfsdp-cli rehearse.

    Exit codes: 0 done; 2 the model, a setting or the number of ranks is wrong, or torch is missing.
    """
    if sum((tree, params, chart, as_json, other is not None)) > 1:
        raise click.UsageError("Give one of --tree, --params, --chart, --json and --diff.")
    if optimizer is not None and (params or chart or other is not None):
        raise click.BadParameter(
            "not with --params, --chart and --diff, which do not show the memory.", param_hint="--optimizer"
        )
    wanted = chosen.wanted()
    with reporting_errors():
        built, source = chosen.build("plan")
        if optimizer is None and source is not None:
            optimizer = source.optimizer()
        ranks = chosen.ranks or "8"
        plan = planned(built, ranks, settings_of(built, source, chosen.config, wanted))
        suggested = chosen.config is None and source is not None and not source.shards()
        if other is not None:
            difference = plan.diff(planned(built, ranks, settings_of(built, None, other, wanted)))
            say_lines(difference.splitlines() or ["The plans are the same."], limit)
        elif as_json:
            shown = {"plan": plan.to_dict(), "plan_is_suggested": suggested}
            click.echo(json.dumps({**shown, "memory": memory_of(plan, optimizer).describe()}, indent=2))
        elif params:
            say_lines(plan.params_table(every_param=every_unit, width=terminal_width()).split("\n"), limit)
        elif chart:
            say_lines(bar_chart(plan, every_unit=every_unit, limit=limit, width=terminal_width() or 80).split("\n"), 0)
        else:
            needed = memory_of(plan, optimizer)  # before anything is printed: it may fail
            if suggested:
                say_suggested(chosen.model)
            print_plan(plan, tree=tree, every_unit=every_unit, limit=limit)
            say(f"\n{needed}")
            if optimizer is None:
                say("\nFor the optimizer's state: --optimizer adamw, sgd-momentum, ...")
