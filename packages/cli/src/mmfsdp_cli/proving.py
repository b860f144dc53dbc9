"""``mmfsdp-cli prove``: trains a model in one process and sharded, and compares everything that both compute."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from click.exceptions import Exit

from mmfsdp_cli.choices import ModelChoice, takes_model
from mmfsdp_cli.console import reporting_errors, say
from mmfsdp_cli.help import Command
from mmfsdp_cli.modelling import key_values, running_user_code
from mmfsdp_cli.options import json_report, option, several
from mmfsdp_cli.plans import settings_of
from mmfsdp_cli.step_options import batch_of

if TYPE_CHECKING:
    import torch.nn as nn

__all__ = ["prove_command"]

_STEP = "Step"


@click.command("prove", cls=Command)
@takes_model("Number of ranks to shard over, by default 2, or all of torchrun")
@several(
    "--batch",
    section=_STEP,
    metavar="[NAME=]SHAPE[:DTYPE]",
    required=True,
    help="What one rank gets, samples first: 4x512x1024, or input_ids=1x4096:int64 for each argument.",
)
@option("--optimizer", section=_STEP, metavar="NAME", help="The optimizer; by default that of the plan, or AdamW.")
@option("--accumulate", section=_STEP, type=click.IntRange(min=1), default=1, metavar="N", help="Micro-batches.")
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
@option("--folder", section=_STEP, metavar="DIR", help="Keep the records here; machines of torchrun must share it.")
@json_report
def prove_command(
    chosen: ModelChoice,
    batch: tuple[str, ...],
    optimizer: str | None,
    accumulate: int,
    steps: int,
    resume_on: int | None,
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

            proof = prove(
                partial(_build, chosen.model, given),
                batch_of(batch),
                ranks=None if ranks is None else int(ranks),
                config=settings.config,
                optimizer=optimizer,
                accumulate=accumulate,
                steps=steps,
                resume_on=resume_on,
                folder=folder,
            )
        if os.environ.get("RANK", "0") != "0":
            pass  # rank 0 prints
        elif as_json:
            click.echo(json.dumps(proof.describe(), indent=1))
        else:
            say(str(proof), colour="green" if proof.proven else "red")
        if not proof.proven:
            raise Exit(1)


def _build(name: str, given: Mapping[str, Any]) -> nn.Module:
    """Build the model in a rank."""
    with running_user_code():
        from mmfsdp.frontends import build_model

        return build_model(name, given)[0]
