"""The runs of a proof: the same training in one process, with a plan on several ranks, and from a checkpoint."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mmfsdp.config import ShardConfig
from mmfsdp.parity.proving.proof_steps import ProofSteps
from mmfsdp.parity.proving.proof_task import Task, is_alone
from mmfsdp.parity.records.parts import PartedRecording
from mmfsdp.saving.reading.load import load_checkpoint
from mmfsdp.saving.writing.save import save_checkpoint
from mmfsdp.sharding.apply import shard
from mmfsdp.state.optimizers.plain import load_optim_state_dict, optim_state_dict

__all__ = ["run_reference", "run_sharded"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _frees(run: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make a run free its model at its end: the process stays, and hooks and closures refer to each other."""

    @functools.wraps(run)
    def run_and_free(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return run(*args, **kwargs)
        finally:
            gc.collect()

    return run_and_free


@_frees
def run_reference(rank: int, task: Task, folder: str, steps: int, seed: int | None) -> tuple[str, list[str], list[int]]:
    """Train and record in one process, or with DDP on all ranks.

    One process computes the parts of the batch in turn, and averages their gradients.

    Args:
        rank: This rank of the world.
        task: What to train.
        folder: Where to write the record.
        steps: Number of steps, twice as many as before the checkpoint.
        seed: Perturbs the inputs, see `recording`.

    Returns:
        The model's name, what must be known of the run, and after each step how many steps the record has: one for
        each of the optimizer, or of the task if it has several.
    """
    model = task.model()
    name = type(model).__name__
    why = is_alone(task)
    kept = {"engine", "wrap", "precision", "optimizer"}  # the rest changes no values, or needs several ranks
    given = {field: getattr(task.config, field) for field in kept & task.config.model_fields_set}
    module = shard(model, ShardConfig(**given)) if why else model
    if task.against == "ddp":
        module = DistributedDataParallel(model, find_unused_parameters=True)
    evaluated = (0, steps // 2)
    ended = _train(task, module, folder, range(steps), perturb=seed, is_sharded=bool(why), evaluated=evaluated)
    return name, [f"for {why}, the one process runs the plan too"] if why else [], ended


@_frees
def run_sharded(
    rank: int, task: Task, folder: str, steps: tuple[int, int], first: int, resume: str | None, save: str | None
) -> None:
    """Train and record on all ranks of the world. Collective.

    Args:
        rank: This rank.
        task: What to train.
        folder: Where to write the record.
        steps: The numbers of the first step, and of the one that follows the last.
        first: How many steps a record of what was before has.
        resume: The checkpoint to begin with, if any.
        save: Where to save a checkpoint at the end, if anywhere.
    """
    config, size = task.config, task.config.sharding.shard_size
    if size is not None and dist.get_world_size() % size:
        config = config.model_copy(update={"sharding": ShardConfig().sharding})
    module = shard(task.model(), config)
    _train(task, module, folder, range(*steps), first=first, resume=resume, save=save, evaluated=steps[:1])


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
    evaluated: Collection[int] = (),
) -> list[int]:
    """Train and record, with evaluations after some steps; return after each how many steps the record has."""
    optimizers = task.make_optimizers(module, is_sharded=is_sharded)
    if resume is not None:
        _load(resume, module, optimizers)
    parts = task.parts // dist.get_world_size()
    record = PartedRecording(Path(folder), module, optimizers, parts=parts, perturb=perturb, first_step=first)
    run = ProofSteps(task, module, optimizers, record, parts, is_sharded, first)
    take = run.step_of_losses if task.training.step is None else run.whole_step
    ended = []
    with contextlib.closing(record):
        for step in steps:
            take(step)
            if step in evaluated and task.training.evaluate is not None:
                run.evaluate(step)
            ended.append(run.ended)
    if save is not None:
        _save(save, module, optimizers)
    return ended


def _save(path: str, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    first, *others = optimizers
    states = {
        str(index): optim_state_dict(module, other, "sharded", by_name=True) for index, other in enumerate(others)
    }
    save_checkpoint(Path(path), module, first, extra={"others": states})


def _load(path: str, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    first, *others = optimizers
    rest, _ = load_checkpoint(Path(path), module, first)
    for index, other in enumerate(others):
        load_optim_state_dict(module, other, rest["others"][str(index)])
