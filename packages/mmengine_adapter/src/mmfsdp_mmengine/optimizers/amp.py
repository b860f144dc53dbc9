"""`AmpOptimWrapper`: MMEngine's automatic mixed precision, on the CPU too, with the gradient scaler of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mmengine.optim
import torch
import torch.nn as nn
from mmengine.device import get_device
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from mmfsdp import ShardPlan
from mmfsdp.basics import canonical_dtype, to_torch
from mmfsdp.errors import ConfigError, GradScalerError
from mmfsdp_mmengine.registry import OPTIM_WRAPPERS, replace_stock

__all__ = ["AmpOptimWrapper", "check_scaled", "use_scaler_of"]


class AmpOptimWrapper(mmengine.optim.AmpOptimWrapper):
    """Runs the forward under autocast and scales the loss.

    Args:
        loss_scale: ``'dynamic'``, a fixed scale, or a dict of ``GradScaler`` arguments.
        dtype: The dtype of autocast in any spelling. Default: torch's default for the device, which is float16 on CUDA
            and bfloat16 on the CPU.
        use_fsdp: Accepted and ignored: the engine determines the scaler.
        **kwargs: Arguments of MMEngine's OptimWrapper.

    Raises:
        ConfigError: ``loss_scale`` or ``dtype`` has a value that is not accepted.
    """

    def __init__(self, loss_scale: Any = "dynamic", dtype: Any = None, use_fsdp: bool = False, **kwargs: Any) -> None:
        mmengine.optim.OptimWrapper.__init__(self, **kwargs)
        self._scale_update_param: float | None = None
        arguments: dict[str, Any] = {}
        if isinstance(loss_scale, Mapping):
            arguments = dict(loss_scale)
        elif isinstance(loss_scale, int | float) and not isinstance(loss_scale, bool):
            self._scale_update_param = float(loss_scale)
            arguments = {"init_scale": float(loss_scale)}
        elif loss_scale != "dynamic":
            raise ConfigError(
                f"loss_scale must be 'dynamic', a number or a dict of GradScaler arguments, got {loss_scale!r}.",
                config="optim_wrapper.loss_scale",
            )
        self.loss_scaler: GradScaler = (ShardedGradScaler if use_fsdp else GradScaler)(get_device(), **arguments)
        self.cast_dtype = None if dtype is None else to_torch(canonical_dtype(dtype))

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Autocast, and skip gradient reduction while accumulating."""
        with (
            mmengine.optim.OptimWrapper.optim_context(self, model),
            torch.autocast(get_device(), dtype=self.cast_dtype),
        ):
            yield


def use_scaler_of(model: nn.Module, optim_wrappers: Iterable[Any]) -> None:
    """Give optimizer wrappers the kind of gradient scaler that the model's engine needs.

    FSDP1 needs a scaler that checks all ranks for overflow; DTensor gradients do so themselves.
    """
    wanted: type[GradScaler] = ShardedGradScaler if isinstance(model, FullyShardedDataParallel) else GradScaler
    for wrapper in optim_wrappers:
        scaler = getattr(wrapper, "loss_scaler", None)
        if isinstance(scaler, GradScaler) and isinstance(scaler, ShardedGradScaler) != (wanted is ShardedGradScaler):
            state = scaler.state_dict()
            wrapper.loss_scaler = wanted(get_device(), enabled=scaler.is_enabled())
            if state:
                wrapper.loss_scaler.load_state_dict(state)


def check_scaled(plan: ShardPlan, optim_wrappers: Iterable[Any]) -> None:
    """Raise if the model would train in float16 without a gradient scaler.

    Raises:
        GradScalerError: The plan computes in float16 and an optimizer wrapper has no enabled scaler.
    """
    for wrapper in optim_wrappers if plan.needs_grad_scaler else ():
        scaler = getattr(wrapper, "loss_scaler", None)
        if scaler is None or not scaler.is_enabled():
            raise GradScalerError(
                f"mixed_precision computes in float16, but the {type(wrapper).__name__} has no gradient scaler: small "
                "gradients would become zero. Use optim_wrapper=dict(type='AmpOptimWrapper', ...), or param_dtype "
                "'bfloat16'.",
                config="optim_wrapper.type",
            )


replace_stock(OPTIM_WRAPPERS, AmpOptimWrapper)
