"""Notices values that are written to gathered parameters, and so are lost when these are freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from mmfsdp.basics.text import name_list
from mmfsdp.errors import ShardStateError
from mmfsdp.runtime.param_groups import around, gathered_values

__all__ = ["LostWrites"]

_Sums = dict[str, torch.Tensor]


class LostWrites:
    """Compares the values of gathered parameters when they are freed with those before, until the first step.

    torch computes with gathered copies, which it throws away. Weights that a model changes in its forward, such as
    those of a momentum encoder or a codebook, would silently stay what they are.

    Args:
        module: The sharded root; nothing is compared while it is in evaluation mode.
        groups: Its parameter groups.

    Attributes:
        is_over: Whether the first step was checked.
    """

    def __init__(self, module: nn.Module, groups: Iterable[Any]) -> None:
        self.is_over = False
        self._found: list[tuple[_Sums, _Sums]] = []
        me, root = weakref.ref(self), weakref.ref(module)
        for group in groups:
            _watch(group, me, root)

    def add(self, before: _Sums, after: _Sums) -> None:
        """Note sums of parameters' values when they were gathered, and when they were freed."""
        self._found.append((before, after))

    def check(self) -> None:
        """Check, before the first step, that nothing was lost. Not collective; waits for the device.

        Raises:
            ShardStateError: A parameter was written while it was gathered.
        """
        self.is_over = True
        found, self._found = self._found, []
        changed = {name for before, after in found for name in _changed(before, after)}
        if changed:
            raise ShardStateError(
                f"{name_list(sorted(changed))} {'was' if len(changed) == 1 else 'were'} written in a forward, which "
                "computes with gathered copies of sharded parameters: what is written to them is lost when they are "
                "freed. Write them in place, inside `with torch.no_grad(), mmfsdp.sharded_params(...)`, which takes "
                "the modules that own them; or after the optimizer's step, outside of the forward."
            )


def _watch(group: Any, me: weakref.ref[LostWrites], root: weakref.ref[nn.Module]) -> None:
    before: _Sums = {}

    def noting(gathering: Callable[[], None]) -> Callable[[], None]:
        def gathered() -> None:
            gathering()
            watch, model = me(), root()
            if watch is not None and not watch.is_over and model is not None and model.training:
                before.update(_sums(group))

        return gathered

    def comparing(freeing: Callable[[], None]) -> Callable[[], None]:
        def freed() -> None:
            watch = me()
            if before and watch is not None and not watch.is_over:
                watch.add(dict(before), _sums(group))
            before.clear()
            freeing()

        return freed

    around(group, "_to_unsharded", noting)
    around(group, "_to_sharded", comparing)
    around(group, "_to_sharded_post_forward", comparing)


@torch.no_grad()
def _sums(group: Any) -> _Sums:
    return {name: _sum(value) for name, value in gathered_values(group)}


def _sum(value: torch.Tensor) -> torch.Tensor:
    value = value.to_local() if isinstance(value, DTensor) else value.detach()
    if value.is_complex():
        value = torch.view_as_real(value)
    if value.dtype.itemsize == 1:  # torch does not add up float8
        value = value.view(torch.uint8)
    return value.sum(dtype=torch.float32)


def _changed(before: _Sums, after: _Sums) -> Iterable[str]:
    first, second = torch.stack([*before.values()]), torch.stack([after[name] for name in before])
    differs = (first != second) & ~(first.isnan() & second.isnan())
    return (name for name, is_different in zip(before, differs.tolist(), strict=True) if is_different)
