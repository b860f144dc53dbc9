"""`TrainingStep`: what a step of training computes, for rehearsing, fitting, measuring and proving it."""

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
    """The step of a training loop, as arguments or a config describe it.

    Raises:
        ConfigError: A number is out of its range, or a step without training has settings of one.
    """

    batch: Any
    """The micro-batch of one rank, or for `mmfsdp.prove` a function that makes it from a number."""
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None
    """Computes the loss of a micro-batch; None for the default of `mmfsdp.rehearse`."""
    step: Callable[[nn.Module, Any, Any], Any] | None = None
    """Takes a whole step instead, of a model that has its own; see `mmfsdp.prove`."""
    evaluate: Callable[[nn.Module, Any], Any] | None = None
    """Evaluates the model. A config's evaluation uses the config's own batch, not the one it is given."""
    optimizer: str | Callable[[Iterable[torch.Tensor]], Any] | None = None
    """The optimizer's name, or what makes it for the sharded parameters: several, if there is a ``step``. None for the
    plan's, or AdamW."""
    max_norm: float | None = None
    """The norm to clip gradients to."""
    max_norms: tuple[float | None, ...] = ()
    """The norm of each optimizer, if there are several."""
    accumulate: int = 1
    """Number of micro-batches in the step."""
    ema: Callable[[nn.Module], Any] | None = None
    """Makes averaged weights of this rank's part of the model; see `mmfsdp.rehearse`."""
    assumed: tuple[str, ...] = ()
    """The assumptions of the front end, for people to read."""
    assume: float | None = None
    """The share of elements that masks select, for a model that asks for values; see `mmfsdp.rehearse`."""
    reduce_each: bool = False
    """Whether each micro-batch reduces its gradients."""
    train: bool = True
    """Whether it trains; otherwise it is a forward without gradients."""

    def __post_init__(self) -> None:
        if not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise ConfigError(f"accumulate is a number of micro-batches, at least 1, got {self.accumulate!r}.")
        if self.assume is not None and not (isinstance(self.assume, int | float) and 0 <= self.assume <= 1):
            raise ConfigError(
                f"assume is the share of elements that masks select, between 0 and 1, got {self.assume!r}."
            )
        if not self.train and (self.max_norm is not None or self.ema or self.reduce_each or self.accumulate != 1):
            raise ConfigError(
                "A step with train=False has no gradients: drop max_norm, accumulate, reduce_each and ema."
            )

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

    def proof_arguments(self) -> dict[str, Any]:
        """Return keyword arguments of `mmfsdp.prove`, ``batch`` among them."""
        return {
            "batch": self.batch,
            "loss": self.loss,
            "step": self.step,
            "evaluate": self.evaluate,
            "optimizer": self.optimizer,
            "max_norm": self.max_norms or self.max_norm,
            "accumulate": self.accumulate,
        }
