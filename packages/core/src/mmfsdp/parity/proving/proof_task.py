"""The computation of a proof: a model, its loss and optimizer, and the batch that all ranks share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn as nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from mmfsdp.config import ShardConfig
from mmfsdp.errors import ConfigError
from mmfsdp.rehearsal.running.optimizers import make_optimizer, optimizer_from, optimizer_of
from mmfsdp.rehearsal.running.realising import real_model
from mmfsdp.rehearsal.running.training_step import TrainingStep
from mmfsdp.runtime.sharded_model import find_sharded_model

__all__ = ["Against", "OptimizersFn", "Task", "is_alone", "parts_of"]

Against = Literal["alone", "ddp"]

OptimizersFn = Callable[[Iterable[torch.Tensor]], Optimizer | Sequence[Optimizer]]
"""``(parameters) -> optimizer``, or a list of optimizers."""

_FEWEST = 2  # numbers of embeddings to draw integers for if a model has none


@dataclass(frozen=True)
class Task:
    """The computation of each run; it is sent to ranks."""

    factory: Callable[[], nn.Module]
    training: TrainingStep
    """The step; tensors of its batch have the shapes of what one rank gets."""
    ranks: int
    parts: int
    """Into how many parts the batch of all ranks is divided: as many on each rank of every run."""
    config: ShardConfig
    device: str
    """The type of device to compute on."""
    against: Against = "alone"
    """Whether the reference runs in one process, or as DDP on all ranks."""

    def model(self) -> nn.Module:
        """Return the model."""
        torch.manual_seed(0)
        return real_model(self.factory(), torch.device(self.device)).train()

    def make_optimizers(self, module: nn.Module, *, is_sharded: bool) -> list[Optimizer]:
        """Return the optimizers of a run's model.

        Raises:
            ConfigError: They cannot be made, or there is another number of norms to clip to.
        """
        if is_sharded and self.training.optimizer is None:
            made = [optimizer_of(None, module, find_sharded_model(module).plan, self.device)]
        else:
            given, params = self.training.optimizer or "adamw", list(module.parameters())
            found = (optimizer_from(given) if isinstance(given, str) else given)(params)
            several = [found] if isinstance(found, Optimizer) else [*found]
            made = [make_optimizer(partial(_itself, one), params, self.device) for one in several]
        norms = self.training.max_norms
        if norms and len(norms) != len(made):
            raise ConfigError(
                f"There are {len(made)} optimizers, and {len(norms)} norms to clip their gradients to.",
                config="max_norm",
            )
        return made

    def max_norm(self, index: int) -> float:
        """Return the norm to clip the gradients of an optimizer to; infinity for no clipping."""
        given = self.training.max_norms[index] if self.training.max_norms else self.training.max_norm
        return math.inf if given is None else given

    def micro_batch(self, model: nn.Module, step: int, index: int, part: int) -> Any:
        """Return a part of the batch that all ranks share, whatever their number."""
        given = self.training.batch
        if callable(given):
            made = given((step * self.training.accumulate + index) * self.parts + part)
            return tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device), made)
        generator = torch.Generator().manual_seed(1000 * step + index)
        sizes = [
            module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        ]
        below = min(sizes, default=_FEWEST)

        def draw(shape: torch.Tensor, name: str = "") -> torch.Tensor:
            whole = (shape.shape[0] * self.ranks, *shape.shape[1:])
            if shape.is_floating_point():
                drawn = torch.randn(whole, generator=generator).to(shape.dtype)
            elif "mask" in name or shape.dtype == torch.bool:
                drawn = torch.ones(whole, dtype=shape.dtype)
            else:
                drawn = torch.randint(0, below, whole, generator=generator).to(shape.dtype)
            return drawn.chunk(self.parts)[part].to(self.device)

        if isinstance(given, Mapping):
            return {
                name: tree_map_only(torch.Tensor, partial(draw, name=str(name)), value) for name, value in given.items()
            }
        return tree_map_only(torch.Tensor, draw, given)


def _itself(made: Optimizer, params: Iterable[torch.Tensor]) -> Optimizer:
    return made


def is_alone(task: Task) -> str:
    """Return why the reference is the plan on one rank instead of the plain model; empty if it is the plain model."""
    precision = task.config.precision
    if precision.param_dtype not in (None, "float32"):
        return "mixed precision"
    if precision.storage_dtype is not None:
        return f"weights in {precision.storage_dtype}"
    return "its optimizer" if task.training.optimizer is None and task.config.optimizer is not None else ""


def parts_of(batch: Any, ranks: int, again: int) -> int:
    """Return into how many parts to divide the batch of all ranks.

    Args:
        batch: What one rank gets, or a function that makes it.
        ranks: Number of ranks.
        again: On how many ranks training goes on.

    Raises:
        ConfigError: Ranks cannot get equally many samples.
    """
    parts = math.lcm(ranks, again)
    if callable(batch):
        if parts != ranks:
            raise ConfigError(
                f"Batches of {ranks} ranks that a function makes cannot be divided among {again}. Go on with a number "
                "of ranks that divides the first.",
                config="resume_on",
            )
        return parts
    for tensor in tree_leaves(batch):
        if isinstance(tensor, torch.Tensor) and (not tensor.dim() or tensor.shape[0] * ranks % parts):
            raise ConfigError(
                f"A tensor of shape {tuple(tensor.shape)} for each of {ranks} ranks cannot be divided among {again}. "
                f"Its first dimension counts samples; give each rank a multiple of {parts // ranks}, or go on with a "
                "number of ranks that divides the first.",
                config="resume_on",
            )
    return parts
