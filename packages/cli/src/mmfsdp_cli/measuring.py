"""Runs real steps for ``mmfsdp-cli plan --measure``, on one rank or on those that torchrun has started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

import click

from mmfsdp_cli.modelling import running_user_code
from mmfsdp_cli.plans import mesh_of

if TYPE_CHECKING:
    import torch.nn as nn

    from mmfsdp import ShardPlan
    from mmfsdp.frontends import TrainingStep
    from mmfsdp.rehearsal import Measured

__all__ = ["measured", "ranks_at_hand", "together"]

_AT_HAND = "WORLD_SIZE"  # of torchrun


def ranks_at_hand(ranks: str | None) -> str:
    """Return the ranks to measure, as text: those that torchrun has started, or one.

    Args:
        ranks: The number of ranks, or their mesh, as given.

    Raises:
        BadParameter: There are not as many.
    """
    count = int(os.environ.get(_AT_HAND, "1"))
    mesh = count if ranks is None else mesh_of(ranks)
    wanted = mesh if isinstance(mesh, int) else mesh[0] * mesh[1]
    if wanted != count:
        raise click.BadParameter(
            f"--measure runs the step on the ranks at hand, {count}, not {wanted}. To start them: torchrun "
            f"--nproc-per-node {wanted} --no-python mmfsdp-cli plan ...",
            param_hint="--ranks",
        )
    return ranks or str(count)


@contextmanager
def together() -> Iterator[None]:
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


def measured(model: nn.Module, plan: ShardPlan, step: TrainingStep, device: str | None) -> Measured:
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
