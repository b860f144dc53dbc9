"""`RehearsalHook`: logs what the first steps of training take beside what a rehearsal predicts."""

from __future__ import annotations

import logging
from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.logging import print_log

from mmfsdp import rehearse
from mmfsdp.rehearsal import FirstSteps
from mmfsdp.runtime import find_sharded_model
from mmfsdp_mmengine.configs.arguments import plain
from mmfsdp_mmengine.doctor.config_models import build_model
from mmfsdp_mmengine.doctor.stepping import step_with
from mmfsdp_mmengine.registry import HOOKS, replace_stock

__all__ = ["RehearsalHook"]


class RehearsalHook(Hook):
    """Rehearses the step of the config with the first batch, on rank 0 alone, and logs it beside the first steps.

    The other ranks wait for rank 0 in their first collective, as long as the rehearsal takes. If the step cannot be
    rehearsed, a warning says why, and training goes on.

    Args:
        device: The device that trains: a name or the file of a calibration, as ``--device`` takes it. Default: a GPU
            that is not known, or the CPU; only memory is predicted.
        steps: How many steps to time, after two that do not count.
    """

    priority = "VERY_LOW"

    def __init__(self, device: str | None = None, steps: int = 5) -> None:
        self._device, self._steps = device, steps
        self._watch: FirstSteps | None = None
        self._accumulate = 1
        self._iterations = 0

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Rehearse before the first iteration."""
        if self._iterations or runner.rank:
            return
        try:
            with torch.random.fork_rng(devices=[]):  # training draws the same numbers as without the hook
                self._watch = self._rehearsed(runner, data_batch)
        except Exception as error:  # whatever the user's model raises: training shall go on
            print_log(
                f"RehearsalHook: the step cannot be rehearsed: {type(error).__name__}: {error}",
                "current",
                logging.WARNING,
            )

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Log the line once, after the last step that is timed."""
        self._iterations += 1
        if self._watch is not None and self._iterations % self._accumulate == 0:
            line = self._watch.step()
            if line is not None:
                print_log(line, "current", logging.INFO)
                self._watch = None

    def _rehearsed(self, runner: Any, batch: Any) -> FirstSteps:
        settings = plain(dict(runner.cfg))
        model = build_model(settings)
        step = step_with(settings, model, batch)
        self._accumulate = step.accumulate
        on_gpu = torch.cuda.is_available()  # without one, the CPU trains, whatever the time is predicted for
        found = rehearse(
            find_sharded_model(runner.model).plan,
            model,
            step.batch,
            **step.arguments(),
            device=self._device if on_gpu else None,
            device_type=None if on_gpu else "cpu",
        )
        return FirstSteps(found, device=self._device, steps=self._steps)


replace_stock(HOOKS, RehearsalHook)
