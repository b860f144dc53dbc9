"""Keeps what a matrix function remembers of each matrix, on its owner, and in checkpoints on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mmfsdp.basics.nested import map_values, nested_values
from mmfsdp.basics.optimizer_forms import MATRICES
from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import any_of, broadcast_object, on_all_ranks
from mmfsdp.errors import StateDictError

__all__ = ["OwnedStates"]

_PLAIN = (bool, int, float, str, bytes, torch.dtype, type(None))

_States = dict[tuple[int, int], dict[str, Any]]
"""By ``id()`` of the parameter and first element of the matrix."""


class OwnedStates:
    """The states of a function, for the matrices that this rank owns; after loading, until a step, for all matrices."""

    def __init__(self, states: _States | None = None) -> None:
        self._states: _States = states or {}
        self._all: _States | None = None

    def of(self, param: int, start: int) -> dict[str, Any]:
        """Return the state of a matrix, a dict that the function changes."""
        return self._states.setdefault((param, start), {})

    def keep(self, devices: Mapping[tuple[int, int], torch.device]) -> None:
        """Keep only the states of some matrices, each on its device."""

        def moved(state: Any, device: torch.device) -> Any:
            return map_values(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, state)

        self._states = {key: moved(state, devices[key]) for key, state in self._states.items() if key in devices}

    @contextmanager
    def shared(self, scope: Scope, params: Sequence[torch.Tensor], names: Mapping[int, str]) -> Iterator[None]:
        """Let `add_to` add the states of all ranks. Entering is collective: every rank of the scope.

        Every rank holds all states in CPU memory until they are written.

        Args:
            scope: The ranks that train the parameters.
            params: The parameters, in the same order on all ranks.
            names: The names of parameters by ``id()``.

        Raises:
            StateDictError: A state cannot be saved; raised on every rank.
        """
        on_all_ranks(lambda: _check(self._states, names), scope)
        indices = {id(param): index for index, param in enumerate(params)}
        mine = {
            (indices[param], start): map_values(_on_cpu, state)
            for (param, start), state in self._states.items()
            if state and param in indices
        }
        if any_of(scope, bool(mine)):
            found = [broadcast_object(scope, mine, origin=rank) for rank in range(scope.size)]
            self._all = {(id(params[at]), start): state for own in found for (at, start), state in own.items()}
        try:
            yield
        finally:
            self._all = None

    def add_to(self, state_dict: dict[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return what `torch.optim.Optimizer.state_dict` returned for param groups, with the states in it."""
        found: dict[int, dict[str, Any]] = {}
        for (param, start), state in sorted((self._states if self._all is None else self._all).items()):
            if state:
                found.setdefault(param, {})[str(start)] = dict(state)
        entries = dict(state_dict["state"])
        for index, param in enumerate(param for group in groups for param in group["params"]):
            if id(param) in found:
                entries[index] = {**entries.get(index, {}), MATRICES: found[id(param)]}
        return {**state_dict, "state": entries}

    @classmethod
    def taken_from(
        cls, state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
    ) -> tuple[dict[str, Any], OwnedStates]:
        """Return a state by position without what `add_to` added, and that."""
        params = [param for group in groups for param in group["params"]]
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        ids = {index: id(param) for index, param in zip(indices, params, strict=False)}
        states: _States = {}
        rest: dict[Any, Any] = {}
        for index, entries in state_dict["state"].items():
            rest[index] = {name: value for name, value in entries.items() if name != MATRICES}
            for start, state in entries.get(MATRICES, {}).items():
                if index in ids:
                    states[ids[index], int(start)] = dict(state)
        return {**state_dict, "state": rest}, cls(states)


def _on_cpu(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf


def _check(states: _States, names: Mapping[int, str]) -> None:
    for (param, _), state in states.items():
        for path, leaf in nested_values("", state):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor):
                continue
            if type(leaf) not in _PLAIN:
                kind, fqn = f"{type(leaf).__module__}.{type(leaf).__qualname__}", names.get(param, "a parameter")
                raise StateDictError(
                    f"The matrix function keeps {path!r} of {fqn!r} as a {kind}, which no checkpoint can bring back. "
                    "Keep tensors, numbers, text, and lists or dicts of these, or save the model alone.",
                    fqn=fqn,
                )
