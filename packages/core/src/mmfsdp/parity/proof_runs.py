"""The runs of a proof: the same training in one process, with a plan on several ranks, and from a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_map_only

from mmfsdp.config import ShardConfig
from mmfsdp.parity.recorder import recording
from mmfsdp.rehearsal.optimizers import make_optimizer, optimizer_of
from mmfsdp.rehearsal.realising import real_model
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.runtime.training import clip_grad_norm_, no_sync
from mmfsdp.saving.load import load_checkpoint
from mmfsdp.saving.save import save_checkpoint
from mmfsdp.sharding.apply import shard

__all__ = ["Task", "is_alone", "run_reference", "run_sharded"]

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_ATTENTION = (nn.MultiheadAttention,)
_FEWEST = 2  # numbers of embeddings to draw integers for if a model has none


@dataclass(frozen=True)
class Task:
    """The computation of each run; it is sent to ranks."""

    factory: Callable[[], nn.Module]
    batch: Any
    ranks: int
    config: ShardConfig
    loss: Callable[[nn.Module, Any], torch.Tensor]
    optimizer: str | None
    """None for the one that the plan names, or AdamW."""
    max_norm: float
    accumulate: int
    device: str
    """The type of device to compute on."""

    def model(self) -> tuple[nn.Module, bool]:
        """Return the model, and whether dropout was set to 0 in it."""
        torch.manual_seed(0)
        model = real_model(self.factory(), torch.device(self.device)).train()
        found = False
        for module in model.modules():
            name = "p" if isinstance(module, _DROPOUTS) else "dropout" if isinstance(module, _ATTENTION) else ""
            if name and getattr(module, name):
                setattr(module, name, 0.0)
                found = True
        return model, found

    def make_optimizer(self, module: nn.Module, *, is_sharded: bool) -> torch.optim.Optimizer:
        """Return the optimizer of a run's model."""
        if is_sharded and self.optimizer is None:
            return optimizer_of(None, module, find_sharded_model(module).plan, self.device)
        return make_optimizer(self.optimizer or "adamw", list(module.parameters()), self.device)

    def micro_batch(self, model: nn.Module, step: int, place: int, rank: int, world: int) -> Any:
        """Return a rank's part of the batch that all ranks share, whatever their number."""
        generator = torch.Generator().manual_seed(1000 * step + place)
        sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
        below = min(sizes, default=_FEWEST)

        def draw(shape: torch.Tensor, name: str = "") -> torch.Tensor:
            whole = (shape.shape[0] * self.ranks, *shape.shape[1:])
            if shape.is_floating_point():
                drawn = torch.randn(whole, generator=generator).to(shape.dtype)
            elif "mask" in name or shape.dtype == torch.bool:
                drawn = torch.ones(whole, dtype=shape.dtype)
            else:
                drawn = torch.randint(0, below, whole, generator=generator).to(shape.dtype)
            return drawn.tensor_split(world)[rank].to(self.device)

        if isinstance(self.batch, Mapping):
            return {
                name: tree_map_only(torch.Tensor, partial(draw, name=str(name)), value)
                for name, value in self.batch.items()
            }
        return tree_map_only(torch.Tensor, draw, self.batch)


def is_alone(task: Task) -> str:
    """Return why the reference is the plan on one rank instead of the plain model; empty if it is the plain model."""
    if task.config.precision.param_dtype not in (None, "float32"):
        return "mixed precision"
    return "its optimizer" if task.optimizer is None and task.config.optimizer is not None else ""


def run_reference(rank: int, task: Task, folder: str, steps: int, seed: int | None) -> tuple[str, bool]:
    """Train and record in one process; return the name of the model, and whether dropout was set to 0.

    Args:
        rank: 0, in a world of one process.
        task: What to train.
        folder: Where to write the record.
        steps: Number of steps.
        seed: Perturbs the inputs, see `recording`.
    """
    model, dropout = task.model()
    name = type(model).__name__
    is_sharded = bool(is_alone(task))
    kept = {"engine", "wrap", "precision", "optimizer"}  # the rest changes no values, or needs several ranks
    given = {field: getattr(task.config, field) for field in kept & task.config.model_fields_set}
    module = shard(model, ShardConfig(**given)) if is_sharded else model
    _train(task, module, folder, range(steps), (0, 1), perturb=seed, is_sharded=is_sharded)
    return name, dropout


def run_sharded(
    rank: int, task: Task, folder: str, first: int, steps: int, resume: str | None, save: str | None
) -> None:
    """Train and record on all ranks of the world. Collective.

    Args:
        rank: This rank.
        task: What to train.
        folder: Where to write the record.
        first: The number of the first step.
        steps: Number of steps.
        resume: The checkpoint to begin with, if any.
        save: Where to save a checkpoint at the end, if anywhere.
    """
    world = torch.distributed.get_world_size()
    config, size = task.config, task.config.sharding.shard_size
    if size is not None and world % size:
        config = config.model_copy(update={"sharding": ShardConfig().sharding})
    module = shard(task.model()[0], config)
    _train(task, module, folder, range(first, first + steps), (rank, world), resume=resume, save=save)


def _train(
    task: Task,
    module: nn.Module,
    folder: str,
    steps: range,
    place: tuple[int, int],
    *,
    perturb: int | None = None,
    is_sharded: bool = True,
    resume: str | None = None,
    save: str | None = None,
) -> None:
    optimizer = task.make_optimizer(module, is_sharded=is_sharded)
    if resume is not None:
        load_checkpoint(Path(resume), module, optimizer)
    with recording(folder, module, optimizer, perturb=perturb, first_step=steps.start) as record:
        for step in steps:
            for number in range(task.accumulate):
                batch = task.micro_batch(module, step, number, *place)
                hold = is_sharded and number < task.accumulate - 1
                with no_sync(module) if hold else contextlib.nullcontext():
                    loss = task.loss(module, batch) / task.accumulate
                record.loss(loss)
                loss.backward()
            record.before_clipping()
            if is_sharded:
                norm = clip_grad_norm_(module, task.max_norm)
            else:
                norm = _clip(module, task.max_norm)
            record.norm(norm)
            optimizer.step()
            optimizer.zero_grad()
    if save is not None:
        save_checkpoint(Path(save), module, optimizer)


def _clip(module: nn.Module, max_norm: float) -> torch.Tensor:
    """Clip gradients of a plain model by a name that the recording does not watch, as it has been told already."""
    grads = [param.grad for param in module.parameters() if param.grad is not None]
    norm = nn.utils.get_total_norm(grads)
    nn.utils.clip_grads_with_norm_(module.parameters(), max_norm, norm)
    return norm
