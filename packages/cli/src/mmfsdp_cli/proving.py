"""``mmfsdp-cli prove``: trains a model in one process and sharded, and compares everything that both compute."""

from __future__ import annotations

import json
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
@takes_model("Number of ranks to shard over, 2 by default")
@several(
    "--batch",
    section=_STEP,
    metavar="[NAME=]SHAPE[:DTYPE]",
    required=True,
    help="What one rank gets, samples first: 4x512x1024, or input_ids=1x4096:int64 for each argument.",
)
@option("--optimizer", section=_STEP, metavar="NAME", default="adamw", help="The optimizer.")
@option("--accumulate", section=_STEP, type=click.IntRange(min=1), default=1, metavar="N", help="Micro-batches.")
@option(
    "--steps", section=_STEP, type=click.IntRange(min=1), default=3, metavar="N", help="Steps before the checkpoint."
)
@json_report
def prove_command(
    chosen: ModelChoice, batch: tuple[str, ...], optimizer: str, accumulate: int, steps: int, as_json: bool
) -> None:
    """Prove that a model computes on several ranks what it computes in one process. Needs torch.

    It trains both with the same weights and data, saves, resumes on another number of ranks, and compares everything.

    Exit codes: 0 proven; 1 not proven; 2 the model, the batch, a setting or the number of ranks is wrong.
    """
    wanted = chosen.wanted()
    with reporting_errors():
        built, source = chosen.build("prove")
        settings = settings_of(built, source, chosen.config, wanted)
        given = key_values(chosen.model_arguments, "--model-arg")
        ranks = chosen.ranks or "2"
        if not ranks.isdecimal():
            raise click.BadParameter(f"{ranks!r} is not a number of ranks.", param_hint="--ranks")
        with running_user_code():
            from mmfsdp import prove

            proof = prove(
                partial(_build, chosen.model, given),
                batch_of(batch),
                ranks=int(ranks),
                config=settings.config,
                optimizer=optimizer,
                accumulate=accumulate,
                steps=steps,
            )
        if as_json:
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
