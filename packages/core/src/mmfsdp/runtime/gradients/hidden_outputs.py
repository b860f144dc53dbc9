"""Makes backwards right that begin at tensors which the output of a unit does not show.

torch finds the tensors in lists, tuples, dicts and dataclasses that a unit returns: the backward of one of them gathers
the unit and, at its end, reduces gradients. A loss in an object of another class, or one that a module keeps as an
attribute, would train nothing, or meet weights that were freed.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_leaves

from mmfsdp.runtime.torch_fsdp2.gathering import gathered_copies
from mmfsdp.runtime.torch_fsdp2.iterations import begin_backward, reduce_at_end
from mmfsdp.runtime.torch_fsdp2.observing import Subscriber, Turn, unsubscribe
from mmfsdp.runtime.torch_fsdp2.param_groups import Group

__all__ = ["HiddenOutputs", "ReduceAlways", "show_tensors", "tensors_in"]

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, type, ModuleType, nn.Module)
_DEPTH, _MOST = 8, 2000  # of nested objects, and of objects in one search
_LOOKS = 8
"""Training forwards after which modules are no longer searched for tensors that they keep."""
_OWN = vars(nn.Module()).keys()


class ReduceAlways(Subscriber):
    """Makes every backward that reaches a parameter of a unit end with the reduction of gradients.

    Args:
        root: The sharded root.
    """

    turn = Turn.AGREEING

    def __init__(self, root: nn.Module) -> None:
        self._root = weakref.ref(root)

    def gathered(self, group: Group) -> None:
        """Watch the copies, which torch makes once."""
        unsubscribe(self, [group])
        accumulated = partial(_accumulated, self._root, weakref.ref(group))
        for copy in gathered_copies(group):
            if copy.is_floating_point() or copy.is_complex():  # packed integers never have gradients
                is_trained = copy.requires_grad
                copy.requires_grad_(True)  # it may be trained later, and torch accepts hooks only then
                copy.register_post_accumulate_grad_hook(accumulated)
                copy.requires_grad_(is_trained)


def _accumulated(root: weakref.ref[nn.Module], group: weakref.ref[Group], _: torch.Tensor) -> None:
    if (live := root()) is not None and (its_group := group()) is not None:
        reduce_at_end(live, its_group)


class HiddenOutputs:
    """Gathers a unit for backwards that begin at tensors in objects that it returns, or in attributes of its modules.

    Args:
        module: The module that was given to ``fully_shard``, or the FullyShardedDataParallel around the unit.
        owned: All modules of the unit.
        show: ``(module, tensors)``, makes the backward of tensors gather the unit.
    """

    def __init__(
        self, module: nn.Module, owned: Iterable[nn.Module], show: Callable[[Any, Sequence[torch.Tensor]], None]
    ) -> None:
        self._module, self._show = weakref.ref(module), show
        self._owned = [weakref.ref(part) for part in owned]
        self._looks = 0
        self._keepers: dict[tuple[int, str], weakref.ref[nn.Module]] = {}
        self._hooked: dict[int, weakref.ref[torch.Tensor]] = {}  # in the forward before

    def accept(self, args: Any, output: Any) -> None:
        """Call it after each forward of the unit, outside of a backward.

        Args:
            args: The arguments of the forward, in any structure.
            output: Its result, in any structure.
        """
        if not torch.is_grad_enabled():
            return
        found = [*_hidden_in(output), *self._kept()]
        if not found or (module := self._module()) is None:
            return
        shown = {id(leaf) for leaf in tree_leaves((args, output))}
        before, self._hooked = self._hooked, {id(tensor): weakref.ref(tensor) for tensor in found}
        new = [tensor for tensor in found if id(tensor) not in shown and not _is_in(before, tensor)]
        self._show(module, new)

    def _kept(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that modules of the unit keep: wherever some were found in the first forwards."""
        if self._looks < _LOOKS:
            self._looks += 1
            parts = [part for reference in self._owned if (part := reference()) is not None]
            seen = _Seen()
            for part in parts:
                for name, value in vars(part).items():
                    if name in _OWN or name.startswith("__"):  # what torch keeps beside a module's own attributes
                        continue
                    if any(True for _ in _tensors_in(value, seen)):
                        self._keepers[id(part), name] = weakref.ref(part)
        seen = _Seen()
        for (_, name), reference in self._keepers.items():
            if (keeper := reference()) is not None:
                yield from _tensors_in(vars(keeper).get(name), seen)


def tensors_in(output: Any) -> list[torch.Tensor]:
    """Return the tensors of an output in any structure, those in attributes of objects included."""
    shown = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return [*shown, *_hidden_in(output)]


def _is_in(known: Mapping[int, weakref.ref[torch.Tensor]], tensor: torch.Tensor) -> bool:
    return id(tensor) in known and known[id(tensor)]() is tensor


def show_tensors(module: nn.Module, tensors: Sequence[torch.Tensor]) -> None:
    """Make the backward of tensors gather the unit of a module that was given to ``fully_shard``."""
    for tensor in tensors:
        tensor.register_hook(partial(_begin, weakref.ref(module)))


def _begin(module: weakref.ref[nn.Module], grad: torch.Tensor) -> None:
    if (live := module()) is not None:
        begin_backward(live, grad)


def _hidden_in(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors with a backward in those parts of an output that torch does not look into."""
    if isinstance(output, torch.Tensor):
        return
    seen = _Seen()
    for leaf in tree_leaves(output):
        if not isinstance(leaf, torch.Tensor):
            yield from _tensors_in(leaf, seen)


class _Seen:
    """The objects that a search has visited, so that it ends even if objects refer to each other."""

    def __init__(self) -> None:
        self._ids: set[int] = set()

    def is_new(self, value: object) -> bool:
        if id(value) in self._ids or len(self._ids) >= _MOST:
            return False
        self._ids.add(id(value))
        return True


def _tensors_in(value: Any, seen: _Seen, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors with a backward in containers and in the attributes of objects; modules are left out."""
    if isinstance(value, _PLAIN) or not seen.is_new(value):
        return
    if isinstance(value, torch.Tensor):
        if value.grad_fn is not None:
            yield value
        return
    if depth >= _DEPTH or callable(value):
        return
    for part in _parts_of(value):
        yield from _tensors_in(part, seen, depth + 1)


def _parts_of(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [*value.values()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [*value]
    slots = [name for kind in type(value).__mro__ for name in _slots_of(kind)]
    return [*vars(value).values()] if hasattr(value, "__dict__") else [getattr(value, name, None) for name in slots]


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
