"""Tells what a running step is doing: its phase, the module and the shard unit, in forward and in backward."""

from __future__ import annotations

import functools
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.nn as nn

from mmfsdp.basics.text import clean_fqn
from mmfsdp.planning.compiled import around_compiled, is_compiled
from mmfsdp.rehearsal.fakes.fake import backward_number, forward_number
from mmfsdp.runtime.fsdp1.flat_params import around_gathering
from mmfsdp.runtime.gradients.backward import is_backward
from mmfsdp.runtime.sharded_model import ShardedModel
from mmfsdp.runtime.torch_fsdp2.observing import Role, Subscriber, Turn, subscribe
from mmfsdp.runtime.torch_fsdp2.param_groups import Group, unit_of

__all__ = ["StepPosition"]


class StepPosition:
    """Where the step is. A sharded model reports to it while it is watched.

    Attributes:
        phase: What the training loop does: ``forward``, ``backward``, ``clipping`` or ``optimizer``.
        unit: The FQN of the shard unit that is being gathered or reduced, or None.
        gathers: Whether `unit` is being gathered.
        failed: The FQN of the innermost module whose forward raised, or an empty string.
    """

    def __init__(self) -> None:
        self.phase = "before"
        self.unit: str | None = None
        self.gathers = False
        self.failed = ""
        self._modules: list[str] = []
        # Modules by the numbers of the operators that they run in forward; backward looks them up.
        self._numbers: list[int] = []
        self._owners: list[str] = []

    @property
    def module(self) -> str:
        """The FQN of the unit that is gathered or reduced, or else of the innermost module that runs."""
        if self.unit is not None:
            return self.unit
        if is_backward():
            if self._modules:  # it is recomputed
                return self._modules[-1]
            number = backward_number()
            index = 0 if number is None else bisect_right(self._numbers, number)
            return self._owners[index - 1] if index else ""
        return self._modules[-1] if self._modules else ""

    @property
    def kind(self) -> str:
        """The kind of memory that is allocated now, one of `mmfsdp.rehearsal.KINDS`."""
        if self.unit is not None:
            return "gathered" if self.gathers else "reduce buffer"
        if is_backward():
            # Autograd switches gradients off, unless it runs a forward again.
            return "recomputed" if torch.is_grad_enabled() else "activation gradient"
        return {"forward": "activation", "backward": "activation gradient"}.get(self.phase, "optimizer temporary")

    @property
    def role(self) -> str:
        """``gather`` or ``reduce`` while a unit is gathered or reduced, ``compute`` otherwise."""
        if self.unit is None:
            return "compute"
        return "gather" if self.gathers else "reduce"

    @contextmanager
    def watch(self, state: ShardedModel, reduced: Callable[[Any], None]) -> Iterator[None]:
        """Follow the modules and units of a sharded model while it runs.

        Args:
            state: The sharded model.
            reduced: Called with the parameter group of a unit right before and after its gradients are reduced.
        """
        names = {id(module): clean_fqn(name) for name, module in state.module.named_modules()}

        def enter(module: nn.Module, _: Any) -> None:
            if id(module) in names:
                self._modules.append(names[id(module)])
                self._mark()

        def leave(module: nn.Module, _: Any, output: Any) -> None:
            if id(module) in names and self._modules:
                name = self._modules.pop()
                self._mark()
                if output is None and not self.failed and sys.exception() is not None:
                    self.failed = name  # torch calls this hook while an exception goes up

        subscribe(_Follower(self, reduced), state.groups)
        if state.is_fsdp1:
            # FSDP1 has no separate method that reduces.
            around_gathering(state.module, self.gathering)
        compiled = [module for module in state.module.modules() if is_compiled(module)]
        for module in compiled:
            around_compiled(module, functools.partial(_between, enter, leave, module))
        within = {id(inner) for module in compiled for inner in module.modules()}
        with ExitStack() as stack:
            for module in state.module.modules():
                if id(module) not in within:  # a hook would end a graph
                    stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
                    stack.callback(module.register_forward_hook(leave, prepend=True, always_call=True).remove)
            yield

    def _mark(self) -> None:
        self._numbers.append(forward_number())
        self._owners.append(self._modules[-1] if self._modules else "")

    @contextmanager
    def communicating(self, unit: str, gathers: bool) -> Iterator[None]:
        """Return a context in which a unit is gathered or reduced."""
        before = self.unit, self.gathers
        self.unit, self.gathers = unit, gathers
        try:
            yield
        finally:
            self.unit, self.gathers = before

    def gathering(self, unit: str, gather: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``gather`` as a function that gathers a unit while it runs."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.communicating(unit, True):
                return gather(*args, **kwargs)

        return run


def _between(
    enter: Callable[..., None], leave: Callable[..., None], module: nn.Module, call: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a call of a module that begins with one function and ends with the other one, also if it fails."""

    def run(*args: Any, **kwargs: Any) -> Any:
        enter(module, args)
        output = None
        try:
            output = call(*args, **kwargs)
            return output
        finally:
            leave(module, args, output)

    return run


class _Follower(Subscriber):
    """Tells the step's position which unit communicates."""

    turn = Turn.MEASURING

    def __init__(self, position: StepPosition, reduced: Callable[[Group], None]) -> None:
        self._position = position
        self._reduced = reduced

    def communicating(self, group: Group, role: Role) -> AbstractContextManager[None]:
        return self._position.communicating(unit_of(group), role == "gather")  # named when the model first runs

    def before_reduce(self, group: Group) -> None:
        self._reduced(group)

    def reduced(self, group: Group) -> None:
        self._reduced(group)
