"""`WatchHook`: writes a record of the steps around a jump of the norm, or a number that is not finite."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from mmengine.hooks import Hook

from mmfsdp.parity import Watch, WatchSettings
from mmfsdp_mmengine.optimizers.binding import optim_wrappers_of
from mmfsdp_mmengine.registry import HOOKS, replace_stock

__all__ = ["WatchHook"]


class WatchHook(Hook):
    """Watches training as `mmfsdp.watching` does, on every rank; the log names the tensor where something went wrong.

    The norm is known if ``optim_wrapper`` has ``clip_grad``; without it, only numbers that are not finite are found.

    Args:
        every: Record each step whose number it divides. A step is one of the optimizer, of the last one if there are
            several.
        jump: How many times the median of the last 50 a norm must be.
        keep: How many recorded steps to keep in memory.
        alarms: Number of alarms after which no more records are written.
        depth: How many levels of modules to record below the model.
        folder: Where records are written, by default ``watch`` in the work directory.
    """

    priority = "VERY_LOW"

    def __init__(
        self,
        every: int = 10,
        jump: float = 10.0,
        keep: int = 4,
        alarms: int = 3,
        depth: int = 2,
        folder: str | None = None,
    ) -> None:
        self._settings: dict[str, Any] = {
            "every": every, "jump": jump, "keep": keep, "alarms": alarms, "depth": depth, "order": "strided",
        }  # fmt: skip
        self._folder = folder
        self._watch: Watch | None = None

    def before_train(self, runner: Any) -> None:
        """Begin.

        Raises:
            ConfigError: A setting has an unknown value.
        """
        wrappers = optim_wrappers_of(runner.optim_wrapper)
        folder = Path(runner.work_dir, "watch") if self._folder is None else Path(self._folder)
        *_, last = wrappers.values()
        first = runner.iter // max(int(getattr(last, "_accumulative_counts", 1)), 1)
        optimizers = [wrapper.optimizer for wrapper in wrappers.values()]
        self._watch = Watch(folder, runner.model, optimizers, WatchSettings(**self._settings), first_step=first)
        for name, wrapper in wrappers.items():
            _tell_norm(wrapper, self._watch, name)

    def after_train(self, runner: Any) -> None:
        """End."""
        if self._watch is not None:
            self._watch.close()


def _tell_norm(wrapper: Any, watch: Watch, name: str) -> None:
    """Make an optimizer wrapper tell the norm that it clips by."""
    clip = getattr(wrapper, "clip_func", None)
    if clip is None:
        return

    @functools.wraps(clip)
    def clip_and_tell(*args: Any, **kwargs: Any) -> Any:
        watch.before_clipping(wrapper.optimizer)
        norm = clip(*args, **kwargs)
        if isinstance(norm, torch.Tensor):  # clipping by value has none
            watch.norm(norm, name)
        return norm

    wrapper.clip_func = clip_and_tell


replace_stock(HOOKS, WatchHook)
