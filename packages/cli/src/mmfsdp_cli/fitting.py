"""Searches settings for ``mmfsdp-cli plan --fit``: what the command line leaves open is varied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mmfsdp_cli.console import say
from mmfsdp_cli.modelling import running_user_code
from mmfsdp_cli.plans import mesh_of
from mmfsdp_cli.settings import with_settings

if TYPE_CHECKING:
    import torch.nn as nn

    from mmfsdp.frontends import ReadConfig, TrainingStep

__all__ = ["print_fit"]


def print_fit(
    model: nn.Module,
    source: ReadConfig | None,
    step: TrainingStep,
    memory: str,
    ranks: str,
    config: Path | None,
    changes: dict[str, Any],
    device: str,
    assume: float | None,
    batch_dim: int,
    *,
    as_json: bool,
) -> None:
    """Print the fastest settings that fit.

    Args:
        model: The model, its parameters on the meta device.
        source: The config that describes it, if there is one.
        step: The step.
        memory: Memory of the device, as text.
        ranks: Number of ranks, as text.
        config: A file of settings that stay.
        changes: Single settings that stay, by their paths.
        device: The device's name.
        assume: The share of elements that masks select; None to fail where a model needs their values.
        batch_dim: The dimension of the batch's tensors that counts samples.
        as_json: Print JSON.

    Raises:
        BadParameter: The ranks are a mesh, whose shape is searched.
    """
    from mmfsdp import fit
    from mmfsdp.config import read_settings

    number = mesh_of(ranks)
    if not isinstance(number, int):
        raise click.BadParameter(
            f"--fit chooses how ranks are arranged. Give their number, not {ranks!r}.", param_hint="--ranks"
        )
    settings: dict[str, Any] = {} if config is None else dict(read_settings(config))
    policy = None
    if config is None and source is not None and source.shards():
        means = source.settings(model)
        settings, policy = means.config.model_dump(mode="json", exclude_unset=True), means.policy
    with running_user_code():
        found = fit(
            model,
            step.batch,
            memory=memory,
            ranks=number,
            config=with_settings(settings, changes),
            policy=policy,
            device=device,
            loss=step.loss,
            optimizer=step.optimizer,
            max_norm=step.max_norm,
            assume=assume,
            ema=step.ema,
            batch_dim=batch_dim,
        )
    if as_json:
        click.echo(json.dumps(found.describe(), indent=2))
    else:
        say(str(found))
