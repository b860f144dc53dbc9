"""Estimates the memory of a rank from a plan: what is kept between steps, gathered and reduced."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mmfsdp.basics.dtypes import is_floating_point, itemsize
from mmfsdp.basics.text import human_bytes
from mmfsdp.errors import ConfigError, closest
from mmfsdp.planning.memory.steps import compute_itemsize, gathered_bytes, reducing_bytes
from mmfsdp.planning.plan_records import ParamEntry, ShardUnit
from mmfsdp.planning.schema import ShardPlan

__all__ = ["OPTIMIZERS", "SCALAR_BYTES", "MemoryEstimate", "estimate_memory", "optimizer_named", "optimizer_tensors"]


OPTIMIZERS: dict[str, tuple[int, int]] = {
    "adadelta": (2, 1),
    "adagrad": (1, 1),
    "adam": (2, 1),
    "adam-amsgrad": (3, 1),
    "adamax": (2, 1),
    "adamw": (2, 1),
    "adamw-amsgrad": (3, 1),
    "asgd": (1, 3),
    "nadam": (2, 2),
    "radam": (2, 1),
    "rmsprop": (1, 1),
    "rmsprop-centered": (2, 1),
    "rmsprop-momentum": (2, 1),
    "rmsprop-momentum-centered": (3, 1),
    "sgd": (0, 0),
    "sgd-momentum": (1, 0),
}
"""For each optimizer of ``torch.optim`` that can step shards of any shape: the tensors that it keeps per parameter,
of the parameter's shape and stored dtype, and its float32 scalars per parameter, such as ``step``."""

SCALAR_BYTES = itemsize("float32")
"""Bytes of one such scalar."""


def optimizer_named(name: str, settings: Mapping[str, Any]) -> str | None:
    """Return the name in `OPTIMIZERS` of a class with these arguments, such as ``'sgd-momentum'``, or None.

    Args:
        name: The class's name, in any case.
        settings: Its arguments; only those that change how much it keeps matter.
    """
    options = [option for option in ("momentum", "amsgrad", "centered") if settings.get(option)]
    spelt = "-".join([name.lower(), *options])
    return spelt if spelt in OPTIMIZERS else None


def optimizer_tensors(optimizer: str | int | None) -> tuple[str | int | None, int, int]:
    """Return the optimizer's name, and its tensors and scalars per parameter.

    Args:
        optimizer: One of `OPTIMIZERS` in any case, a number of tensors per parameter, or None if unknown.

    Raises:
        ConfigError: There is no such optimizer.
    """
    if optimizer is None:
        return None, 0, 0
    if isinstance(optimizer, int) and not isinstance(optimizer, bool) and optimizer >= 0:
        return optimizer, optimizer, 0
    name = str(optimizer).lower()
    if name not in OPTIMIZERS:
        hint = closest(name, OPTIMIZERS) or f" Known: {', '.join(OPTIMIZERS)}."
        raise ConfigError(
            f"{optimizer!r} is not a known optimizer.{hint} For other optimizers, give the number of tensors that they "
            "keep per parameter.",
            config="optimizer",
        )
    return name, *OPTIMIZERS[name]


_KEPT = {"muon": (1, 0), "adamw": OPTIMIZERS["adamw"]}
"""For each optimizer of a plan the tensors and scalars that it keeps per parameter, as `OPTIMIZERS` has them."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of memory of one rank, without activations, temporaries of the optimizer and allocator overhead."""

    rank: int
    parameters: int
    """Shards of parameters in their stored dtype, and whole parameters."""
    buffers: int
    """All buffers, whole."""
    gradients: int
    """Shards of reduced gradients, from backward until ``zero_grad()``; of trained parameters only."""
    optimizer: str | int | None
    """The optimizer's name, or the number of tensors that it keeps per parameter; None if unknown."""
    optimizer_state: int | None
    """State of the optimizer after its first step; of trained parameters only. None if the optimizer is unknown."""
    gathered: int
    """The largest amount that is gathered at a time, in the compute dtype."""
    reducing: int
    """The largest amount of whole gradients before they are reduced."""
    on_cpu: int
    """The part of the above that is in CPU memory, because the plan offloads it."""

    @property
    def total(self) -> int:
        """The sum in bytes, without optimizer state if unknown: an upper bound for a step, apart from activations.

        The parts are largest at different moments, so a step may need less.
        """
        held = self.parameters + self.buffers + self.gradients + (self.optimizer_state or 0)
        return held + self.gathered + self.reducing

    def describe(self) -> dict[str, Any]:
        """Return plain values only: the fields and ``total``."""
        return {**asdict(self), "total": self.total}

    def table(self) -> str:
        """Return the parts as aligned text, one per line."""
        state = None if self.optimizer_state is None else human_bytes(self.optimizer_state)
        rows = [
            ("parameters", human_bytes(self.parameters)),
            ("buffers", human_bytes(self.buffers)),
            ("gradients", human_bytes(self.gradients)),
            ("optimizer state", state or "unknown"),
            ("gathered units", human_bytes(self.gathered)),
            ("gradients being reduced", human_bytes(self.reducing)),
            ("sum" if state else "sum, without optimizer state", human_bytes(self.total)),
        ]
        if self.on_cpu:
            rows.append(("of it in CPU memory", human_bytes(self.on_cpu)))
        name, size = (max(len(row[column]) for row in rows) for column in (0, 1))
        given = "" if state is None else f" with {_spelt(self.optimizer)}"
        head = f"Memory of rank {self.rank} in a step{given}, at most, without activations:"
        return "\n".join([head, "", *(f"{label:{name}}  {text:>{size}}" for label, text in rows)])

    def __str__(self) -> str:
        return self.table()


def estimate_memory(plan: ShardPlan, optimizer: str | int | None = None, rank: int = 0) -> MemoryEstimate:
    """Return the bytes of memory that one rank needs for a training step. Pure, and not collective.

    ``own`` is the bytes per element of a parameter's stored dtype, ``compute`` and ``reduce`` of its unit's dtypes.
    ``whole`` is all elements, dimension 0 padded to a multiple of the ranks. The terms are sums over parameters:

    - parameters: ``local elements * own``; gradients the same, of trained parameters. They are reduced in another
      dtype, and kept in the stored one. (fsdp1 with ``keep_low_precision_grads``: ``local elements * compute``.)
    - optimizer state: ``local elements * own * tensors + 4 * scalars``, of trained parameters: see `OPTIMIZERS`.
    - gathered: ``whole * compute`` of a unit. The root and units that do not reshard stay gathered from forward to
      backward; those that reshard to ``k`` ranks keep ``1 / k``. On top of that come, at the worst moment of a
      step, a unit's parameters, its receive buffer, and the receive buffer of the unit before it (since torch
      2.15 that is freed before the copy), or for the ``prefetch.forward`` units after it. (fsdp1 copies nothing: the
      unit and the next one.)
    - reducing: ``elements * compute + whole * reduce`` of the trained parameters of the largest unit: its gradients,
      and their copy to be sent. The root's gradients, ``elements * compute``, wait until all others are reduced.

    Not included: activations; temporary memory of an optimizer's step (about another copy of the parameters' shards,
    unless it is fused); whole gradients of all units while `no_sync` accumulates them.

    Args:
        plan: The plan.
        optimizer: One of `OPTIMIZERS` in any case, or how many tensors of a parameter's shape and dtype another
            optimizer keeps for it. Default: as the plan's optimizers, or unknown if it names none.
        rank: The rank; shards of the last ones may be smaller.

    Raises:
        ConfigError: There is no such optimizer.
        MeshError: The mesh has no such rank.
    """
    name, tensors, scalars = optimizer_tensors(optimizer)
    kept: dict[str, tuple[int, int]] = {}
    if optimizer is None and plan.optimizer is not None:
        name = " and ".join(dict.fromkeys(group.optimizer for group in plan.optimizer.groups))
        kept = {fqn: _KEPT[group.optimizer] for group in plan.optimizer.groups for fqn in group.fqns}
    parameters = plan.param_bytes(rank)
    gradients = state = 0
    for unit in plan.units:
        gradients += _gradient_bytes(plan, unit, rank)
        for param, numel in _local(plan, unit, rank):
            if param.requires_grad:
                own, counts = kept.get(param.fqn, (tensors, scalars))
                state += numel * itemsize(param.dtype) * own + SCALAR_BYTES * counts
    # Ignored parameters are held whole and never offloaded.
    managed = (
        parameters
        - sum(param.shard_nbytes(plan.mesh, rank, gathered=True) for param in plan.ignored_params)
        + gradients
        + state
    )
    for param in plan.ignored_params:
        if param.requires_grad:
            held = param.shard_nbytes(plan.mesh, rank, gathered=True)
            gradients += held
            own, counts = kept.get(param.fqn, (tensors, scalars))
            state += held * own + SCALAR_BYTES * counts
    return MemoryEstimate(
        rank=rank,
        parameters=parameters,
        buffers=_buffer_bytes(plan),
        gradients=gradients,
        optimizer=name,
        optimizer_state=None if name is None else state,
        gathered=gathered_bytes(plan),
        reducing=reducing_bytes(plan),
        on_cpu=managed if plan.cpu_offload else 0,
    )


def _spelt(optimizer: str | int | None) -> str:
    return f"{optimizer} x the parameters as optimizer state" if isinstance(optimizer, int) else str(optimizer)


def _local(plan: ShardPlan, unit: ShardUnit, rank: int) -> Iterator[tuple[ParamEntry, int]]:
    """Yield each parameter that an optimizer gets on this rank, with its number of local elements."""
    if plan.engine != "fsdp1":
        for param in unit.params:
            yield param, param.shard_numel(plan.mesh, rank)
    elif unit.params and not plan.use_orig_params:
        yield unit.params[0], plan.unit_param_bytes(unit, rank) // itemsize(unit.params[0].dtype)
    elif unit.params:
        # Positions in the flat parameter follow the rule of `flat_shard_bytes`.
        held = plan.unit_param_bytes(unit, rank) // itemsize(unit.params[0].dtype)
        coordinate = plan.mesh.shard_coordinate(rank)
        first, end, offset = coordinate * held, (coordinate + 1) * held, 0
        alignment = max(16 // itemsize(unit.precision.param_dtype or unit.params[0].dtype), 1)
        for param in unit.params:
            offset += -offset % alignment
            here = min(offset + param.numel, end) - max(offset, first)
            offset += param.numel
            if here > 0:  # without elements here, a parameter has neither gradient nor state
                yield param, here


def _gradient_bytes(plan: ShardPlan, unit: ShardUnit, rank: int) -> int:
    if plan.engine != "fsdp1":
        return sum(n * itemsize(param.dtype) for param, n in _local(plan, unit, rank) if param.requires_grad)
    if not any(param.requires_grad for param in unit.params):
        return 0
    stored = plan.unit_param_bytes(unit, rank)
    if not plan.keep_low_precision_grads:
        return stored
    return stored // itemsize(unit.params[0].dtype) * compute_itemsize(unit, unit.params[0])


def _buffer_bytes(plan: ShardPlan) -> int:
    total = 0
    for buffer in plan.buffers:
        cast = plan.buffer_dtype is not None and is_floating_point(buffer.dtype)
        total += math.prod(buffer.shape) * itemsize(plan.buffer_dtype if cast else buffer.dtype)
    return total
