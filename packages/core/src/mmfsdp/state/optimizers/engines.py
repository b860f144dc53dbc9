"""One interface to the engines for an optimizer's state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch.optim import Optimizer

from mmfsdp.collective.steps import on_all_ranks
from mmfsdp.runtime.dtensors import Box
from mmfsdp.runtime.sharded_model import ShardedModel
from mmfsdp.state.lazy_tensors import LazyTensor, whole_box
from mmfsdp.state.optimizers import named_optimizer
from mmfsdp.state.optimizers.compressed import compress_state, names_of_compressed
from mmfsdp.state.optimizers.dtensor_optimizer import boxes_to_read, names_in_groups, placed_state, stored_values
from mmfsdp.state.optimizers.flat_optimizer import (
    flat_state_to_load,
    groups_by_name,
    state_by_name,
    state_by_place,
)

__all__ = ["OptimizerEngine", "optimizer_engine"]


class OptimizerEngine(Protocol):
    """The state of one optimizer of one sharded model.

    Collective, every rank, but for `boxes`. A fitting state is by position, and known to fit the optimizer. Arguments
    called ``own_form`` are what ``optimizer.state_dict()`` returned, by default its current state.
    """

    is_flat: bool
    """Whether torch gathers flat pieces: they stay on the device until then, and ranks must give values of one kind."""

    def names_in_groups(self) -> list[list[str]]:
        """Return the FQNs of each param group, in the plain optimizer's order."""
        ...

    def by_name(self, own_form: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the state by FQN, each rank's own part as DTensors."""
        ...

    def by_place(self, own_form: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the state by position, each rank's own part as DTensors."""
        ...

    def boxes(self, fitting: Mapping[str, Any]) -> Iterable[tuple[LazyTensor, Box]]:
        """Return the tensors of a state that are still to be read, each with the box that this rank needs."""
        ...

    def to_load(self, fitting: Mapping[str, Any]) -> dict[str, Any]:
        """Return what ``optimizer.load_state_dict()`` takes on this rank."""
        ...

    def load(self, fitting: Mapping[str, Any]) -> None:
        """Load a fitting state."""
        ...


class _DTensors:
    is_flat = False

    def __init__(self, state: ShardedModel, optimizer: Optimizer) -> None:
        self._state, self._optimizer = state, optimizer

    def names_in_groups(self) -> list[list[str]]:
        return names_in_groups(self._state, self._optimizer)

    def by_name(self, own_form: Mapping[str, Any] | None) -> dict[str, Any]:
        return named_optimizer.by_name(self.by_place(own_form), self.names_in_groups())

    def by_place(self, own_form: Mapping[str, Any] | None) -> dict[str, Any]:
        return {**(self._optimizer.state_dict() if own_form is None else own_form)}

    def boxes(self, fitting: Mapping[str, Any]) -> Iterable[tuple[LazyTensor, Box]]:
        return boxes_to_read(self._optimizer, fitting)

    def to_load(self, fitting: Mapping[str, Any]) -> dict[str, Any]:
        return placed_state(self._state, self._optimizer, fitting)

    def load(self, fitting: Mapping[str, Any]) -> None:
        placed = self.to_load(fitting)
        on_all_ranks(lambda: self._optimizer.load_state_dict(placed), self._state.scope)


class _FlatPieces:
    is_flat = True

    def __init__(self, state: ShardedModel, optimizer: Optimizer) -> None:
        self._state, self._optimizer = state, optimizer

    def names_in_groups(self) -> list[list[str]]:
        return groups_by_name(self._state, self._optimizer)

    def by_name(self, own_form: Mapping[str, Any] | None) -> dict[str, Any]:
        return state_by_name(self._state, self._optimizer, own_form)

    def by_place(self, own_form: Mapping[str, Any] | None) -> dict[str, Any]:
        return state_by_place(self._state, self._optimizer, own_form)

    def boxes(self, fitting: Mapping[str, Any]) -> Iterable[tuple[LazyTensor, Box]]:
        return [(value, whole_box(value)) for _, value in stored_values(fitting)]  # torch takes whole tensors

    def to_load(self, fitting: Mapping[str, Any]) -> dict[str, Any]:
        return flat_state_to_load(self._state, self._optimizer, fitting)

    def load(self, fitting: Mapping[str, Any]) -> None:
        placed, names = self.to_load(fitting), names_of_compressed(fitting)

        def load() -> None:
            self._optimizer.load_state_dict(placed)
            compress_state(self._optimizer, names)

        on_all_ranks(load, self._state.scope)


def optimizer_engine(state: ShardedModel, optimizer: Optimizer) -> OptimizerEngine:
    """Return what saves and loads an optimizer that was built from a sharded model's parameters."""
    return _FlatPieces(state, optimizer) if state.is_fsdp1 else _DTensors(state, optimizer)
