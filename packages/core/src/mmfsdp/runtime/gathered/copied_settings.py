"""Carries settings that users make on gathered copies over to the shards, or raises where they would be lost.

After an evaluation the root is still gathered, and with some strategies every unit. Whoever then takes a parameter from
a layer, as in ``model.head.requires_grad_(False)``, gets the copy, which is thrown away or overwritten by the next
gathering.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from mmfsdp.basics.torch_releases import RUNS_UNITS_IN_PARTS, torch_has
from mmfsdp.errors import ShardStateError
from mmfsdp.runtime.torch_fsdp2.gathering import (
    follow_flags,
    gives_fewer_ranks_shards,
    plain_flags,
    shown_params,
    stays_gathered,
)
from mmfsdp.runtime.torch_fsdp2.observing import Subscriber, Turn, unsubscribe
from mmfsdp.runtime.torch_fsdp2.param_groups import Group

__all__ = ["CopiedSettings"]

_OF_TORCH = "_is_param"  # which nn.Parameter() sets on a DTensor


class _Known(NamedTuple):
    """A copy as it was when it was registered."""

    requires_grad: bool
    attributes: dict[str, Any]
    has_grad: bool | None = None
    version: int | None = None
    """Like ``address``, known only in an evaluation."""
    address: int | None = None

    def unchanged(self) -> dict[str, Any]:
        """Return the values that may not change while the copy is registered."""
        return {"has_grad": self.has_grad, "version": self.version, "address": self.address}


class CopiedSettings(Subscriber):
    """Carries over ``requires_grad`` and attributes of the copies that stay gathered after a forward.

    Gradients, hooks and values that were set on copies raise a `ShardStateError` when the copies are freed.
    """

    turn = Turn.COMPARING

    def __init__(self) -> None:
        self._known: dict[int, list[_Known]] = {}
        self._flags: dict[int, list[bool]] = {}  # in place of it in training, where no parameter has attributes
        self._trained: set[int] = set()

    def gathered(self, group: Group) -> None:
        """Give the copies the attributes of their shards, and note how they are."""
        if not stays_gathered(group):
            unsubscribe(self, [group])
            return
        self._trained.discard(id(group))
        self._known.pop(id(group), None)
        self._flags.pop(id(group), None)
        if torch.is_grad_enabled() and (flags := plain_flags(group)) is not None:
            self._flags[id(group)] = flags
        else:
            self._known[id(group)] = [_describe(copy, shard) for _, copy, shard in shown_params(group)]

    def before_backward(self, group: Group) -> None:
        """Freeze copies whose shards were frozen since the forward: the root's ``parameters()`` yields these."""
        if not group.is_unsharded:
            return
        if (flags := self._flags.get(id(group))) is not None:
            follow_flags(group, flags)
        elif (known := self._known.get(id(group))) is not None:
            follow_flags(group, [each.requires_grad for each in known])

    def before_reduce(self, group: Group) -> None:
        """Note that a backward computed the gradients of the copies."""
        self._trained.add(id(group))

    def before_gather(self, group: Group) -> None:
        """Carry over settings of shards of fewer ranks, which gathering replaces."""
        if not group.is_sharded and not group.is_unsharded:
            self.carry_over([group])

    def before_free(self, group: Group) -> None:
        """Carry over settings of the copies."""
        if not group.is_sharded:
            self.carry_over([group], freed=True)

    def carry_over(self, groups: Iterable[Group], *, freed: bool = False) -> None:
        """Carry over settings made since groups were gathered. Not collective.

        Args:
            groups: The groups.
            freed: Whether the copies are about to be replaced, by shards of all or of fewer ranks.

        Raises:
            ShardStateError: A gradient, a hook or values were set.
        """
        for group in groups:
            if (flags := self._flags.get(id(group))) is not None and not group.is_sharded:
                if not gives_fewer_ranks_shards(group) and plain_flags(group) == flags:
                    continue
                self._known[id(group)] = [_Known(flag, {}) for flag in self._flags.pop(id(group))]
            if (known := self._known.get(id(group))) is None:
                continue
            # Until torch 2.12 shards of fewer ranks are made to be trained, whatever the shard's own flag is.
            is_told = group.is_unsharded or torch_has(RUNS_UNITS_IN_PARTS)
            after = []
            for (name, copy, shard), before in zip(shown_params(group), known, strict=True):
                if copy is not shard and is_told:
                    _check(name, copy, before, is_trained=id(group) in self._trained)
                    _carry(copy, shard, before)
                now = _Known(copy.requires_grad, _attributes(copy))
                after.append(now if freed else now._replace(**before.unchanged()))
            self._known[id(group)] = after


def _describe(copy: nn.Parameter, shard: nn.Parameter) -> _Known:
    if attributes := _attributes(shard):
        vars(copy).update(attributes)
    if torch.is_grad_enabled():  # in training, LostWrites compares values
        return _Known(copy.requires_grad, attributes)
    return _Known(copy.requires_grad, attributes, copy.grad is not None, copy._version, copy.data_ptr())


def _attributes(tensor: torch.Tensor) -> dict[str, Any]:
    return {key: value for key, value in vars(tensor).items() if key != _OF_TORCH}


def _carry(copy: nn.Parameter, shard: nn.Parameter, before: _Known) -> None:
    if copy.requires_grad != before.requires_grad:
        shard.requires_grad_(copy.requires_grad)
    for key, value in _attributes(copy).items():
        if key not in before.attributes or value is not before.attributes[key]:
            setattr(shard, key, value)


def _check(name: str, copy: nn.Parameter, before: _Known, *, is_trained: bool) -> None:
    hooks = copy._post_accumulate_grad_hooks or ()
    if copy._backward_hooks or len(hooks) > 1:  # one is ours
        what, instead = "A gradient hook was registered with", "Register it with"
    elif before.version is None or copy.device.type == "meta":
        return
    elif copy._version != before.version or copy.data_ptr() != before.address:
        what, instead = "Values were written to", "Write, in place, to"
    elif not before.has_grad and copy.grad is not None and not is_trained:
        what, instead = "A gradient was set on", "Set that of"
    else:
        return
    raise ShardStateError(
        f"{what} the gathered copy of {name!r}, which a layer holds after a forward; it would be lost, as the next "
        f"gathering overwrites the copy. {instead} the parameter that the sharded model's named_parameters() returns.",
        fqn=name,
    )
