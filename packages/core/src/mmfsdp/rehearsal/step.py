"""One step of training: micro-batches, backward, clipping, the optimizer, as a training loop runs it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_leaves

from mmfsdp.errors import ConfigError, RehearsalError, closest
from mmfsdp.runtime.training import clip_grad_norm_, no_sync

__all__ = ["LossFn", "OptimizerFn", "call_with", "default_loss", "make_optimizer", "run_step"]

LossFn = Callable[[nn.Module, Any], torch.Tensor]
"""``(model, batch) -> loss``, a tensor of one element: what a training loop does before ``backward()``."""

OptimizerFn = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
"""``(parameters) -> optimizer``."""

_OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("Adam", {}),
    "adamw": ("AdamW", {}),
    "sgd": ("SGD", {"lr": 0.1}),
    "sgd-momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
}


def make_optimizer(
    optimizer: str | OptimizerFn, params: Sequence[torch.Tensor], device_type: str
) -> torch.optim.Optimizer:
    """Return the optimizer, with the kernels that it would choose on a device.

    Args:
        optimizer: ``'adamw'``, ``'adam'``, ``'sgd'``, ``'sgd-momentum'``, or what makes another one.
        params: The sharded model's parameters.
        device_type: On other devices than the CPU, torch's optimizers compute many tensors in one call by default.

    Raises:
        ConfigError: There is no such optimizer.
    """
    if isinstance(optimizer, str):
        if optimizer.lower() not in _OPTIMIZERS:
            hint = closest(optimizer, _OPTIMIZERS) or f" Known: {', '.join(_OPTIMIZERS)}."
            raise ConfigError(
                f"{optimizer!r} is not an optimizer that a rehearsal knows by name.{hint} For others give a function "
                "that takes parameters and returns the optimizer.",
                config="optimizer",
            )
        name, settings = _OPTIMIZERS[optimizer.lower()]
        made: torch.optim.Optimizer = getattr(torch.optim, name)([p for p in params if p.requires_grad], **settings)
    else:
        made = optimizer(params)
    if device_type != "cpu":
        for group in made.param_groups:
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True
    return made


def run_step(
    begin: Callable[[str], None],
    model: nn.Module,
    batches: Sequence[Any],
    loss: LossFn,
    optimizer: torch.optim.Optimizer,
    max_norm: float | None,
) -> None:
    """Run one step. Collective: every rank.

    Args:
        begin: Called with the name of each phase when it begins.
        model: A sharded model.
        batches: The micro-batches; gradients are reduced with the last one.
        loss: Computes the loss of a micro-batch.
        optimizer: Made for the model's parameters.
        max_norm: The norm to clip gradients to; None for no clipping.
    """
    for place, batch in enumerate(batches):
        begin("forward")
        with no_sync(model) if place < len(batches) - 1 else contextlib.nullcontext():
            value = loss(model, batch)
        if len(batches) > 1:
            value = value / len(batches)
        begin("backward")
        value.backward()
        del value
    if max_norm is not None:
        begin("clipping")
        clip_grad_norm_(model, max_norm)
    begin("optimizer")
    optimizer.step()
    begin("zero_grad")
    optimizer.zero_grad()


def default_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Call the model with a batch, and return the loss in its output, or else the mean of its first floating tensor.

    Raises:
        RehearsalError: The output holds no tensor that can be differentiated.
    """
    output = call_with(model, batch)
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    tensors = [found] if isinstance(found, torch.Tensor) else tree_leaves(output)
    for value in tensors:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return value if value.numel() == 1 else value.float().mean()
    raise RehearsalError(
        f"The output of {type(model).__name__} (type {type(output).__name__}) holds no tensor that depends on its "
        "parameters. Give loss=(model, batch) -> tensor."
    )


def call_with(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch: a mapping gives keyword arguments, a tuple or list positional ones."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)
