"""The runs of a proof: the same training in one process, with a plan on several ranks, and from a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from mmfsdp.config import ShardConfig
from mmfsdp.parity.parts import PartedRecording
from mmfsdp.parity.proof_task import Task, is_alone
from mmfsdp.runtime.clipping import global_norm
from mmfsdp.runtime.training import clip_grad_norm_, no_sync
from mmfsdp.saving.load import load_checkpoint
from mmfsdp.saving.save import save_checkpoint
from mmfsdp.sharding.apply import shard

__all__ = ["run_reference", "run_sharded"]


def run_reference(rank: int, task: Task, folder: str, steps: int, seed: int | None) -> tuple[str, list[str]]:
    """Train and record in one process, or with DDP on all ranks; return the model's name, and what must be known of it.

    One process computes the parts of the batch in turn, and averages their gradients.

    Args:
        rank: This rank of the world.
        task: What to train.
        folder: Where to write the record.
        steps: Number of steps.
        seed: Perturbs the inputs, see `recording`.
    """
    model, dropout = task.model()
    name = type(model).__name__
    why = is_alone(task)
    kept = {"engine", "wrap", "precision", "optimizer"}  # the rest changes no values, or needs several ranks
    given = {field: getattr(task.config, field) for field in kept & task.config.model_fields_set}
    module = shard(model, ShardConfig(**given)) if why else model
    if task.against == "ddp":
        module = DistributedDataParallel(model, find_unused_parameters=True)
    draws = _train(task, module, folder, range(steps), perturb=seed, is_sharded=bool(why))
    known = ["with dropout set to 0"] if dropout else []
    known += [f"for {why}, the one process runs the plan too"] if why else []
    return name, known + (["a forward draws random numbers, of which each rank has others"] if draws else [])


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
    config, size = task.config, task.config.sharding.shard_size
    if size is not None and dist.get_world_size() % size:
        config = config.model_copy(update={"sharding": ShardConfig().sharding})
    module = shard(task.model()[0], config)
    _train(task, module, folder, range(first, first + steps), resume=resume, save=save)


def _train(
    task: Task,
    module: nn.Module,
    folder: str,
    steps: range,
    *,
    perturb: int | None = None,
    is_sharded: bool = True,
    resume: str | None = None,
    save: str | None = None,
) -> bool:
    """Train and record; return whether a forward has drawn random numbers."""
    optimizer = task.make_optimizer(module, is_sharded=is_sharded)
    if resume is not None:
        load_checkpoint(Path(resume), module, optimizer)
    parts = task.parts // dist.get_world_size()
    draws = False
    record = PartedRecording(Path(folder), module, optimizer, parts=parts, perturb=perturb, first_step=steps.start)
    with contextlib.closing(record):
        for step in steps:
            for place, part, is_last in _turns(task.accumulate, parts):
                record.play(part)
                batch = task.micro_batch(module, step, place, dist.get_rank() * parts + part)
                before = torch.get_rng_state()
                with contextlib.nullcontext() if is_last else _held(module, is_sharded=is_sharded):
                    loss = task.loss(module, batch) / task.accumulate
                    draws |= not torch.equal(before, torch.get_rng_state())
                    record.loss(loss)
                    loss.backward()
            record.play(0)
            for grad in [param.grad for param in module.parameters() if param.grad is not None and parts > 1]:
                grad.div_(parts)
            record.before_clipping()
            record.norm(clip_grad_norm_(module, task.max_norm) if is_sharded else _clip(module, task.max_norm))
            optimizer.step()
            optimizer.zero_grad()
    if save is not None:
        save_checkpoint(Path(save), module, optimizer)
    return draws


def _held(module: nn.Module, *, is_sharded: bool) -> contextlib.AbstractContextManager[None]:
    """Return the context in which gradients are not reduced."""
    if is_sharded:
        return no_sync(module)
    held: contextlib.AbstractContextManager[None] = (
        module.no_sync() if isinstance(module, DistributedDataParallel) else contextlib.nullcontext()
    )
    return held


def _turns(accumulate: int, parts: int) -> Iterator[tuple[int, int, bool]]:
    """Yield the number of a micro-batch and of a part of it, and whether it is the last of the step."""
    for place in range(accumulate):
        for part in range(parts):
            yield place, part, (place, part) == (accumulate - 1, parts - 1)


def _clip(module: nn.Module, max_norm: float) -> torch.Tensor:
    """Clip gradients of a plain model by a name that the recording does not watch, as it has been told already."""
    norm = global_norm(module.parameters(), 2.0, None)
    nn.utils.clip_grads_with_norm_(module.parameters(), max_norm, norm)
    return norm
