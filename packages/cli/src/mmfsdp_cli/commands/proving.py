"""``mmfsdp-cli prove``: trains a model in one process and sharded, and compares everything that both compute."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import click
from click.exceptions import Exit

from mmfsdp_cli.options.choices import BatchChoice, ModelChoice, takes_batch, takes_model
from mmfsdp_cli.options.modelling import key_values, running_user_code
from mmfsdp_cli.options.plans import settings_of
from mmfsdp_cli.options.shared import flag, json_report, option
from mmfsdp_cli.options.steps import batch_of, no_data_error
from mmfsdp_cli.printing.console import reporting_errors, say
from mmfsdp_cli.printing.help import Command

if TYPE_CHECKING:
    import torch.nn as nn

    from mmfsdp.frontends import ReadConfig, TrainingStep

__all__ = ["prove_command"]

_STEP = "Step"


@click.command("prove", cls=Command)
@takes_model("Number of ranks to shard over, by default 2, or all of torchrun", replicas=False)
@takes_batch
@option("--optimizer", section=_STEP, metavar="NAME", help="The optimizer; by default that of the plan, or AdamW.")
@option(
    "--steps", section=_STEP, type=click.IntRange(min=1), default=3, metavar="N", help="Steps before the checkpoint."
)
@option(
    "--resume-on",
    section=_STEP,
    type=click.IntRange(min=1),
    metavar="N",
    help="Ranks to go on with from the checkpoint, 1 by default, or 2 of more than 2.",
)
@option(
    "--against",
    section=_STEP,
    type=click.Choice(["alone", "ddp"]),
    default="alone",
    help="The reference: one process, or torch's DDP on as many ranks.",
)
@flag("--no-evaluation", section=_STEP, help="Leave out the evaluation that an MMEngine config describes.")
@option("--folder", section=_STEP, metavar="DIR", help="Keep the records here; machines of torchrun must share it.")
@json_report
def prove_command(
    chosen: ModelChoice,
    step: BatchChoice,
    optimizer: str | None,
    steps: int,
    resume_on: int | None,
    against: Literal["alone", "ddp"],
    no_evaluation: bool,
    folder: str | None,
    as_json: bool,
) -> None:
    """Prove that a model computes on several ranks what it computes in one process. Needs torch.

    It trains both with the same weights and data, saves, resumes on another number of ranks, and compares everything.
    The ranks are processes on the CPU, or those of torchrun --nproc-per-node N --no-python mmfsdp-cli prove ...

    Exit codes: 0 proven; 1 not proven; 2 the model, the batch, a setting or the number of ranks is wrong.
    """
    wanted = chosen.wanted()
    with reporting_errors():
        built, source = chosen.build("prove")
        settings = settings_of(built, source, chosen.config, wanted)
        given = key_values(chosen.model_arguments, "--model-arg")
        ranks = chosen.ranks
        if ranks is not None and not ranks.isdecimal():
            raise click.BadParameter(f"{ranks!r} is not a number of ranks.", param_hint="--ranks")
        with running_user_code():
            from mmfsdp import prove

            training = _step(step, chosen.model, built, source)
            if no_evaluation:
                training = replace(training, evaluate=None)
            if step.accumulate is not None:
                training = replace(training, accumulate=step.accumulate)
            if optimizer is not None or settings.config.optimizer is not None:
                training = replace(training, optimizer=optimizer)
            proof = prove(
                partial(_build, chosen.model, given),
                **training.proof_arguments(),
                ranks=None if ranks is None else int(ranks),
                config=settings.config,
                steps=steps,
                resume_on=resume_on,
                against=against,
                folder=folder,
            )
        if proof.rank == 0 and as_json:
            click.echo(json.dumps(proof.describe(), indent=1))
        elif proof.rank == 0:
            say(str(proof), colour="green" if proof.proven else "red")
        if not proof.proven:
            raise Exit(1)


def _step(given: BatchChoice, path: str, model: nn.Module, source: ReadConfig | None) -> TrainingStep:
    """Return the step to prove."""
    from mmfsdp.frontends import RemadeStep, TrainingStep

    if given.batch_size is None:
        return TrainingStep(batch_of(given.batch, model), max_norm=1.0)
    if source is None:
        raise no_data_error(model, given.batch_size)
    return RemadeStep(path, None if given.batch_size == "own" else int(given.batch_size)).sent()


def _build(name: str, given: Mapping[str, Any]) -> nn.Module:
    """Build the model in a rank."""
    with running_user_code():
        from mmfsdp.frontends import build_model

        return build_model(name, given)[0]
