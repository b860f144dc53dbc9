"""`RehearsalHook`: logs memory and time of steps beside a rehearsal's forecast, for the first steps or all along."""

from __future__ import annotations

import logging
from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.logging import print_log

from mmfsdp import rehearse
from mmfsdp.collective import on_all_ranks
from mmfsdp.errors import ShardStateError
from mmfsdp.rehearsal import FirstSteps, ForecastWatch, Rehearsal, explain_out_of_memory
from mmfsdp.runtime import find_sharded_model
from mmfsdp_mmengine.configs.arguments import plain
from mmfsdp_mmengine.doctor.config_models import build_model
from mmfsdp_mmengine.doctor.stepping import step_with
from mmfsdp_mmengine.registry import HOOKS, replace_stock

__all__ = ["RehearsalHook"]


class RehearsalHook(Hook):
    """Rehearses the step of the config with the first batch, and logs it beside the first steps.

    Rank 0 rehearses alone, and the others wait for it in their first collective. With ``every`` each rank rehearses its
    own step, and whatever leaves the forecast later is logged as a warning. If the step cannot be rehearsed, a warning
    says why, and training goes on. A ``torch.OutOfMemoryError`` of a rank that rehearsed gets the note of
    `mmfsdp.rehearsal.explain_out_of_memory`.

    Args:
        device: The device that trains: a name or the file of a calibration, as ``--device`` takes it. Default: a GPU
            that is not known, or the CPU; only memory is predicted.
        steps: How many steps to time, after two that do not count.
        every: Interval in steps at which to compare a step with the forecast for as long as training runs, see
            `mmfsdp.rehearsal.ForecastWatch`. Default: the first steps only.
    """

    priority = "VERY_LOW"

    def __init__(self, device: str | None = None, steps: int = 5, every: int | None = None) -> None:
        self._device, self._steps, self._every = device, steps, every
        self._found: Rehearsal | None = None
        self._first: FirstSteps | None = None
        self._watch: ForecastWatch | None = None
        self._accumulate = 1
        self._iterations = 0

    def before_run(self, runner: Any) -> None:
        """Make an out-of-memory error in training report the module, the memory held and the forecast."""
        run = getattr(runner._train_loop, "run", None)  # the property would build a loop for what only validates
        if run is None:
            return
        try:
            find_sharded_model(runner.model)
        except ShardStateError:  # a warning says so, with the first batch
            return

        def explained() -> Any:
            optimizer = getattr(runner.optim_wrapper, "optimizer", None)  # several, of a GAN, are left out
            with explain_out_of_memory(lambda: self._found, runner.model, optimizer):
                return run()

        runner._train_loop.run = explained

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Rehearse before the first iteration."""
        if self._iterations or (runner.rank and self._every is None):
            return
        try:
            with torch.random.fork_rng(devices=[]):  # training draws the same numbers as without the hook
                self._compare(runner, data_batch)
        except Exception as error:  # whatever the user's model raises: training shall go on
            print_log(
                f"RehearsalHook: the step cannot be rehearsed: {type(error).__name__}: {error}",
                "current",
                logging.WARNING,
            )

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Log the line once, after the last step that is timed, and later what leaves the forecast."""
        self._iterations += 1
        if self._iterations % self._accumulate:
            return
        if self._first is not None and (line := self._first.step()) is not None:
            print_log(line, "current", logging.INFO)
            self._first = None
        if self._watch is not None:
            for line in self._watch.step():
                print_log(f"Step {self._iterations // self._accumulate}: {line}", "current", logging.WARNING)

    def _compare(self, runner: Any, batch: Any) -> None:
        """Rehearse, and begin to compare. Collective with ``every``: every rank."""
        if self._every is None:
            self._found = found = self._rehearsed(runner, batch)
        else:
            scope = find_sharded_model(runner.model).scope
            self._found = found = on_all_ranks(lambda: self._rehearsed(runner, batch), scope)
            optimizer = runner.optim_wrapper.optimizer
            self._watch = ForecastWatch(found, runner.model, optimizer, device=self._device, every=self._every)
        if not runner.rank:
            self._first = FirstSteps(found, device=self._device, steps=self._steps)

    def _rehearsed(self, runner: Any, batch: Any) -> Rehearsal:
        settings = plain(dict(runner.cfg))
        model = build_model(settings)
        step = step_with(settings, model, batch)
        self._accumulate = step.accumulate
        on_gpu = torch.cuda.is_available()  # without one, the CPU trains, whatever the time is predicted for
        return rehearse(
            find_sharded_model(runner.model).plan,
            model,
            step.batch,
            **step.arguments(),
            rank=runner.rank,
            device=self._device if on_gpu else None,
            device_type=None if on_gpu else "cpu",
        )


replace_stock(HOOKS, RehearsalHook)
