"""The runs of a proof: the same training in one process, with a plan on several ranks, and from a checkpoint."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mmfsdp.config import ShardConfig
from mmfsdp.parity.in_turn import PartOptimizer, Turns
from mmfsdp.parity.parts import PartedRecording
from mmfsdp.parity.proof_task import Task, is_alone
from mmfsdp.runtime.clipping import global_norm
from mmfsdp.runtime.training import clip_grad_norm_, no_sync
from mmfsdp.saving.load import load_checkpoint
from mmfsdp.saving.save import save_checkpoint
from mmfsdp.sharding.apply import shard

__all__ = ["run_reference", "run_sharded"]


def run_reference(rank: int, task: Task, folder: str, steps: int, seed: int | None) -> tuple[str, list[str], list[int]]:
    """Train and record in one process, or with DDP on all ranks.

    One process computes the parts of the batch in turn, and averages their gradients.

    Args:
        rank: This rank of the world.
        task: What to train.
        folder: Where to write the record.
        steps: Number of steps.
        seed: Perturbs the inputs, see `recording`.

    Returns:
        The model's name, what must be known of the run, and after each step how often the optimizer has stepped.
    """
    model = task.model()
    name = type(model).__name__
    why = is_alone(task)
    kept = {"engine", "wrap", "precision", "optimizer"}  # the rest changes no values, or needs several ranks
    given = {field: getattr(task.config, field) for field in kept & task.config.model_fields_set}
    module = shard(model, ShardConfig(**given)) if why else model
    if task.against == "ddp":
        module = DistributedDataParallel(model, find_unused_parameters=True)
    updates = _train(task, module, folder, range(steps), perturb=seed, is_sharded=bool(why))
    return name, [f"for {why}, the one process runs the plan too"] if why else [], updates


def run_sharded(
    rank: int, task: Task, folder: str, steps: tuple[int, int], first: int, resume: str | None, save: str | None
) -> None:
    """Train and record on all ranks of the world. Collective.

    Args:
        rank: This rank.
        task: What to train.
        folder: Where to write the record.
        steps: The numbers of the first step, and of the one that follows the last.
        first: How often the optimizer has stepped before.
        resume: The checkpoint to begin with, if any.
        save: Where to save a checkpoint at the end, if anywhere.
    """
    config, size = task.config, task.config.sharding.shard_size
    if size is not None and dist.get_world_size() % size:
        config = config.model_copy(update={"sharding": ShardConfig().sharding})
    module = shard(task.model(), config)
    _train(task, module, folder, range(*steps), first=first, resume=resume, save=save)


def _train(
    task: Task,
    module: nn.Module,
    folder: str,
    steps: range,
    *,
    first: int = 0,
    perturb: int | None = None,
    is_sharded: bool = True,
    resume: str | None = None,
    save: str | None = None,
) -> list[int]:
    """Train and record; return after each step how often the optimizer has stepped."""
    optimizer = task.make_optimizer(module, is_sharded=is_sharded)
    if resume is not None:
        load_checkpoint(Path(resume), module, optimizer)
    parts = task.parts // dist.get_world_size()
    record = PartedRecording(Path(folder), module, [optimizer], parts=parts, perturb=perturb, first_step=first)
    run = _Run(task, module, optimizer, record, parts, is_sharded, first)
    take = run.step_of_losses if task.step is None else run.whole_step
    updates = []
    with contextlib.closing(record):
        for step in steps:
            take(step)
            updates.append(run.updates)
    if save is not None:
        save_checkpoint(Path(save), module, optimizer)
    return updates


@dataclass
class _Run:
    """A run of training, which is recorded."""

    task: Task
    module: nn.Module
    optimizer: Optimizer
    record: PartedRecording
    parts: int
    """How many parts of the batch this process computes."""
    is_sharded: bool
    updates: int
    """How often the optimizer has stepped."""

    def step_of_losses(self, step: int) -> None:
        """Compute the loss of each part in turn, and update."""
        last = (self.task.accumulate - 1, self.parts - 1)
        for place, part in itertools.product(range(self.task.accumulate), range(self.parts)):
            self.record.play(part)
            batch = self._batch(step, place, part)
            with contextlib.nullcontext() if (place, part) == last else self._held():
                loss = self.task.loss(self.module, batch) / self.task.accumulate
                self.record.loss(loss)
                loss.backward()
        self._update()
        self.optimizer.zero_grad()

    def whole_step(self, step: int) -> None:
        """Take the task's own step for each part; they wait for each other where the optimizer steps."""
        held = contextlib.ExitStack()

        def play(part: int) -> None:
            self.record.play(part)
            held.close()
            if part < self.parts - 1:
                held.enter_context(self._held())

        turns = Turns(self.task.device, play)

        def take(part: int) -> None:
            # The first part to compute anything zeroes the gradients, which the others add to.
            zero_grad = self.optimizer.zero_grad if part == 0 else lambda: None
            view = PartOptimizer(self.optimizer, partial(turns.meet, part, self._update), zero_grad)
            for place in range(self.task.accumulate):
                assert self.task.step is not None
                self.task.step(self.module, self._batch(step, place, part), view)

        turns.run([partial(take, part) for part in range(self.parts)])

    def _batch(self, step: int, place: int, part: int) -> Any:
        """Return a part's micro-batch, and begin its random numbers, which do not depend on where it is computed."""
        part += dist.get_rank() * self.parts
        batch = self.task.micro_batch(self.module, step, place, part)
        torch.manual_seed(1 + (step * self.task.accumulate + place) * self.task.parts + part)
        return batch

    def _update(self) -> None:
        """Average the gradients of all parts, clip them, and step the optimizer."""
        self.record.play(0)
        for grad in [param.grad for param in self.module.parameters() if param.grad is not None and self.parts > 1]:
            grad.div_(self.parts)
        self.record.before_clipping()
        clip = clip_grad_norm_ if self.is_sharded else _clip
        self.record.norm(clip(self.module, self.task.max_norm))
        self.optimizer.step()
        self.updates += 1

    def _held(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which gradients are not reduced."""
        if self.is_sharded:
            return no_sync(self.module)
        module: Any = self.module
        return module.no_sync() if isinstance(module, DistributedDataParallel) else contextlib.nullcontext()


def _clip(module: nn.Module, max_norm: float) -> torch.Tensor:
    """Clip gradients of a plain model by a name that the recording does not watch, as it has been told already."""
    norm = global_norm(module.parameters(), 2.0, None)
    nn.utils.clip_grads_with_norm_(module.parameters(), max_norm, norm)
    return norm
