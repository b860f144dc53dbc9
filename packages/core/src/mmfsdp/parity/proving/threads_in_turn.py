"""Runs steps of training that several ranks take together in one process: each part's step on a thread, in turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from mmfsdp.errors import ShardStateError

__all__ = ["PartOptimizer", "Turns"]


class Turns:
    """Parts that run one at a time, and wait for each other where ranks would wait: where the optimizer steps.

    Args:
        device: The type of device to compute on. Each part has random numbers of its own.
        play: Prepares the process for a part.
    """

    def __init__(self, device: str, play: Callable[[int], None]) -> None:
        self._device, self._play = device, play
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._count = self._turn = 0
        self._met: object = None
        self._ended: set[int] = set()

    def run(self, parts: Sequence[Callable[[], None]]) -> None:
        """Run a function for each part.

        Raises:
            BaseException: What the first part that failed has raised.
        """
        self._count, self._turn = len(parts), 0
        self._ended.clear()
        if self._count == 1:
            self._play(0)
            parts[0]()
            return
        threads = torch.get_num_threads()
        index = torch.accelerator.current_device_index() if self._device != "cpu" else -1

        def body(part: int) -> None:
            try:
                torch.set_num_threads(threads)  # which is a setting of each thread
                if index >= 0:
                    torch.accelerator.set_device_index(index)
                self._wait(part)
                parts[part]()
            except BaseException as error:
                self._failure = self._failure or error
            finally:
                self._ended.add(part)
                self._pass_on()

        running = [threading.Thread(target=body, args=(part,)) for part in range(self._count)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def meet(self, part: int, point: object, act: Callable[[], object]) -> None:
        """Wait until all parts have reached this point; then the last one calls the function for all.

        Raises:
            ShardStateError: A part has reached another point, or has ended.
        """
        self._met = point if part == 0 else self._met
        if self._ended or self._met != point:
            raise ShardStateError(
                "A training step steps the optimizer more often with some samples than with others, or another one, "
                "but ranks must do so together."
            )
        if part == self._count - 1:
            act()
        if self._count == 1:
            return
        state = self._random()
        self._pass_on()
        self._wait(part)
        self._restore(state)

    def _pass_on(self) -> None:
        with self._changed:
            self._turn = (self._turn + 1) % self._count
            self._changed.notify_all()

    def _wait(self, part: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == part or self._failure is not None)
        if self._failure is not None:
            raise ShardStateError("Another part of the batch failed.")
        self._play(part)

    def _random(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        other = None if self._device == "cpu" else torch.get_device_module(self._device).get_rng_state()
        return torch.get_rng_state(), other

    def _restore(self, state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.get_device_module(self._device).set_rng_state(state[1])


class PartOptimizer(Optimizer):
    """An optimizer as one part of the batch sees it: it steps once all parts have asked for it.

    Args:
        optimizer: The optimizer of all parts.
        step: Steps it.
        zero_grad: Zeroes gradients, or does nothing.
    """

    def __init__(self, optimizer: Optimizer, step: Callable[[], None], zero_grad: Callable[[], object]) -> None:
        # It has no state or hooks of its own, which is what Optimizer.__init__ would make.
        self.param_groups, self.state, self.defaults = optimizer.param_groups, optimizer.state, optimizer.defaults
        self._step, self._zero_grad = step, zero_grad

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step once all parts have come here.

        Raises:
            ShardStateError: There is a closure, which would compute again.
        """
        if closure is not None:
            raise ShardStateError("prove() cannot step an optimizer with a closure, which computes gradients again.")
        self._step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients, if this part is the one to do so."""
        self._zero_grad()
