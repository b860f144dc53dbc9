"""Refuses validations and tests in which ranks have different numbers of batches, before a rank waits for another."""

from __future__ import annotations

from typing import Any

from mmengine.dataset import DefaultSampler
from mmengine.runner import EpochBasedTrainLoop, TestLoop, ValLoop
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from mmfsdp import ShardPlan
from mmfsdp.errors import RankMismatchError, ShardStateError
from mmfsdp.runtime import find_sharded_model

__all__ = ["check_batches", "check_coming_validation"]


def check_coming_validation(runner: Any) -> None:
    """Raise before training if a validation follows that `check_batches` would refuse. Not collective.

    Args:
        runner: A runner that is about to train, in a loop over epochs or over iterations of MMEngine.

    Raises:
        RankMismatchError: See `check_batches`; raised on every rank.
    """
    loop, validation = runner.train_loop, runner.val_loop
    if isinstance(loop, EpochBasedTrainLoop):
        done, last = loop.epoch, loop.max_epochs
    else:
        done, last = loop.iter, loop.max_iters
    # Both loops validate at their end, whatever the interval is.
    if type(validation) is ValLoop and done < last and last >= loop.val_begin:
        check_batches(validation)


def check_batches(loop: Any) -> None:
    """Raise if the ranks that shard parameters have different numbers of batches in a loop. Not collective.

    Every rank computes the numbers of all ranks, and only where they follow from what every rank knows; other loops,
    samplers and models are left alone.

    Args:
        loop: A loop of validation or test.

    Raises:
        RankMismatchError: A rank would wait for others in a forward that they do not run; raised on every rank.
    """
    if type(loop).run_iter not in (ValLoop.run_iter, TestLoop.run_iter):
        return  # which need not run the model
    numbers = _numbers_of_batches(loop.dataloader)
    if numbers is None or len(set(numbers)) == 1:
        return
    try:
        plan = find_sharded_model(loop.runner.model).plan
    except ShardStateError:
        return
    if plan.mesh.world_size != len(numbers):
        return
    again = _gathers_again(plan)
    for first in range(0, len(numbers), plan.mesh.shard):
        group = range(first, first + plan.mesh.shard)
        fewest, most = min(group, key=numbers.__getitem__), max(group, key=numbers.__getitem__)
        parts = [{numbers[rank] for rank in group[start : start + again]} for start in range(0, len(group), again)]
        if any(len(part) > 1 for part in parts) or numbers[fewest] == 0 < numbers[most]:
            name = "val_dataloader" if isinstance(loop, ValLoop) else "test_dataloader"
            raise RankMismatchError(
                f"With round_up=False the {len(loop.dataloader.dataset)} samples of {name} give rank "
                f"{most} {_batches(numbers[most])}, and rank {fewest} {numbers[fewest] or 'none'}: rank {most} would "
                f"wait for rank {fewest} to gather parameters with it. "
                f"Write round_up=True in {name}.sampler: metrics that collect results as MMEngine's BaseMetric does "
                "leave the repeated samples out.",
                config=f"{name}.sampler.round_up",
            )


def _numbers_of_batches(loader: Any) -> list[int] | None:
    """Return how many batches each rank gets from a loader, by rank; None if this rank cannot know it."""
    batches = getattr(loader, "batch_sampler", None)
    if type(loader) is not DataLoader or type(batches) is not BatchSampler:
        return None
    sampler: Any = batches.sampler
    if type(sampler) is not DefaultSampler or isinstance(loader.dataset, IterableDataset):
        return None
    if sampler.round_up:
        return [len(batches)] * sampler.world_size
    total, world_size, size = sampler.total_size, sampler.world_size, batches.batch_size
    samples = [max(0, -((rank - total) // world_size)) for rank in range(world_size)]
    return [count // size if batches.drop_last else -(-count // size) for count in samples]


def _gathers_again(plan: ShardPlan) -> int:
    """Return how many neighbouring ranks gather parameters in a forward that follows another one in an evaluation."""
    if plan.engine == "replicate":
        return 1
    if plan.engine == "fsdp1":
        return plan.mesh.shard  # a forward without gradients ends with every unit freed
    sizes = [1]
    for unit in plan.units:
        reshard = unit.reshard_after_forward
        if unit.params and reshard is True:
            sizes.append(1 if unit.is_root else plan.mesh.shard)  # torch keeps the root gathered
        elif unit.params and reshard is not False:
            sizes.append(reshard)
    return max(sizes)


def _batches(count: int) -> str:
    return f"{count} batch{'es' if count != 1 else ''}"
