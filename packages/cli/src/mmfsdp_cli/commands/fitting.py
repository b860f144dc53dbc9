"""``mmfsdp-cli fit``: finds the fastest settings that fit into memory, and varies what the command line leaves open."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.exceptions import Exit

from mmfsdp_cli.options.choices import ModelChoice, StepChoice, takes_model, takes_step
from mmfsdp_cli.options.modelling import running_user_code
from mmfsdp_cli.options.plans import mesh_of
from mmfsdp_cli.options.settings import with_settings
from mmfsdp_cli.options.shared import PATH, flag, json_report, option
from mmfsdp_cli.options.steps import assume, device, step_of
from mmfsdp_cli.printing.console import reporting_errors, say
from mmfsdp_cli.printing.help import Command

if TYPE_CHECKING:
    from mmfsdp.rehearsal import FitOption

__all__ = ["fit_command"]


@click.command("fit", cls=Command)
@takes_model("Number of ranks, 8 by default; how they are arranged is searched", replicas=False)
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
@option(
    "--write",
    "target",
    section="Output",
    type=PATH,
    metavar="FILE",
    help="Write the fastest settings to this .yaml or .json file, for --config.",
)
@flag("--force", "overwrite", section="Output", help="Replace an existing file.")
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
    target: Path | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Print the fastest settings that fit into a device's memory. Needs torch.

    Settings that --config and --set give stay as they are. The search also tries other micro-batches; a step keeps its
    number of samples.

    Exit codes: 0 done; 2 nothing fits, the model, the batch or a setting is wrong, or torch is missing.
    """
    if target is not None:
        _check_target(target, overwrite=overwrite)
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
                accumulate=training.accumulate,
                assume=assume,
                ema=training.ema,
                batch_dim=step.batch_dim or 0,
            )
        if target is not None and found.options:
            target.write_text(_settings_text(found.options[0], target.suffix), encoding="utf-8")
        if as_json:
            click.echo(json.dumps(found.describe(), indent=2))
        else:
            say(str(found))
            for sentence in training.assumed:
                say(f"\nRehearsed with {sentence}.")
        if not found.options:
            raise Exit(2)


def _check_target(path: Path, *, overwrite: bool) -> None:
    """Reject a file that cannot be written, before the search."""
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise click.BadParameter(f"{str(path)!r} is not a .yaml or .json file.", param_hint="--write")
    if not path.parent.is_dir():
        raise click.BadParameter(f"the directory {str(path.parent)!r} does not exist.", param_hint="--write")
    if not os.access(path.parent, os.W_OK | os.X_OK) or path.is_dir():
        raise click.BadParameter(f"{str(path)!r} cannot be written.", param_hint="--write")
    if path.exists() and not overwrite:
        raise click.BadParameter(f"{str(path)!r} exists already. Add --force to replace it.", param_hint="--write")


def _settings_text(option: FitOption, suffix: str) -> str:
    """Return settings as the text of a file; YAML says in comments what they give."""
    if suffix == ".json":
        return json.dumps(option.settings, indent=2) + "\n"
    return f"# {option}\n# {option.rates}\n{option.yaml}\n"
