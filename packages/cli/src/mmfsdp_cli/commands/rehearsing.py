"""``mmfsdp-cli rehearse``: shows the memory and the time of a step, for any number of ranks, without starting one."""

from __future__ import annotations

import json
from pathlib import Path

import click

from mmfsdp_cli.options.choices import ModelChoice, StepChoice, takes_model, takes_step
from mmfsdp_cli.options.plans import known_optimizer, memory_of, planned, print_plan, say_suggested, settings_of
from mmfsdp_cli.options.shared import PATH, flag, json_report, limit, option
from mmfsdp_cli.options.steps import advised, assume, device, rehearsed, static_part_first, step_of, timeline_chart
from mmfsdp_cli.printing.console import reporting_errors, say, say_lines, terminal_width
from mmfsdp_cli.printing.help import Command
from mmfsdp_cli.printing.reporting import free_target, write_report

__all__ = ["rehearse_command"]

_VIEW = "What to show"


@click.command("rehearse", cls=Command)
@takes_model("Number of ranks to rehearse for, 8 by default")
@takes_step
@device("Rehearse for this device, and print the time of the step:")
@assume
@flag(
    "--reduce-each",
    "reduces",
    section="Step",
    help="Reduce gradients with each micro-batch, as a loop without mmfsdp.no_sync does.",
)
@flag("--evaluate", "evaluates", section="Step", help="A forward without gradients, as in evaluation.")
@flag("--chart", section=_VIEW, help="Show memory over the step as bars.")
@option(
    "--diff",
    "other",
    section=_VIEW,
    type=PATH,
    metavar="FILE",
    help="With --html: also rehearse the step with these settings, and show what they change.",
)
@flag("--all", "every_unit", section=_VIEW, help="Show each unit; by default equal layers share a row.")
@option("--html", section="Output", type=PATH, metavar="FILE", help="Write a page that shows the step.")
@flag("--force", "overwrite", section="Output", help="Replace an existing page.")
@limit
@json_report
def rehearse_command(
    chosen: ModelChoice,
    step: StepChoice,
    device: str | None,
    assume: float | None,
    reduces: bool,
    evaluates: bool,
    chart: bool,
    other: Path | None,
    every_unit: bool,
    html: Path | None,
    overwrite: bool,
    limit: int,
    as_json: bool,
) -> None:
    """Show the memory of a step, activations included, and its time, for any number of ranks. Needs torch.

    The step runs on tensors without values: they take no memory, and no device and no process are needed.

    Exit codes: 0 done; 2 the model, the batch, a setting or the number of ranks is wrong, or torch is missing.
    """
    if sum((chart, as_json, other is not None)) > 1:
        raise click.UsageError("Give one of --chart, --json and --diff.")
    if evaluates and (step.accumulate is not None or reduces):
        raise click.UsageError(
            "--evaluate is a forward alone, which has no micro-batches. Drop --accumulate and --reduce-each."
        )
    if other is not None and html is None:
        raise click.UsageError("--diff needs --html, which shows both steps. To compare plans: mmfsdp-cli plan --diff.")
    if html is not None:
        free_target(html, overwrite=overwrite)
    wanted = chosen.wanted()
    with reporting_errors():
        built, source = chosen.build("rehearse")
        training = step_of(built, source, step)
        ranks = chosen.ranks or "8"
        means = settings_of(built, source, chosen.config, wanted)
        plan = planned(built, ranks, means)
        suggested = chosen.config is None and source is not None and not source.shards()
        with static_part_first(plan, training, as_json=as_json):
            found = (
                rehearsed(built, plan, training, assume, device, evaluates=evaluates, reduces=reduces)
                if chart or evaluates or reduces
                else advised(built, means, ranks, training, assume, device, step.batch_dim or 0)
            )
        time = None if device is None else found.time()
        second = None if other is None else planned(built, ranks, settings_of(built, None, other, wanted))
        if html is not None:
            steps = (
                [found]
                if second is None
                else [found, rehearsed(built, second, training, assume, device, evaluates=evaluates, reduces=reduces)]
            )
            names = [str(chosen.config or chosen.model), str(other)][: len(steps)]
            write_report(steps, names, html, overwrite=overwrite)
        if second is not None:
            say_lines(plan.diff(second).splitlines() or ["The plans are the same."], limit)
        elif as_json:
            memory = memory_of(plan, known_optimizer(step.optimizer or (source and source.optimizer())))
            shown = {"plan": plan.to_dict(), "plan_is_suggested": suggested, "memory": memory.describe()}
            shown |= {"rehearsal": found.describe()} | ({} if time is None else {"time": time.describe()})
            click.echo(json.dumps(shown, indent=2))
        elif chart:
            say_lines(timeline_chart(found, terminal_width() or 80).split("\n"), 0)
        else:
            verdict, _, rest = str(found).partition("\n")
            say(verdict, bold=True)
            say(rest)
            if time is not None:
                say(f"\n{time.table(width=terminal_width())}")
            say("")
            if suggested:
                say_suggested(chosen.model)
            print_plan(plan, every_unit=every_unit, limit=limit)
            for sentence in () if evaluates and step.batch else training.assumed:
                say(f"\nRehearsed with {sentence}.")
            named = plan.optimizer or step.optimizer or (source and source.optimizer())
            if step.batch and not named and not evaluates:
                say("\nWith AdamW; for another one: --optimizer sgd-momentum, torch.optim:Adagrad, ...")
