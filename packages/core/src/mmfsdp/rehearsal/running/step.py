"""One step of training: micro-batches, backward, clipping, the optimizer, as a training loop runs it."""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_leaves

from mmfsdp.errors import RehearsalError
from mmfsdp.runtime.training import clip_grad_norm_, no_sync

__all__ = ["LossFn", "call_with", "default_loss", "phase_seconds", "run_forward", "run_step"]

LossFn = Callable[[nn.Module, Any], torch.Tensor]
"""``(model, batch) -> loss``, a tensor of one element: what a training loop does before ``backward()``."""


def run_step(
    begin: Callable[[str], None],
    model: nn.Module,
    batches: Sequence[Any],
    loss: LossFn,
    optimizer: torch.optim.Optimizer,
    max_norm: float | None,
    average: Callable[[], None] | None = None,
    *,
    reduce_each: bool = False,
) -> None:
    """Run one step. Collective: every rank.

    Args:
        begin: Called with the name of each phase when it begins.
        model: A sharded model.
        batches: The micro-batches; gradients are reduced with the last one.
        loss: Computes the loss of a micro-batch.
        optimizer: Made for the model's parameters.
        max_norm: The norm to clip gradients to; None for no clipping.
        average: Updates averaged weights.
        reduce_each: Reduce gradients with every micro-batch.
    """
    for index, batch in enumerate(batches):
        begin("forward")
        waits = index < len(batches) - 1 and not reduce_each
        with no_sync(model) if waits else contextlib.nullcontext():
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
    if average is not None:
        begin("ema")
        average()
    begin("zero_grad")
    optimizer.zero_grad()


def run_forward(
    begin: Callable[[str], None],
    model: nn.Module,
    batches: Sequence[Any],
    call: Callable[[nn.Module, Any], object],
) -> None:
    """Run a step of evaluation: batches one after the other, without gradients. Collective: every rank.

    Args:
        begin: Called with the name of each phase when it begins.
        model: A sharded model, in evaluation mode.
        batches: What the rank evaluates.
        call: What the loop does with the model and a batch.
    """
    for batch in batches:
        begin("forward")
        with torch.no_grad():
            call(model, batch)


def phase_seconds(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[Any],
    loss: Callable[[nn.Module, Any], torch.Tensor],
    max_norm: float | None,
    clock: Callable[[], float],
    steps: int,
) -> list[dict[str, float]]:
    """Run steps, and return the seconds of the phases of each. Collective: every rank.

    Args:
        model: A sharded model.
        optimizer: Made for its parameters.
        batches: The micro-batches of a step.
        loss: Computes the loss of one.
        max_norm: The norm to clip gradients to; None for no clipping.
        clock: Returns seconds.
        steps: How many steps.
    """
    found = []
    for _ in range(steps):
        seconds: dict[str, float] = defaultdict(float)
        marks: list[tuple[str, float]] = []
        run_step(_marking(marks, clock), model, batches, loss, optimizer, max_norm)
        marks.append(("", clock()))
        for (phase, begin), (_, end) in pairwise(marks):
            seconds[phase] += end - begin
        found.append(dict(seconds))
    return found


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
    """Call a model with a batch: a mapping gives keyword arguments, a tuple or list positional ones.

    Raises:
        RehearsalError: The model's forward does not take such arguments; the error lists those it takes.
    """
    named = dict(batch) if isinstance(batch, Mapping) else {}
    placed = tuple(batch) if isinstance(batch, tuple | list) else () if named else (batch,)
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # written in C
        return model(*placed, **named)
    try:
        signature.bind(*placed, **named)
    except TypeError as error:
        given = ", ".join([*(["tensor"] * len(placed)), *(f"{name}=tensor" for name in named)])
        raise RehearsalError(
            f"{type(model).__name__} does not take this batch ({error}). Its forward is forward{signature}, and the "
            f"batch calls it as forward({given}). A mapping gives keyword arguments, a tuple positional ones."
        ) from None
    return model(*placed, **named)


def _marking(marks: list[tuple[str, float]], clock: Callable[[], float]) -> Callable[[str], None]:
    return lambda phase: marks.append((phase, clock()))
