"""Raises an error where parameters of torch's FSDP1 are frozen or thawed at a time when flat gradients cannot follow.

Parameters of a unit share one gradient. torch decides in forward whether to compute it, and hides the parts of frozen
parameters. It neither computes parts separately nor keeps the parts of parameters that are frozen later.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn

from mmfsdp.errors import ShardStateError
from mmfsdp.runtime.fsdp1.flat_backwards import clear_gradient_of, flat_flags, has_piece_of
from mmfsdp.runtime.fsdp1.flat_params import flat_handles, flat_units
from mmfsdp.runtime.gradients.backward import is_backward

__all__ = ["refuse_late_freezing"]


def refuse_late_freezing(module: nn.Module, writes: Callable[[], int]) -> None:
    """From now on, raise in a backward whose gradients would contradict the parameters' ``requires_grad``.

    That is, if since the forward a unit was frozen, or no longer is, or part of it no longer is; or if part of it was
    frozen, or no longer is, while gradients are accumulated. Freezing a part right after the forward has the effect
    that it has in one process. Not collective; ``requires_grad`` must be the same on all ranks.

    Args:
        module: The sharded root; without effect if it has no FullyShardedDataParallel.
        writes: Returns a number that changes with each step of the optimizer, alike on all ranks.
    """
    handles = flat_handles(module)
    flats = [(name, weakref.ref(handle.flat_param)) for name, handle in handles]
    for index, ((name, handle), unit) in enumerate(zip(handles, flat_units(module), strict=True)):
        parts = _Parts(name, handle.flat_param, writes)
        unit.register_forward_pre_hook(torch.compiler.disable(parts.note))
        # The outermost unit begins: it checks also those that the backward does not reach.
        checked = flats if index == 0 else flats[index : index + 1]
        handle.prepare_gradient_for_backward = _checking(handle.prepare_gradient_for_backward, checked, parts)


def _checking(
    prepare: Callable[[], None], flats: Sequence[tuple[str, weakref.ref[Any]]], parts: _Parts
) -> Callable[[], None]:
    def prepare_checked() -> None:
        for name, reference in flats:
            if (flat := reference()) is not None:
                _check(name, flat)
        parts.check()
        prepare()

    return prepare_checked


def _check(name: str, flat: Any) -> None:
    # Since a forward with gradients: (AccumulateGrad, hook), or (hook,) if the unit was frozen in it.
    known = getattr(flat, "_post_backward_hook_state", None)
    if known is not None and len(known) != flat.requires_grad + 1:
        raise ShardStateError(
            f"requires_grad of the parameters of the shard unit {name or '(root)'!r} was set to {flat.requires_grad} "
            "between a forward and its backward, which engine 'fsdp1' cannot follow. Set it before the forward or "
            "after the backward, or use engine 'fsdp2'.",
            fqn=name,
        )


class _Parts:
    """``requires_grad`` of a unit's parameters in its last forward, and in the backward before.

    Args:
        name: FQN of the unit.
        flat: Its flat parameter.
        writes: See `refuse_late_freezing`.
    """

    def __init__(self, name: str, flat: Any, writes: Callable[[], int]) -> None:
        self._name = name
        self._flat = weakref.ref(flat)
        self._count_writes, self._writes = writes, -1
        self._in_forward: list[bool] | None = None
        self._in_backward: list[bool] | None = None

    def note(self, *_: Any) -> None:
        """Call it before each forward of the unit."""
        # Whatever runs in a backward builds its graph with today's flags.
        if torch.is_grad_enabled() and not is_backward() and (flat := self._flat()) is not None:
            self._in_forward = flat_flags(flat)

    def check(self) -> None:
        """Call it before each backward of the unit.

        Raises:
            ShardStateError: The flags contradict the forward, or the gradient that is accumulated.
        """
        if (flat := self._flat()) is None:
            return
        in_forward, before, written = self._in_forward, self._in_backward, self._writes
        now = self._in_backward = flat_flags(flat)
        self._in_forward, self._writes = None, self._count_writes()
        if in_forward is not None and in_forward != now:
            for index, (was_trained, is_trained) in enumerate(zip(in_forward, now, strict=True)):
                if is_trained and not was_trained:
                    when, instead = "between a forward and its backward", "before the forward or after the backward"
                    raise self._error(flat, index, when, instead)
        if before is not None and before != now:
            changed = [index for index, is_trained in enumerate(now) if is_trained != before[index]]
            if written == self._writes and _is_accumulated(flat, before):
                when, instead = "while gradients are accumulated", "after zero_grad(set_to_none=True)"
                raise self._error(flat, changed[0], when, instead)
            for index in changed:
                if now[index]:  # zero_grad(set_to_none=False) does not reach what torch hides
                    clear_gradient_of(flat, index)

    def _error(self, flat: Any, index: int, when: str, instead: str) -> ShardStateError:
        fqn = ".".join(part for part in (self._name, flat._fqns[index]) if part)
        return ShardStateError(
            f"requires_grad of {fqn!r} was set to {flat_flags(flat)[index]} {when}, which engine 'fsdp1' cannot "
            f"follow: the parameters of the shard unit {self._name or '(root)'!r} share one gradient. Set it "
            f"{instead}, or use engine 'fsdp2'.",
            fqn=fqn,
        )


def _is_accumulated(flat: Any, trained: Sequence[bool]) -> bool:
    """Return whether a gradient of the backward before is kept, if no step followed it. The same on all ranks.

    zero_grad() leaves no trace on a rank that has no piece of a parameter that was trained.
    """
    return flat.grad is not None or not has_piece_of(flat, trained)
