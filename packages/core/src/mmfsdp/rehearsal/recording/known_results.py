"""Remembers what operators on fake tensors return: most operators of a step repeat an earlier layer's.

torch remembers results, too, but for all that its compilers may meet, and spends half of a rehearsal on doing so.
Here a result is remembered only if it follows from what `layout_of` says of the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmfsdp.rehearsal.fakes.fake import fake_like, is_fake, layout_of
from mmfsdp.rehearsal.recording.kernels.foreach import one_by_one

__all__ = ["DEVICE", "KnownResults", "Recipe", "Recipes"]

DEVICE = torch.ops.prim.device.default
"""The operator that asks a tensor for its device: half of all calls, and slow in torch if the tensor is fake."""

_NAMESPACES = ("aten", "fsdp", "prims")
_UNSURE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
_CHANGES = ("aten::lift", "aten::resize", "aten::resolve_", "aten::set_")
"""Operators that look at more than layouts, or change the layouts of their arguments."""

_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
"""Types of arguments for which equal ones of the same type can stand."""

Recipe = Callable[[Any, Sequence[torch.Tensor]], Any]
"""Makes a result in a context of fake tensors, from those among the arguments."""


Recipes = dict[tuple[Any, ...], Recipe | None]
"""Recipes by what results depend on; None where that may be more."""


class _UnsureError(Exception):
    """A result may depend on more than layouts."""


class KnownResults(TorchDispatchMode):
    """Runs operators on fake tensors, those whose arguments have equal layouts once; all of them while it is active.

    Args:
        mode: The context of `fake_tensors`.
        recipes: What is known from other contexts, with operators of the same device; it is added to.
    """

    def __init__(self, mode: Any, recipes: Recipes | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode
        self._is_sure: dict[Any, bool] = {}
        self._recipes: Recipes = {} if recipes is None else recipes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and is_fake(args[0]):
            return args[0].device
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own operators on local tensors follow
        return self.run(func, args, kwargs or {})[0]

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Recipe | None]:
        """Return an operator's result, and its recipe if it is not the first of the kind.

        Args:
            func: The operator, an overload.
            args: Its positional arguments.
            kwargs: Its other arguments.
        """
        is_sure = self._is_sure.get(func)
        if is_sure is None:
            is_sure = self._is_sure[func] = _is_sure(func)
        if not is_sure:
            return func(*args, **kwargs), None
        try:
            key, tensors = self._described(func, args, kwargs)
        except _UnsureError:
            return func(*args, **kwargs), None
        recipe = self._recipes.get(key)
        if recipe is not None:
            return recipe(self._mode, tensors), recipe
        single = one_by_one(func, args, kwargs)
        if single is None:
            result = func(*args, **kwargs)
        else:
            results = [self.run(func, one, kwargs)[0] for one in single]
            result = [made for (made,) in results] if func._schema.returns else None
        if key not in self._recipes:
            self._recipes[key] = None
            with suppress(_UnsureError):
                if self._described(func, args, kwargs)[0] == key:  # it has changed no layout
                    self._recipes[key] = _recipe_of(self._mode, result, tensors)
        return result, None

    def _described(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], list[torch.Tensor]]:
        """Return what an operator's result depends on, and the tensors among its arguments.

        Raises:
            _UnsureError: It may depend on more.
        """
        parts: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled(), *kwargs]
        tensors: list[torch.Tensor] = []
        self._describe(args, parts, tensors)
        if kwargs:
            self._describe(kwargs.values(), parts, tensors)
        return tuple(parts), tensors

    def _describe(self, values: Iterable[Any], parts: list[Any], tensors: list[torch.Tensor]) -> None:
        for value in values:
            kind = type(value)
            if kind in _PLAIN:
                parts += kind, value
            elif kind is list or kind is tuple:
                parts.append(len(value))
                self._describe(value, parts, tensors)
            elif isinstance(value, torch.Tensor) and (layout := layout_of(value, self._mode)) is not None:
                parts.append(layout)
                tensors.append(value)
            else:
                raise _UnsureError


def _is_sure(func: Any) -> bool:
    if func.namespace not in _NAMESPACES or any(tag in func.tags for tag in _UNSURE):
        return False
    return not func._schema.name.startswith(_CHANGES)


def _recipe_of(mode: Any, result: Any, tensors: Sequence[torch.Tensor]) -> Recipe:
    """Return what makes an equal result from other tensors of the same layouts.

    Raises:
        _UnsureError: It may depend on more than these.
    """
    storages = [tensor.untyped_storage() for tensor in tensors]
    owners: dict[int, list[int]] = {}
    for index, storage in enumerate(storages):
        owners.setdefault(id(storage), []).append(index)
    if not isinstance(result, list | tuple):
        return _recipe_of_one(mode, result, tensors, owners)
    made = [part.untyped_storage() for part in result if isinstance(part, torch.Tensor)]
    new = [id(storage) for storage in made if id(storage) not in owners]
    if len({*new}) < len(new):  # some of them share memory
        raise _UnsureError
    kind, makes = type(result), [_recipe_of_one(mode, part, tensors, owners) for part in result]
    return lambda mode, given: kind([make(mode, given) for make in makes])


def _recipe_of_one(
    mode: Any, result: Any, tensors: Sequence[torch.Tensor], owners: Mapping[int, Sequence[int]]
) -> Recipe:
    """Return what makes one result; ``owners`` are the indices of the tensors that share a storage, by its id."""
    if result is None or type(result) is int:
        return lambda mode, given: result
    layout = layout_of(result, mode) if isinstance(result, torch.Tensor) else None
    indices = () if layout is None else owners.get(id(result.untyped_storage()), ())
    if layout is None or len(indices) > 1:  # which one it comes from is not known
        raise _UnsureError
    if indices and result is tensors[indices[0]]:
        return lambda mode, given: given[indices[0]]
    _, _, dtype, offset, wants_gradient, _, nbytes = layout
    if wants_gradient:
        raise _UnsureError
    if not indices and not offset and _reach(layout) == nbytes:
        return lambda mode, given: fake_like(layout, mode)
    if indices and dtype == tensors[indices[0]].dtype and _reach(layout) <= nbytes:
        return lambda mode, given: fake_like(layout, mode, given[indices[0]])
    raise _UnsureError


def _reach(layout: tuple[Any, ...]) -> int:
    """Return the bytes of a storage up to the last one that a tensor addresses."""
    shape, stride, dtype, offset = layout[:4]
    if 0 in shape:
        return 0
    last: int = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return (last + 1) * int(dtype.itemsize)
