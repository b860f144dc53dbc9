"""`TrainingStep`: what a step of training needs besides a model and a plan, as a front end found it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmfsdp.errors import ConfigError

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
    step: Callable[[nn.Module, Any, Any], Any] | None = None
    """Takes a whole step instead, of a model that has its own; see `mmfsdp.prove`."""
    evaluate: Callable[[nn.Module, Any], Any] | None = None
    """Evaluates the model with a batch of the config's own, not the one it is given; see `mmfsdp.prove`."""
    optimizer: str | Callable[[Iterable[torch.Tensor]], Any] = "adamw"
    """The optimizer's name, or what makes it for the sharded parameters: several, if there is a ``step``."""
    max_norm: float | None = None
    """The norm to clip gradients to."""
    max_norms: tuple[float | None, ...] = ()
    """That of each optimizer, if there are several."""
    accumulate: int = 1
    """Number of micro-batches in the step."""
    ema: Callable[[nn.Module], Any] | None = None
    """Makes averaged weights of this rank's part of the model; see `mmfsdp.rehearse`."""
    assumed: tuple[str, ...] = ()
    """The assumptions of the front end, for people to read."""

    def arguments(self) -> dict[str, Any]:
        """Return keyword arguments of `mmfsdp.rehearse`, besides ``batch``.

        Raises:
            ConfigError: The model takes whole steps of its own.
        """
        if self.step is not None:
            raise ConfigError(
                "The config's model has its own train_step, whose order of forward and backward a rehearsal does not "
                "know. Write a factory of the model, and rehearse it with mmfsdp.rehearse(loss=...).",
                config="model",
            )
        return {
            "loss": self.loss,
            "optimizer": self.optimizer,
            "max_norm": self.max_norm,
            "accumulate": self.accumulate,
            "ema": self.ema,
        }
