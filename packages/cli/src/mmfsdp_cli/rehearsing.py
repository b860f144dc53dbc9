"""Rehearses a step for ``mmfsdp-cli plan --batch``: reads the shapes of a batch, and draws memory over time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from mmfsdp_cli.charts import bars
from mmfsdp_cli.modelling import running_user_code

if TYPE_CHECKING:
    import torch.nn as nn

    from mmfsdp import ShardPlan
    from mmfsdp.rehearsal import Rehearsal

__all__ = ["rehearsed", "timeline_chart"]

_TENSOR = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>\d+(?:x\d+)*)(?::(?P<dtype>\w+))?")
_SPANS = 24


def rehearsed(model: nn.Module, plan: ShardPlan, batch: Sequence[str], optimizer: str | None) -> Rehearsal:
    """Return the rehearsal of a step.

    Args:
        model: The model, its parameters on the meta device.
        plan: Its plan.
        batch: Tensors as text: ``4x512x1024``, ``input_ids=1x4096:int64``.
        optimizer: The optimizer's name; default: AdamW.

    Raises:
        BadParameter: A tensor is malformed, or only some have names.
    """
    from mmfsdp import rehearse

    given = _batch(batch)
    with running_user_code():
        return rehearse(plan, model, given, optimizer=optimizer or "adamw")


def timeline_chart(rehearsal: Rehearsal, width: int) -> str:
    """Return bars of the memory over the step, one for each span of it."""
    from mmfsdp.basics import human_bytes

    rows = []
    for moment, counts in rehearsal.timeline(_SPANS):
        phase = rehearsal.at(moment).phase
        largest = max(counts, key=lambda kind: counts[kind], default="")
        rows.append((f"{phase}, mostly {largest}", sum(counts.values())))
    head = f"Memory of rank {rehearsal.rank} over a step, peak {human_bytes(rehearsal.peak.nbytes)}:"
    return "\n".join([head, *bars(rows, width)])


def _batch(texts: Sequence[str]) -> Any:
    import torch

    from mmfsdp.basics import to_torch
    from mmfsdp.errors import ConfigError

    named: dict[str, torch.Tensor] = {}
    placed = []
    for text in texts:
        found = _TENSOR.fullmatch(text)
        if found is None:
            raise click.BadParameter(
                f"{text!r} is not a tensor. Write its shape, as in 4x512x1024 or input_ids=1x4096:int64.",
                param_hint="--batch",
            )
        try:
            dtype = to_torch(found["dtype"] or "float32")
        except ConfigError as error:
            raise click.BadParameter(str(error), param_hint="--batch") from None
        tensor = torch.empty([int(size) for size in found["shape"].split("x")], dtype=dtype, device="meta")
        if found["name"]:
            named[found["name"]] = tensor
        else:
            placed.append(tensor)
    if named and placed:
        raise click.BadParameter("give a name to all tensors, or to none.", param_hint="--batch")
    return named or tuple(placed)
