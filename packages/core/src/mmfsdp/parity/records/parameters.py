"""Records the end of a step: gradients, settings, updates, optimizer state, parameters and buffers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mmfsdp.errors import ConfigError, StateDictError
from mmfsdp.parity.records.naming import plain_name
from mmfsdp.parity.records.record_files import CHANGED, EACH
from mmfsdp.parity.records.slots import Placed, Slots
from mmfsdp.parity.records.writing import Part
from mmfsdp.runtime.dtensors import box_of

__all__ = ["Parameters", "optimizers_of"]

_NO_SETTINGS = ("params", "foreach", "fused", "capturable", "differentiable")
"""In a param group, what says how an optimizer computes, not what."""

_BLOCK = 1 << 18  # elements that a processor's cache holds beside as many weights


class Parameters:
    """This rank's parts of a model's parameters, and of what an optimizer has for them. Nothing is collective.

    Args:
        model: The model, without DDP around it.
        optimizers: Its optimizers.
        slots: The slots of the record.
        is_flat: Whether parameters are pieces of flat ones, which are no boxes: then there are none here.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], slots: Slots, *, is_flat: bool) -> None:
        self.slots = slots
        self._model, self._optimizers, self._is_flat = model, optimizers, is_flat
        self._names = {id(param): plain_name(name) for name, param in model.named_parameters()}
        self._before: dict[int, torch.Tensor] = {}
        self._between = _BetweenSteps()

    def named(self, optimizer: Optimizer | None = None) -> list[tuple[str, torch.Tensor]]:
        """Return the parameters that an optimizer updates, with their names. Default: of all optimizers."""
        groups = [group for each in self._chosen(optimizer) for group in each.param_groups]
        params = [param for group in groups for param in group["params"]]
        return [(self._names[id(param)], param) for param in params if id(param) in self._names]

    def part(self, kind: str, name: str, value: torch.Tensor, local: torch.Tensor | None = None) -> Part:
        """Return this rank's part of a tensor.

        Args:
            kind: See `mmfsdp.parity.records.record_files.Key`.
            name: See `mmfsdp.parity.records.record_files.Key`.
            value: The tensor, or one that is sharded as it is.
            local: This rank's part, if it differs from the local part of ``value``.
        """
        if local is None:
            local = _local(value)
        if not local.numel():
            local = local.reshape(box_of(value).sizes)
        slots = self.slots
        return slots.find(kind, name, slots.count(kind, name), local, partial(_placed, value)), local

    def gradients(self, kind: str, optimizer: Optimizer | None = None) -> list[Part]:
        """Return the gradients that there are, of an optimizer's parameters or of all."""
        grads = [(name, param.grad) for name, param in self.named(optimizer)]
        return [self.part(kind, name, grad) for name, grad in grads if grad is not None and _is_plain(grad)]

    def settings(self, optimizer: Optimizer) -> Iterator[Part]:
        """Yield the settings of an optimizer: of each group's first parameter, and each of all parameters in a row.

        In the rows parameters are ordered by name, so they show a parameter that is in another group.
        """
        rows: dict[str, dict[str, float]] = {}
        for group in (group for each in self._chosen(optimizer) for group in each.param_groups):
            names = [self._names[id(param)] for param in group["params"] if id(param) in self._names]
            for setting, value in group.items() if names else ():
                numbers = [*value] if isinstance(value, tuple | list) else [value]
                if setting in _NO_SETTINGS or setting.startswith("initial_") or not numbers:
                    continue
                if all(map(_is_number, numbers)):
                    yield self._setting(f"{names[0]}[{setting}]", numbers)
                    for index, number in enumerate(numbers):
                        key = setting if len(numbers) == 1 else f"{setting}.{index}"
                        rows.setdefault(key, {}).update(dict.fromkeys(names, float(number)))
        for setting, values in rows.items():
            yield self._setting(f"{EACH}[{setting}]", [values[name] for name in sorted(values)])

    def _setting(self, name: str, numbers: Sequence[Any]) -> Part:
        held = torch.tensor([float(number) for number in numbers], dtype=torch.float64)
        placed = partial(Placed, "alike", (0,), tuple(held.shape))
        return self.slots.find("setting", name, self.slots.count("setting", name), held, placed), held

    def keep(self, optimizer: Optimizer) -> None:
        """Keep an optimizer's parameters, to tell by how much its step changes them."""
        self._before = {id(param): _local(param).clone() for _, param in self.named(optimizer)}

    def forget(self) -> None:
        """Drop what `keep` has kept."""
        self._before.clear()

    def remember(self) -> None:
        """Keep sketches of parameters at the end of a step, for `changed` at the beginning of the next one."""
        self._between.remember(param for _, param in self.named())

    def changed(self) -> list[Part]:
        """Return the parameters that are no longer what the step before has left, and forget that."""
        params = self.named()
        changed = self._between.changed(param for _, param in params)
        return [self.part(CHANGED, name, param) for name, param in params if id(param) in changed]

    def after_step(self, optimizer: Optimizer) -> Iterator[Part]:
        """Yield updates, an optimizer's state and parameters."""
        for name, param in self.named(optimizer):
            if (old := self._before.get(id(param))) is not None:
                yield self.part("update", name, param, torch.sub(_local(param), old, out=old))
            for entry, value in optimizer.state.get(param, {}).items():
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == param.shape:
                    yield self.part("state", f"{name}[{entry}]", value)
            yield self.part("parameter", name, param)

    def buffers(self) -> list[Part]:
        """Return the model's buffers."""
        found = [(plain_name(name), buffer) for name, buffer in self._model.named_buffers()]
        plain = [(name, buffer) for name, buffer in found if _is_plain(buffer) and not isinstance(buffer, DTensor)]
        return [self.part("buffer", name, buffer) for name, buffer in plain]

    def _chosen(self, optimizer: Optimizer | None) -> Sequence[Optimizer]:
        return () if self._is_flat else self._optimizers if optimizer is None else (optimizer,)


def optimizers_of(given: Optimizer | Sequence[Optimizer]) -> tuple[Optimizer, ...]:
    """Return one optimizer or several as a tuple.

    Raises:
        ConfigError: No optimizer was given, or one of them is something else.
    """
    found = (given,) if isinstance(given, Optimizer) else tuple(given)
    if not found or not all(isinstance(each, Optimizer) for each in found):
        raise ConfigError(f"Give an optimizer or a list of optimizers, got {given!r}.", config="optimizer")
    return found


def _is_plain(value: torch.Tensor) -> bool:
    return value.layout == torch.strided


def _is_number(value: Any) -> bool:
    """Return whether a setting is a number that the processor holds; reading others would wait for their device."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and value.device.type == "cpu"
    return isinstance(value, int | float)


def _local(value: torch.Tensor) -> torch.Tensor:
    held = value.to_local() if isinstance(value, DTensor) else value
    return held.detach() if held.requires_grad else held


def _placed(value: torch.Tensor) -> Placed:
    """Return where this rank's part of a tensor lies."""
    try:
        box = box_of(value)
    except StateDictError:  # a placement that is no box: only this rank's part is known
        local = _local(value)
        return Placed("own", (0,) * local.dim(), tuple(local.shape))
    return Placed("box", box.offsets, tuple(value.shape))


class _BetweenSteps:
    """Sketches of this rank's parts of parameters after a step. Equal numbers have equal sketches, to the last bit.

    A sketch adds up elements times fixed random weights, so it also tells signs and the order of elements. They are
    kept by parameter: for the time of a step a param group may be divided, in another order.
    """

    def __init__(self) -> None:
        self._known: dict[int, float | torch.Tensor] = {}

    def remember(self, params: Iterable[torch.Tensor]) -> None:
        """Keep the sketches after a step. Not collective."""
        self._known = _sketches(params)

    def changed(self, params: Iterable[torch.Tensor]) -> set[int]:
        """Return the identities of parameters whose sketches differ from those kept, and drop those. Not collective."""
        if not self._known:
            return set()
        before, now = self._known, _sketches(params)
        self._known = {}
        found, flags = set(), {}
        for key, old in before.items():
            if (new := now.get(key)) is None:
                continue
            if isinstance(old, float) and isinstance(new, float):
                if old != new and math.isfinite(old):
                    found.add(key)
            else:
                held = torch.as_tensor(old)
                flags[key] = (held.ne(torch.as_tensor(new)) & held.isfinite()).any()
        if len({flag.device for flag in flags.values()}) > 1:
            flags = {key: flag.cpu() for key, flag in flags.items()}
        are_others = torch.stack([*flags.values()]).tolist() if flags else []  # a device is waited for once
        return found | {key for key, is_other in zip(flags, are_others, strict=True) if is_other}


@torch.no_grad()
def _sketches(params: Iterable[torch.Tensor]) -> dict[int, float | torch.Tensor]:
    found: dict[int, float | torch.Tensor] = {}
    for param in params:
        held = param.to_local() if isinstance(param, DTensor) else param
        if held.is_complex():
            held = torch.view_as_real(held)
        if held.device.type == "cpu" and held.dtype in (torch.float32, torch.float64) and held.is_contiguous():
            found[id(param)] = _by_blocks(held.detach().view(-1))
        elif held.is_floating_point():
            found[id(param)] = _by_sums(held)
    return found


def _by_blocks(flat: torch.Tensor) -> float:
    weights = _weights(_BLOCK, flat.dtype, flat.device)
    parts = flat.split(_BLOCK)
    return math.fsum((1 + number) * part.dot(weights[: len(part)]).item() for number, part in enumerate(parts))


def _by_sums(held: torch.Tensor) -> torch.Tensor:
    """Return what a device computes without a copy of the tensor: its norm, and sums over both dimensions, weighted."""
    dtype = torch.float64 if held.dtype == torch.float64 else torch.float32
    matrix = held.reshape(held.shape[0] if held.dim() else 1, -1)
    sums = [matrix.sum(dim, dtype=dtype) for dim in (0, 1)]
    weighted = [each.dot(_weights(each.numel(), dtype, held.device)) for each in sums]
    return torch.stack([torch.linalg.vector_norm(matrix, dtype=dtype), *weighted])


@cache
def _weights(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, dtype=dtype, generator=generator).to(device)
