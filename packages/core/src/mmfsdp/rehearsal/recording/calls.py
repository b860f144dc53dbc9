"""Calls of operators without their tensors, which can be made again on real ones to see how long they take."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["Call", "Spec", "call_of", "seconds_of"]

_FRESH = 64 << 20  # bytes of arguments to take in turn: more than a core's caches hold, as the data of a step is
_MOST = 64  # sets of arguments
_ROUNDS = 5
_DRAWN = 1 << 16  # random values of a tensor, which repeat


@dataclass(frozen=True)
class Spec:
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self, device: torch.device) -> torch.Tensor:
        """Return such a tensor: floating-point values from 0 to 1, or zeros."""
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        count = 0 if 0 in self.shape else last + 1
        if self.dtype.is_floating_point:
            drawn = torch.rand(min(max(count, 1), _DRAWN), device=device).to(self.dtype)  # to draw all takes long
            return drawn.repeat(-(-count // len(drawn)))[:count].as_strided(self.shape, self.stride)
        return torch.zeros(count, dtype=self.dtype, device=device).as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Call:
    """A call of an operator."""

    func: Any
    args: Any
    kwargs: Any


def call_of(func: Any, args: Any, kwargs: Any) -> Call:
    """Return a call without its tensors."""
    plain = tree_map_only(torch.Tensor, lambda item: Spec(tuple(item.shape), item.stride(), item.dtype), (args, kwargs))
    on_meta = tree_map_only(torch.device, lambda _: None, plain)
    return Call(func, *on_meta)


def seconds_of(call: Call, clock: Callable[[], float], device: torch.device, budget: float = 0.01) -> float | None:
    """Return how long a call takes, the median of some; None if it cannot be made alone.

    Args:
        call: The call.
        clock: Returns seconds, after all issued operators are done.
        device: Where to make the tensors.
        budget: About how many seconds to spend.
    """
    specs = [leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Spec)]
    size = sum(torch.Size(spec.shape).numel() * spec.dtype.itemsize for spec in specs)
    count = max(1, min(_MOST, _FRESH // max(size, 1)))
    with torch.no_grad():
        try:
            sets = [_made(call, device)]
            first = _timed(call, sets, clock, 1)
        except (RuntimeError, TypeError, NotImplementedError, ValueError, IndexError):
            return None
        first = max(min(first, _timed(call, sets, clock, 1)), 1e-7)
        wanted = max(1, min(int(budget / _ROUNDS / first), 2000))
        sets += [_made(call, device) for _ in range(min(count, wanted) - 1)]
        sets = (sets * -(-wanted // len(sets)))[:wanted]
        return statistics.median(_timed(call, sets, clock, count) for _ in range(_ROUNDS))


def _made(call: Call, device: torch.device) -> Any:
    """Return the arguments of a call, with tensors of its own."""
    return tree_map_only(Spec, lambda spec: spec.make(device), (call.args, call.kwargs))


def _timed(call: Call, sets: list[Any], clock: Callable[[], float], most: int) -> float:
    kept = []  # a step keeps results, too, so memory is not taken again at once
    begin = clock()
    for args, kwargs in sets:
        kept.append(call.func(*args, **kwargs))
        if len(kept) == most:
            kept.clear()
    return (clock() - begin) / len(sets)
