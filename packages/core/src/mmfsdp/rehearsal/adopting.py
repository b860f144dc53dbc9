"""Tells a recorder what the tensors of a step are: parameters, gradients, inputs, and the optimizer's state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
import torch.nn as nn

from mmfsdp.rehearsal.recording.recorder import Recorder
from mmfsdp.runtime.sharded_model import ShardedModel
from mmfsdp.runtime.torch_fsdp2.unreduced import gradients_of

__all__ = ["adopt", "adopt_gradients", "adopt_model", "beginning", "counts_on_host", "state_of"]


def adopt(recorder: Recorder, state: ShardedModel, batches: list[Any]) -> None:
    """Record what is there before the step."""
    adopt_model(recorder, state.module)
    recorder.adopt((leaf for leaf in torch.utils._pytree.tree_leaves(batches) if torch.is_tensor(leaf)), "input")


def adopt_model(recorder: Recorder, model: nn.Module) -> None:
    """Record a model's parameters and buffers as such."""
    for name, owner in model.named_modules():
        recorder.adopt(owner.parameters(recurse=False), "parameter", name)
        recorder.offload(owner.parameters(recurse=False))
        recorder.adopt(owner.buffers(recurse=False), "buffer", name)


def adopt_gradients(recorder: Recorder, gradients: Iterable[torch.Tensor]) -> None:
    """Record tensors as gradients of parameters."""
    found = [*gradients]
    recorder.adopt(found, "gradient")
    recorder.offload(found)


def beginning(recorder: Recorder, state: ShardedModel, idle: list[torch.Tensor]) -> Callable[[str], None]:
    """Return what begins a phase; when backward has ended, its gradients are known.

    Parameters that the optimizer finds without a gradient are added to ``idle``.
    """

    def begin(phase: str) -> None:
        params = [*state.module.parameters()]
        whole = (param.grad for param in params if param.grad is not None)
        if phase == "optimizer":
            idle.extend(param for param in params if param.requires_grad and param.grad is None)
        adopt_gradients(recorder, chain(whole, *(gradients_of(group) for group in state.groups)))
        recorder.begin(phase)

    return begin


def state_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the tensors that an optimizer keeps from step to step."""
    for held in optimizer.state.values():
        yield from (value for value in held.values() if isinstance(value, torch.Tensor))


def counts_on_host(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the counts of steps that torch's optimizers keep in CPU memory: all but fused and capturable ones."""
    for group in optimizer.param_groups:
        if not group.get("fused") and not group.get("capturable"):
            held = (optimizer.state.get(param, {}).get("step") for param in group["params"])
            yield from (count for count in held if isinstance(count, torch.Tensor))
