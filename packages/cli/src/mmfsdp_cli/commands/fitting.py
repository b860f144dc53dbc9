"""``mmfsdp-cli fit``: finds the fastest settings that fit into memory, and varies what the command line leaves open."""

from __future__ import annotations

import json
from typing import Any

import click

from mmfsdp_cli.options.choices import ModelChoice, StepChoice, takes_model, takes_step
from mmfsdp_cli.options.modelling import running_user_code
from mmfsdp_cli.options.plans import mesh_of
from mmfsdp_cli.options.settings import with_settings
from mmfsdp_cli.options.shared import json_report, option
from mmfsdp_cli.options.steps import assume, device, step_of
from mmfsdp_cli.printing.console import reporting_errors, say
from mmfsdp_cli.printing.help import Command

__all__ = ["fit_command"]


@click.command("fit", cls=Command)
@takes_model("Number of ranks, 8 by default; how they are arranged is searched")
@takes_step
@option(
    "--memory", section="Step", metavar="SIZE", help="Memory of the device, such as 80GiB; by default all that it has."
)
@option(
    "--margin",
    section="Step",
    metavar="SHARE",
    type=click.FloatRange(0, 1, max_open=True),
    help="Share of the memory to leave free; by default 0.03.",
)
@device("The device to train on, by default h100:")
@option(
    "--price",
    section="Step",
    metavar="NUMBER",
    type=click.FloatRange(0, min_open=True),
    help="Price of one device for an hour: also print what a billion tokens costs.",
)
@option(
    "--tokens",
    section="Step",
    metavar="N",
    type=click.IntRange(1),
    help="Tokens of the batch; by default the elements of its tensor of integers.",
)
@assume
@json_report
def fit_command(
    chosen: ModelChoice,
    step: StepChoice,
    memory: str | None,
    margin: float | None,
    device: str | None,
    price: float | None,
    tokens: int | None,
    assume: float | None,
    as_json: bool,
) -> None:
    """Print the fastest settings that fit into a device's memory. Needs torch.

    Settings that --config and --set give stay as they are.

    Exit codes: 0 done; 2 nothing fits, the model, the batch or a setting is wrong, or torch is missing.
    """
    wanted = chosen.wanted()
    with reporting_errors():
        built, source = chosen.build("fit")
        from mmfsdp import fit
        from mmfsdp.config import read_settings

        training = step_of(built, source, step)
        ranks = mesh_of(chosen.ranks or "8")
        if not isinstance(ranks, int):
            raise click.BadParameter(
                f"fit chooses how ranks are arranged. Give their number, not {chosen.ranks!r}.", param_hint="--ranks"
            )
        settings: dict[str, Any] = {} if chosen.config is None else dict(read_settings(chosen.config))
        policy = None
        if chosen.config is None and source is not None and source.shards():
            means = source.settings(built)
            settings, policy = means.config.model_dump(mode="json", exclude_unset=True), means.policy
        with running_user_code():
            found = fit(
                built,
                training.batch,
                memory=memory,
                margin=margin,
                tokens=tokens,
                price=price,
                ranks=ranks,
                config=with_settings(settings, wanted),
                policy=policy,
                device=device or "h100",
                loss=training.loss,
                optimizer=training.optimizer,
                max_norm=training.max_norm,
                assume=assume,
                ema=training.ema,
                batch_dim=step.batch_dim or 0,
            )
        if as_json:
            click.echo(json.dumps(found.describe(), indent=2))
        else:
            say(str(found))
