"""`RemadeStep`: a config's training step that other processes build again, with other numbers in each batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from mmfsdp.frontends.config_readers import read_config

if TYPE_CHECKING:
    import torch.nn as nn

    from mmfsdp.rehearsal.running.training_step import TrainingStep

__all__ = ["RemadeStep"]


class RemadeStep:
    """The batch, loss and optimizer of a config, in a form that can be sent to other processes.

    Args:
        path: The config.
        batch_size: The samples of one rank; None for the config's own number.
    """

    def __init__(self, path: str, batch_size: int | None) -> None:
        self._path, self._batch_size = path, batch_size

    @property
    def step(self) -> TrainingStep:
        """The step, which each process makes once."""
        return _step(self._path, self._batch_size)

    def sent(self) -> TrainingStep:
        """Return the step made of this object's methods, which can be sent to other processes."""
        own = self.step
        return replace(
            own,
            batch=self.batch,
            loss=self.loss if own.step is None else None,
            step=None if own.step is None else self.whole,
            evaluate=None if own.evaluate is None else self.evaluate,
            optimizer=self.optimizer,
            ema=None,
        )

    def batch(self, number: int) -> Any:
        """Return the config's batch with the elements of each tensor in another order, so that all samples differ.

        Args:
            number: The seed of the order.
        """
        generator = torch.Generator().manual_seed(number)

        def shuffle(tensor: torch.Tensor) -> torch.Tensor:
            order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
            return tensor.flatten()[order].view(tensor.shape)

        return tree_map_only(torch.Tensor, shuffle, self.step.batch)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the config's loss of a batch that its data preprocessor has processed."""
        assert self.step.loss is not None, "configs that describe a step have one"
        return self.step.loss(model, batch)

    def whole(self, model: nn.Module, batch: Any, optimizer: Any) -> None:
        """Take a whole step of a model that has its own."""
        assert self.step.step is not None, "it is for models that have one"
        self.step.step(model, batch, optimizer)

    def evaluate(self, model: nn.Module, batch: Any) -> Any:
        """Evaluate a model with the config's own batch."""
        assert self.step.evaluate is not None, "it is for configs that evaluate"
        return self.step.evaluate(model, batch)

    def optimizer(self, params: Iterable[torch.Tensor]) -> Any:
        """Return the config's optimizer, or a list of several, for the parameters of its model."""
        make = self.step.optimizer
        assert callable(make), "configs make their optimizer"
        return make(params)


@lru_cache(maxsize=1)
def _step(path: str, batch_size: int | None) -> TrainingStep:
    config = read_config(path)
    return config.step(config.model(), batch_size)
