"""The interface of an engine: how it shards a model, trains it, and returns its state.

`mmfsdp.sharding.engines` holds the engines. A sharded model keeps its own in ``ShardedModel.engine``; code asks that
object instead of comparing names and classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from mmfsdp.planning.plan_records import ShardUnit
from mmfsdp.planning.schema import ShardPlan
from mmfsdp.runtime.calls.unit_gates import UnitGate
from mmfsdp.runtime.calls.unit_parts import UnitParts
from mmfsdp.runtime.dtensors import Box

__all__ = ["Engine", "OptimizerStates", "PrepareUnit", "Showing", "WrapRoot"]

State = TypeVar("State", contravariant=True)
"""The state of a sharded model: `ShardedModel`, which keeps its engine and so lies above it."""

PrepareUnit = Callable[[ShardUnit], None]
"""Called by the engine right before it shards a unit; then its weights are on the device and equal on all ranks."""

WrapRoot = Callable[[nn.Module, Mapping[str, Any]], nn.Module]
"""Makes FSDP1's wrapper around the root from its arguments."""


@dataclass(frozen=True, slots=True)
class Showing:
    """How whole parameters are shown; see `mmfsdp.full_params`."""

    recurse: bool
    """Show all parameters below a module; otherwise only its own unit's, and none if it is not a unit."""
    writeback: bool
    rank0_only: bool
    cpu_offload: bool
    with_grads: bool


class OptimizerStates(Protocol):
    """The state of one optimizer of one sharded model.

    Collective, every rank, except for `boxes`. A fitting state is by position, and known to fit the optimizer.
    Arguments called ``own_form`` are results of ``optimizer.state_dict()``, by default its current state.
    """

    is_flat: bool
    """Whether torch gathers flat pieces: they stay on the device until then, and ranks must give values of one kind."""

    def names_in_groups(self) -> list[list[str]]:
        """Return the FQNs of each param group, in the plain optimizer's order."""
        ...

    def by_name(self, own_form: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the state by FQN, each rank's own part as DTensors."""
        ...

    def by_index(self, own_form: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the state by position, each rank's own part as DTensors."""
        ...

    def boxes(self, fitting: Mapping[str, Any]) -> Iterable[tuple[Any, Box]]:
        """Return the lazy tensors of a state, each with the box that this rank needs."""
        ...

    def to_load(self, fitting: Mapping[str, Any]) -> dict[str, Any]:
        """Return what ``optimizer.load_state_dict()`` takes on this rank."""
        ...

    def load(self, fitting: Mapping[str, Any]) -> None:
        """Load a fitting state."""
        ...


class Engine(Protocol[State]):
    """One way to shard. It keeps nothing: one object serves all models, whose states the methods take.

    No method is collective unless it says so.
    """

    name: str
    is_flat: bool
    """Whether parameters are pieces of flat parameters, which no rank can tell apart; otherwise they are DTensors."""

    def unsupported(self, plan: ShardPlan, device_type: str) -> list[str]:
        """Return what this engine cannot do of ``plan``, as sentences that say what to write instead."""
        ...

    def apply(
        self,
        model: nn.Module,
        plan: ShardPlan,
        mesh: DeviceMesh,
        prepare: PrepareUnit,
        wrap_root: WrapRoot | None = None,
        experts: DeviceMesh | None = None,
    ) -> nn.Module:
        """Shard ``model`` and return the module to call. Collective: every rank of ``mesh``.

        Args:
            model: The model that the plan was made for; changed in place.
            plan: The plan to apply.
            mesh: ``('shard',)`` or ``('replicate', 'shard')``, of the plan's shape.
            prepare: Must be called for each unit, in the plan's order, right before sharding it.
            wrap_root: Only for FSDP1, whose root is an object around the model.
            experts: The mesh of the units that the axis ``expert`` divides; see `EXPERT_AXES`.
        """
        ...

    def watch(self, state: State, parts: Sequence[tuple[UnitParts, Callable[[], None]]]) -> Sequence[UnitGate]:
        """Install the hooks that a new sharded model of this engine needs, and return a gate for each unit.

        Args:
            state: The model's state.
            parts: The units, each with a function to call before the unit is used.
        """
        ...

    def begin_root(self, state: State) -> None:
        """Make torch take the model as the root, and not the first unit that runs."""
        ...

    def set_sync(self, state: State, sync: bool) -> None:
        """Change whether the backward of the coming forward reduces gradients."""
        ...

    def version(self, state: State) -> int | None:
        """Return a number that changes when shards are written; None if no unit may stay gathered after a forward."""
        ...

    def discard_forward(self, state: State) -> None:
        """Make training possible after a forward that raised."""
        ...

    def free(self, state: State) -> None:
        """Free all gathered parameters."""
        ...

    def clip(self, state: State, max_norm: float, norm_type: float) -> torch.Tensor | None:
        """Clip flat parameters, and return the norm. Collective. None if gradients are clipped like any other's."""
        ...

    def units(self, state: State) -> list[nn.Module]:
        """Return the modules that are shard units."""
        ...

    def show_whole(
        self, state: State, module: nn.Module, how: Showing
    ) -> tuple[list[tuple[nn.Module, str]], AbstractContextManager[None]]:
        """Return owners and own names of the parameters to show whole, and a context that does. Collective."""
        ...

    def shows_pieces(self, state: State) -> bool:
        """Tell whether every parameter, as it is registered or as `ShardedModel.gathered` has it, is a rank's part."""
        ...

    def weights(self, state: State) -> dict[str, Any]:
        """Return the sharded state dict of the model. Collective: every rank."""
        ...

    def targets(self, state: State, kinds: Mapping[str, str] | None) -> dict[str, Any] | None:
        """Return the tensors that a load writes to, by FQN; None if only torch's own load can. Collective: every rank.

        Args:
            state: The model's state.
            kinds: Whether each given value is whole or a shard; None if all are whole.
        """
        ...

    def optimizer_states(self, state: State, optimizer: Optimizer) -> OptimizerStates:
        """Return what saves and loads an optimizer that was built from the model's parameters."""
        ...
