"""Notices values that are written to gathered parameters, and so are lost when these are freed."""

from __future__ import annotations

import weakref

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from mmfsdp.basics.text import name_list
from mmfsdp.errors import ShardStateError
from mmfsdp.runtime.torch_fsdp2.gathering import gathered_values
from mmfsdp.runtime.torch_fsdp2.observing import Subscriber, Turn, subscribe, unsubscribe
from mmfsdp.runtime.torch_fsdp2.param_groups import Group

__all__ = ["LostWrites"]

_FORWARDS = 8
"""Training forwards after which nothing more is compared, where no optimizer of torch steps."""


class LostWrites(Subscriber):
    """Compares the values of gathered parameters when they are freed with those before, in the first steps.

    torch computes with gathered copies, which it throws away. Weights that a model changes in its forward, such as
    those of a momentum encoder or a codebook, would silently stay what they are.

    It keeps one flag per parameter, and leaves when it has been checked: before the first step of an optimizer of
    torch, or after `_FORWARDS` forwards.

    Args:
        module: The sharded root; nothing is compared while it is in evaluation mode.
        groups: Its parameter groups.
    """

    turn = Turn.COMPARING

    def __init__(self, module: nn.Module, groups: list[Group]) -> None:
        self._root = weakref.ref(module)
        self._groups = [weakref.ref(group) for group in groups]
        self._forwards = 0
        self._before: dict[int, tuple[list[str], torch.Tensor]] = {}
        self._changed: dict[int, tuple[list[str], torch.Tensor]] = {}
        subscribe(self, groups)

    def gathered(self, group: Group) -> None:
        """Keep what the copies add up to."""
        root = self._root()
        if root is not None and root.training:
            self._before[id(group)] = _sums(group)

    def before_free(self, group: Group) -> None:
        """Compare what they add up to with that, and keep which differ."""
        if (before := self._before.pop(id(group), None)) is None or not before[0]:
            return
        names, first = before
        _, second = _sums(group)
        changed = (first != second) & ~(first.isnan() & second.isnan())
        if (known := self._changed.get(id(group))) is not None:
            changed |= known[1]
        self._changed[id(group)] = names, changed

    def count_forward(self) -> bool:
        """Count a training forward, and return whether there were enough, so that `finish` is due."""
        self._forwards += 1
        return self._forwards > _FORWARDS

    def finish(self) -> None:
        """Leave, and check that nothing was lost. Not collective; waits for the device.

        Raises:
            ShardStateError: A parameter was written while it was gathered.
        """
        unsubscribe(self, [group for reference in self._groups if (group := reference()) is not None])
        found, self._changed, self._before = self._changed, {}, {}
        changed = [
            name
            for names, flags in found.values()
            for name, is_changed in zip(names, flags.tolist(), strict=True)
            if is_changed
        ]
        if changed:
            raise ShardStateError(
                f"{name_list(sorted(changed))} {'was' if len(changed) == 1 else 'were'} written in a forward, which "
                "computes with gathered copies of sharded parameters: what is written to them is lost when they are "
                "freed. Write them in place, inside `with torch.no_grad(), mmfsdp.sharded_params(...)`, which takes "
                "the modules that own them; or after the optimizer's step, outside of the forward."
            )


@torch.no_grad()
def _sums(group: Group) -> tuple[list[str], torch.Tensor]:
    # By position: before the first forward of the root its parameters have no names yet.
    found = [(name, _sum(value)) for name, value in gathered_values(group)]
    return [name for name, _ in found], torch.stack([value for _, value in found]) if found else torch.zeros(0)


def _sum(value: torch.Tensor) -> torch.Tensor:
    value = value.to_local() if isinstance(value, DTensor) else value.detach()
    if value.is_complex():
        value = torch.view_as_real(value)
    if value.dtype.itemsize == 1:  # torch does not add up float8
        value = value.view(torch.uint8)
    return value.sum(dtype=torch.float32)
