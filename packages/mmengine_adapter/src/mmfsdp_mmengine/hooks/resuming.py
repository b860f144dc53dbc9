"""Resumes training where a checkpoint was saved, also within an epoch, with the same data and random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mmengine.hooks
from mmengine.runner import EpochBasedTrainLoop
from torch.utils.data import DataLoader, IterableDataset

from mmfsdp_mmengine.checkpoints.randomness import restore_random_state
from mmfsdp_mmengine.checkpoints.strategy_states import CheckpointingStrategy
from mmfsdp_mmengine.registry import HOOKS, replace_stock

__all__ = ["DistSamplerSeedHook"]


class DistSamplerSeedHook(mmengine.hooks.DistSamplerSeedHook):
    """Sets the epoch of samplers, and restores the position in the data and the random numbers after a resume.

    Validation does not change the random numbers of training. With other strategies the hook acts like MMEngine's.
    """

    def __init__(self) -> None:
        self._skip = 0
        self._began = (0, 0)
        self._told = False

    def before_train(self, runner: Any) -> None:
        """Prepare the training loop if the model was resumed."""
        strategy = _strategy_of(runner)
        if strategy is None or (resumed := strategy.take_resumed()) is None:
            return
        loop, progress = runner.train_loop, resumed.progress
        renewed = _reseed(loop.dataloader, progress.get("sampler_seed"), resumed.seed)

        def restore() -> None:
            if resumed.random_state is not None:
                restore_random_state(resumed.random_state)

        if (batches := getattr(loop, "dataloader_iterator", None)) is not None:
            batches = type(batches)(loop.dataloader) if renewed else batches
            # The loop itself skips the batches that were trained on, unless it was told not to.
            done = 0 if getattr(loop, "fast_forward_on_resume", False) else runner.iter
            loop.dataloader_iterator = _Resumed(batches, done, restore)
            return
        self._skip = _batches_done(runner, progress)
        if type(loop).run_epoch is EpochBasedTrainLoop.run_epoch:
            loop.run_epoch = partial(_run_rest_of_epoch, loop, self._skip, restore)
            return
        restore()
        if self._skip:
            self._skip = 0
            runner.logger.warning(
                f"The checkpoint was saved in the middle of an epoch, but {type(loop).__name__} has its own "
                "run_epoch(): that epoch starts again from its first batch."
            )

    def before_train_epoch(self, runner: Any) -> None:
        """Set the epoch of the sampler."""
        self._began = (runner.epoch, runner.iter - self._skip)
        self._skip = 0
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
            checkpoint["progress"] |= {
                "epoch": self._began[0],
                "epoch_began_at": self._began[1],
                "batch_size": (loader.batch_size or 1) * runner.world_size,
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
    return None


def _batches_done(runner: Any, progress: dict[str, Any]) -> int:
    """Return how many batches of the current epoch were trained on, counted in batches of the current size."""
    if progress.get("epoch") != runner.epoch:
        return 0
    loader = runner.train_loop.dataloader
    done: int = runner.iter - progress["epoch_began_at"]
    before, now = progress["batch_size"], (loader.batch_size or 1) * runner.world_size
    if again := done * before % now:
        runner.logger.warning(
            f"The checkpoint was saved after {done * before} samples of its epoch, which is within a batch: all ranks "
            f"together take {now} samples per iteration, and took {before}. {again} samples are seen a second time. "
            f"Let batch_size times the number of ranks be {before} to go on exactly."
        )
    batches: int = min(done * before // now, len(loader))
    return batches


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
    """A loop's batches. Behind those that were trained on, random numbers go on as they were saved."""

    def __init__(self, batches: Iterator[Any], done: int, restore: Callable[[], None]) -> None:
        self._batches, self._done, self._restore = batches, done, restore

    def __iter__(self) -> _Resumed:
        return self

    def __next__(self) -> Any:
        if self._done == 0:
            self._restore()
        self._done -= 1
        return next(self._batches)

    def skip_iter(self, count: int) -> None:
        """Skip batches, as loops of onedl-mmengine do; they are loaded, because augmentations draw random numbers."""
        for _ in range(count):
            next(self)


def _run_rest_of_epoch(loop: Any, done: int, restore: Callable[[], None]) -> None:
    """Run an epoch but skip its first ``done`` batches; they are loaded, because augmentations draw random numbers."""
    vars(loop).pop("run_epoch")
    if not done:
        restore()
        loop.run_epoch()
        return
    loop.runner.call_hook("before_train_epoch")
    loop.runner.model.train()
    batches = iter(loop.dataloader)
    for _ in range(done):
        next(batches)
    restore()
    for index, batch in enumerate(batches, done):
        loop.run_iter(index, batch)
    loop.runner.call_hook("after_train_epoch")
    loop._epoch += 1


replace_stock(HOOKS, DistSamplerSeedHook)
