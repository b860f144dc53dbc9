"""Resumes training where a checkpoint was saved, also within an epoch, with the same data and random numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import mmengine.hooks
from mmengine.dataset import DefaultSampler, InfiniteSampler
from mmengine.runner import EpochBasedTrainLoop
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from mmfsdp.saving import restore_random_state, samples_left, whole_order
from mmfsdp_mmengine.checkpoints.strategy_states import CheckpointingStrategy
from mmfsdp_mmengine.registry import HOOKS, replace_stock

__all__ = ["DistSamplerSeedHook"]


class DistSamplerSeedHook(mmengine.hooks.DistSamplerSeedHook):
    """Sets the epoch of samplers, and restores the position in the data and the random numbers after a resume.

    Validation does not change the random numbers of training. With other strategies the hook acts like MMEngine's.
    """

    def __init__(self) -> None:
        self._seen = 0  # samples of the epoch that goes on
        self._counted = (0, 0, 0)  # the epoch, and how many samples of it had been seen after how many iterations
        self._told = False
        self._restores: Callable[[], None] | None = None  # the random numbers, before the first batch

    def before_train(self, runner: Any) -> None:
        """Prepare the training loop if the model was resumed."""
        strategy, loop = _strategy_of(runner), runner.train_loop
        # A loop over iterations skips the batches that were trained on itself, unless it was told not to.
        skips = hasattr(loop, "dataloader_iterator") and not getattr(loop, "fast_forward_on_resume", False)
        if strategy is None or (resumed := strategy.take_resumed()) is None:
            self._seen = runner.iter * _batch_size(runner) if skips else 0
            return
        progress = resumed.progress
        renewed = _reseed(loop.dataloader, progress.get("sampler_seed"), resumed.seed)

        def restore() -> None:
            self._restores = None
            if resumed.random_state is not None:
                restore_random_state(resumed.random_state)

        self._restores = restore
        if (batches := getattr(loop, "dataloader_iterator", None)) is not None:
            self._seen = _samples_seen(runner, progress) if skips else 0
            skip, began = _begin(runner, self._seen, progress)
            batches = type(batches)(loop.dataloader) if renewed or began else batches
            loop.dataloader_iterator = _Resumed(batches, runner.iter if skips else 0, skip, restore)
            return
        self._seen = 0 if progress.get("epoch") != runner.epoch else _samples_seen(runner, progress)
        if type(loop).run_epoch is EpochBasedTrainLoop.run_epoch:
            skip, _ = _begin(runner, self._seen, progress)
            done = self._seen // _batch_size(runner) if self._seen else None
            loop.run_epoch = partial(_run_rest_of_epoch, loop, done, skip, restore)
            return
        restore()
        if self._seen:
            self._seen = 0
            runner.logger.warning(
                f"The checkpoint was saved in the middle of an epoch, but {type(loop).__name__} has its own "
                "run_epoch(): that epoch starts again from its first batch."
            )

    def after_train(self, runner: Any) -> None:
        """Restore the random numbers if there was nothing left to train."""
        if self._restores is not None:
            self._restores()

    def before_train_epoch(self, runner: Any) -> None:
        """Set the epoch of the sampler."""
        self._counted = runner.epoch, runner.iter, self._seen
        self._seen = 0
        super().before_train_epoch(runner)

    def before_val(self, runner: Any) -> None:
        """Save the state of the random number generators."""
        if (strategy := _strategy_of(runner)) is not None:
            strategy.pause_randomness()

    def after_val(self, runner: Any) -> None:
        """Restore the random numbers of training."""
        if (strategy := _strategy_of(runner)) is not None:
            strategy.continue_randomness()

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Record the position in the data."""
        if "progress" in checkpoint:
            loader = runner.train_loop.dataloader
            if not self._told and (warning := _inexact(loader)) is not None:
                runner.logger.warning(warning)
            self._told = True
            epoch, at, seen = self._counted
            checkpoint["progress"] |= {
                "epoch": epoch,
                "counted_at": at,
                "seen": seen,
                "batch_size": _batch_size(runner),
                "sampler_seed": getattr(_sampler_of(loader), "seed", None),
            }


def _strategy_of(runner: Any) -> CheckpointingStrategy | None:
    strategy = getattr(runner, "strategy", None)
    return strategy if isinstance(strategy, CheckpointingStrategy) else None


def _sampler_of(loader: DataLoader[Any]) -> Any:
    own = loader.sampler
    return own if hasattr(own, "set_epoch") else getattr(loader.batch_sampler, "sampler", own)


def _inexact(loader: DataLoader[Any]) -> str | None:
    """Return a warning if the position in the data could not be resumed exactly, else None."""
    sampler = _sampler_of(loader)
    if isinstance(loader.dataset, IterableDataset):
        return (
            f"The data set {type(loader.dataset).__name__} is iterable: after a resume the batches that were trained "
            "on are loaded and skipped. That is exact on as many ranks, if the data set yields the same samples again."
        )
    if not all(hasattr(sampler, name) for name in ("seed", "set_epoch")):
        return (
            f"The order in which a {type(sampler).__name__} gives samples does not follow from a seed and the epoch, "
            "so it cannot be resumed within an epoch: some samples would be seen twice, and others not at all. Use "
            "DefaultSampler or InfiniteSampler, or save at the end of epochs."
        )
    if loader.persistent_workers:
        return (
            "persistent_workers=True: worker processes of the data loader do not tell their random numbers. After a "
            "resume the order of the samples stays, and random augmentations differ. Set it to False to resume exactly."
        )
    return None


def _batch_size(runner: Any) -> int:
    """Return how many samples all ranks take per iteration."""
    size: int = (runner.train_loop.dataloader.batch_size or 1) * runner.world_size
    return size


def _samples_seen(runner: Any, progress: dict[str, Any]) -> int:
    """Return how many samples of the epoch that goes on all ranks have seen; a loop over iterations has one epoch."""
    size = progress.get("batch_size", _batch_size(runner))
    at = progress.get("counted_at", progress.get("epoch_began_at", 0))
    seen: int = progress.get("seen", 0) + (runner.iter - at) * size
    return seen


def _begin(runner: Any, seen: int, progress: dict[str, Any]) -> tuple[int, bool]:
    """Let the data begin behind the samples of its epoch that were seen.

    Batches of the same size are loaded and skipped, because augmentations draw random numbers; otherwise the sampler
    begins there.

    Returns:
        How many batches to skip, and whether the loader's next iterator begins elsewhere than the ones before.
    """
    loader, now = runner.train_loop.dataloader, _batch_size(runner)
    before = progress.get("batch_size", now)
    if not seen or (before == now and seen % now == 0):
        return seen // now, False
    sampler = _sampler_of(loader)
    several = type(sampler) is DefaultSampler and seen > len(sampler) * runner.world_size  # several of its epochs
    began = not several and _begin_at(loader, seen)
    if before != now:
        runner.logger.warning(
            f"All ranks together take {now} samples per iteration, and took {before} when the checkpoint was saved: "
            f"iterations, intervals and schedules count other batches than before. Set global_batch_size={before} to "
            "keep them, on any number of ranks."
        )
    if not began and (seen % now or several or type(loader.batch_sampler) is not BatchSampler):
        runner.logger.warning(
            f"The checkpoint was saved after {seen} samples of its epoch. Training goes on after {seen // now} batches "
            f"of {now}, so some samples may be seen twice, or not at all: only a DefaultSampler within its first epoch "
            "and an InfiniteSampler, without a batch sampler of your own, begin at any sample."
        )
    return 0 if began else seen // now, began


def _begin_at(loader: DataLoader[Any], seen: int) -> bool:
    """Let the next iterator over a loader begin behind some samples of its epoch, if it can, and return whether.

    It can if its sampler is one of MMEngine's, and batches are the sampler's next samples. With a `DefaultSampler` only
    the next epoch is a part of one; an `InfiniteSampler` has one epoch.
    """
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        return False
    sampler: Any = batches.sampler
    if type(sampler) is InfiniteSampler:
        sampler.indices = itertools.islice(sampler._infinite_indices(), seen + sampler.rank, None, sampler.world_size)
    elif type(sampler) is DefaultSampler:
        batches.sampler = _Rest(batches, seen)
    else:
        return False
    return True


class _Rest(Sampler[int]):
    """What is left of an epoch of a `DefaultSampler`, which the batch sampler gets back when this begins."""

    def __init__(self, batches: BatchSampler, seen: int) -> None:
        self._batches, self._seen = batches, seen
        self._whole: Any = batches.sampler

    def __iter__(self) -> Iterator[int]:
        self._batches.sampler = whole = self._whole
        order = whole_order(whole, world_size=1, rank=0)
        end: Literal["keep", "repeat"] = "repeat" if whole.round_up else "keep"
        return iter(samples_left(order, self._seen, ranks=whole.world_size, rank=whole.rank, end=end))

    def __len__(self) -> int:
        return len(self._whole)


def _reseed(loader: DataLoader[Any], sampler_seed: int | None, seed: int) -> bool:
    """Give the sampler and the workers their saved seeds, and return whether any seed changed."""
    changed = False
    sampler, init = _sampler_of(loader), loader.worker_init_fn
    if sampler_seed is not None and getattr(sampler, "seed", sampler_seed) != sampler_seed:
        sampler.seed, changed = sampler_seed, True
    if isinstance(init, partial) and init.keywords.get("seed", seed) != seed:
        loader.worker_init_fn, changed = partial(init.func, *init.args, **{**init.keywords, "seed": seed}), True
    if changed and hasattr(sampler, "_indices_of_rank"):
        # InfiniteSampler has one generator for its whole life: only a new one starts again.
        sampler.indices = sampler._indices_of_rank()
    return changed


class _Resumed:
    """A loop's batches. Behind those that were trained on, random numbers go on as they were saved.

    Args:
        batches: The batches.
        passes: How many the loop is about to skip: it gets nothing.
        skip: How many to load and skip in place of these.
        restore: Restores the random numbers.
    """

    def __init__(self, batches: Iterator[Any], passes: int, skip: int, restore: Callable[[], None]) -> None:
        self._batches, self._passes, self._skip, self._restore = batches, passes, skip, restore
        self._begun = False

    def __iter__(self) -> _Resumed:
        return self

    def __next__(self) -> Any:
        if self._passes:
            self._passes -= 1
            return None
        if not self._begun:
            self._begun = True
            for _ in range(self._skip):
                next(self._batches)
            self._restore()
        return next(self._batches)

    def skip_iter(self, count: int) -> None:
        """Skip batches, as loops of onedl-mmengine do."""
        for _ in range(count):
            next(self)


def _run_rest_of_epoch(loop: Any, done: int | None, skip: int, restore: Callable[[], None]) -> None:
    """Run the rest of an epoch.

    Args:
        loop: The loop.
        done: How many batches of the epoch were trained on; ``None`` if no sample was.
        skip: How many of them to load and skip.
        restore: Restores the random numbers.
    """
    vars(loop).pop("run_epoch")
    if done is None:
        restore()
        loop.run_epoch()
        return
    loop.runner.call_hook("before_train_epoch")
    loop.runner.model.train()
    batches = iter(loop.dataloader)
    for _ in range(skip):
        next(batches, None)
    restore()
    for index, batch in enumerate(batches, done):
        loop.run_iter(index, batch)
    loop.runner.call_hook("after_train_epoch")
    loop._epoch += 1


replace_stock(HOOKS, DistSamplerSeedHook)
