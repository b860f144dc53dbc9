"""`TrainingStep`: what a step of training needs besides a model and a plan, as a front end found it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.nn as nn

__all__ = ["TrainingStep"]


@dataclass(frozen=True)
class TrainingStep:
    """The arguments of `mmfsdp.rehearse` that a config describes."""

    batch: Any
    """The micro-batch of one rank; its tensors take memory."""
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None
    """Computes the loss of a micro-batch; None for the default of `mmfsdp.rehearse`."""
    optimizer: str | Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer] = "adamw"
    """The optimizer's name, or what makes it for the sharded parameters."""
    max_norm: float | None = None
    """The norm to clip gradients to."""
    accumulate: int = 1
    """Number of micro-batches in the step."""
    ema: Callable[[nn.Module], Any] | None = None
    """Makes averaged weights of this rank's part of the model; see `mmfsdp.rehearse`."""
    assumed: tuple[str, ...] = ()
    """The assumptions of the front end, for people to read."""

    def arguments(self) -> dict[str, Any]:
        """Return keyword arguments of `mmfsdp.rehearse`, besides ``batch``."""
        return {
            "loss": self.loss,
            "optimizer": self.optimizer,
            "max_norm": self.max_norm,
            "accumulate": self.accumulate,
            "ema": self.ema,
        }
