"""Notices gathered parameters that are moved to other memory, or written: freeing them loses what was written."""

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
"""Number of training forwards to compare where no optimizer of torch steps."""


class LostWrites(Subscriber):
    """Checks in the first steps that values and addresses of gathered parameters stay the same until they are freed.

    torch computes with gathered copies, which it throws away. If a model changes weights in its forward, such as a
    momentum encoder or a codebook, the shards would silently keep their old values. torch gathers into the same memory
    again: a copy that a model has moved elsewhere would keep the values of its first step.

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
        self._before: dict[int, _Gathered] = {}
        self._changed: dict[int, tuple[list[str], torch.Tensor]] = {}
        self._moved: set[str] = set()
        subscribe(self, groups)

    def gathered(self, group: Group) -> None:
        """Keep the sums and addresses of the copies."""
        root = self._root()
        if root is not None and root.training:
            self._before[id(group)] = _Gathered(group)

    def before_free(self, group: Group) -> None:
        """Compare both with the present ones, and keep which differ."""
        if (before := self._before.pop(id(group), None)) is None or not before.names:
            return
        after = _Gathered(group)
        pairs = zip(before.names, before.addresses, after.addresses, strict=True)
        self._moved.update(name for name, address, now in pairs if address != now)
        first, second = before.sums, after.sums
        changed = (first != second) & ~(first.isnan() & second.isnan())
        if (known := self._changed.get(id(group))) is not None:
            changed |= known[1]
        self._changed[id(group)] = before.names, changed

    def count_forward(self) -> bool:
        """Count a training forward, and return whether there were enough, so that `finish` is due."""
        self._forwards += 1
        return self._forwards > _FORWARDS

    def finish(self) -> None:
        """Leave, and check that nothing was lost. Not collective; waits for the device.

        Raises:
            ShardStateError: A parameter was written, or moved, while it was gathered.
        """
        unsubscribe(self, [group for reference in self._groups if (group := reference()) is not None])
        found, self._changed, self._before = self._changed, {}, {}
        changed = [
            name
            for names, flags in found.values()
            for name, is_changed in zip(names, flags.tolist(), strict=True)
            if is_changed
        ]
        if self._moved:
            raise ShardStateError(
                f"{name_list(sorted(self._moved))} {'was' if len(self._moved) == 1 else 'were'} moved to other memory "
                "in a forward, where later steps would find the values of this one: torch gathers sharded parameters "
                "into the memory that they had. Drop what assigns to `.data` or calls `set_()` in the forward, or "
                "leave these parameters out of sharding with sharding.ignored_parameters."
            )
        if changed:
            raise ShardStateError(
                f"{name_list(sorted(changed))} {'was' if len(changed) == 1 else 'were'} written in a forward, which "
                "computes with gathered copies of sharded parameters: what is written to them is lost when they are "
                "freed. Write them in place, inside `with torch.no_grad(), mmfsdp.sharded_params(...)`, which takes "
                "the modules that own them; or after the optimizer's step, outside of the forward."
            )


class _Gathered:
    """Sums and addresses of the gathered copies of a group; by position, as names come late.

    Attributes:
        names: FQNs; before the first forward of the root its parameters have none yet.
        addresses: Where the copies begin in memory.
        sums: Sums in float32.
    """

    @torch.no_grad()
    def __init__(self, group: Group) -> None:
        found = [(name, _plain(value)) for name, value in gathered_values(group)]
        self.names = [name for name, _ in found]
        self.addresses = [value.data_ptr() for _, value in found]
        self.sums = torch.stack([_sum(value) for _, value in found]) if found else torch.zeros(0)


def _plain(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value.detach()


def _sum(value: torch.Tensor) -> torch.Tensor:
    if value.is_complex():
        value = torch.view_as_real(value)
    if value.dtype.itemsize == 1:  # torch does not add up float8
        value = value.view(torch.uint8)
    return value.sum(dtype=torch.float32)
