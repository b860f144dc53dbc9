"""``mmfsdp-cli measure``: runs real steps on the CPUs at hand, and prints predicted beside measured."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

import click

from mmfsdp_cli.options.choices import ModelChoice, StepChoice, takes_model, takes_step
from mmfsdp_cli.options.modelling import running_user_code
from mmfsdp_cli.options.plans import (
    known_optimizer,
    memory_of,
    mesh_of,
    planned,
    print_plan,
    say_suggested,
    settings_of,
)
from mmfsdp_cli.options.shared import flag, json_report, limit
from mmfsdp_cli.options.steps import device, static_part_first, step_of
from mmfsdp_cli.printing.console import reporting_errors, say, terminal_width
from mmfsdp_cli.printing.help import Command

if TYPE_CHECKING:
    import torch.nn as nn

    from mmfsdp import ShardPlan
    from mmfsdp.frontends import TrainingStep
    from mmfsdp.rehearsal import Measured

__all__ = ["measure_command"]

_AT_HAND = "WORLD_SIZE"  # of torchrun


@click.command("measure", cls=Command)
@takes_model("Number of ranks; by default those that torchrun has started, or one")
@takes_step
@device("Predict for this device instead of calibrating the CPUs:")
@flag("--all", "every_unit", section="What to show", help="Show each unit; by default equal layers share a row.")
@limit
@json_report
def measure_command(
    chosen: ModelChoice, step: StepChoice, device: str | None, every_unit: bool, limit: int, as_json: bool
) -> None:
    """Run a few real steps on the CPUs at hand, and print predicted beside measured. Needs torch.

    Random weights and a random batch are made. For several ranks: torchrun --nproc-per-node N --no-python mmfsdp-cli
    measure ...

    Exit codes: 0 done; 2 the model, the batch, a setting or the number of ranks is wrong, or torch is missing.
    """
    wanted = chosen.wanted()
    with reporting_errors(), _together():
        ranks = _ranks_at_hand(chosen.ranks)
        built, source = chosen.build("measure")
        training = step_of(built, source, step)
        plan = planned(built, ranks, settings_of(built, source, chosen.config, wanted))
        suggested = chosen.config is None and source is not None and not source.shards()
        with static_part_first(plan, training, as_json=as_json):
            real = _measured(built, plan, training, device)
        if as_json:
            memory = memory_of(plan, known_optimizer(step.optimizer or (source and source.optimizer())))
            shown = {"plan": plan.to_dict(), "plan_is_suggested": suggested, "memory": memory.describe()}
            shown |= {"rehearsal": real.rehearsal.describe(), "time": real.predicted.describe()}
            click.echo(json.dumps({**shown, "measured": real.describe()}, indent=2))
            return
        if suggested:
            say_suggested(chosen.model)
        print_plan(plan, every_unit=every_unit, limit=limit)
        say(f"\n{real.rehearsal}\n\n{real.predicted.table(width=terminal_width())}")
        say(f"\n{real}", bold=True)
        for sentence in training.assumed:
            say(f"\nMeasured with {sentence}.")


def _ranks_at_hand(ranks: str | None) -> str:
    """Return the ranks to measure, as text: those that torchrun has started, or one.

    Args:
        ranks: The number of ranks, or their mesh, as given.

    Raises:
        BadParameter: There are not as many.
    """
    count = int(os.environ.get(_AT_HAND, "1"))
    mesh = count if ranks is None else mesh_of(ranks)
    wanted = mesh if isinstance(mesh, int) else math.prod(mesh.values() if isinstance(mesh, dict) else mesh)
    if wanted != count:
        raise click.BadParameter(
            f"the step runs on the ranks at hand, {count}, not {wanted}. To start them: torchrun --nproc-per-node "
            f"{wanted} --no-python mmfsdp-cli measure ...",
            param_hint="--ranks",
        )
    return ranks or str(count)


@contextmanager
def _together() -> Iterator[None]:
    """Join the ranks that torchrun has started, if there are several; only rank 0 prints."""
    if int(os.environ.get(_AT_HAND, "1")) == 1:
        yield
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        if dist.get_rank() == 0:
            yield
        else:
            with open(os.devnull, "w") as nothing, redirect_stdout(nothing):
                yield
    finally:
        dist.destroy_process_group()


def _measured(model: nn.Module, plan: ShardPlan, step: TrainingStep, device: str | None) -> Measured:
    """Return real steps beside the predicted one. Collective: every rank that torchrun has started.

    Args:
        model: The model, its parameters on the meta device.
        plan: Its plan.
        step: The step.
        device: The file of a calibrated device, or the name of one; None to calibrate.
    """
    from mmfsdp.rehearsal import measure

    arguments = {name: value for name, value in step.arguments().items() if name != "ema"}  # it averages no weights
    with running_user_code():
        return measure(plan, model, step.batch, **arguments, device=device)
