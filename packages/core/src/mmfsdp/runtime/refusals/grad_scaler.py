"""A gradient scaler for float16 that works with every engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mmfsdp.errors import GradScalerError
from mmfsdp.runtime.sharded_model import ShardedModel, live_models

__all__ = ["GradScaler", "agrees_on_inf", "refuse_stage"]


class GradScaler(TorchGradScaler):
    """``torch.amp.GradScaler`` for sharded models: an infinite gradient on one rank makes all ranks skip the step.

    torch's own scaler does so only if all parameters are DTensors. This one also supports models with whole parameters
    (scalars, ignored ones), and engine ``fsdp1``, whose shards torch's scaler treats as whole parameters.

    `unscale_` and `step` are collective: every rank of the model's mesh. A stage of a pipeline raises a
    `GradScalerError`.
    """

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        sharded = [param for param in params if isinstance(param, DTensor)]
        whole = [param for param in params if not isinstance(param, DTensor)]
        # A rank that holds no part of the optimizer's parameters still takes part in the reduction.
        found = {params[0].device: torch.zeros_like(found_inf, device=params[0].device)}
        for part in (sharded, whole):
            group: Any = SimpleNamespace(param_groups=[{"params": part}])
            for device, value in super()._unscale_grads_(group, inv_scale, found_inf.clone(), allow_fp16).items():
                found[device] = torch.maximum(found[device], value) if device in found else value
        for model in live_models():
            if model.roles(params):
                refuse_stage(model)
                for value in found.values():
                    model.all_reduce(value, dist.ReduceOp.MAX)
        return found


def refuse_stage(model: ShardedModel) -> None:
    """Raise if a model with a gradient scaler is a stage of a pipeline, of which it would skip the steps alone.

    Raises:
        GradScalerError: It is.
    """
    if model.is_stage:
        raise GradScalerError(
            "This model is a stage of a pipeline, as its mesh says, and gradient scalers know no other stages: after "
            "an infinite gradient this one alone would skip its step and change its scale. Use precision 'bf16', which "
            "needs no scaler."
        )


def agrees_on_inf(scaler: TorchGradScaler) -> bool:
    """Return whether a scaler makes all ranks skip a step if one of them must, also for plain shards."""
    return isinstance(scaler, (GradScaler, ShardedGradScaler))
