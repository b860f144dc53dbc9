"""The forms that an optimizer's state has on disk and in memory, and how one becomes another.

- By position: ``{'state': {0: {...}}, 'param_groups': [{'params': [0], ...}]}``, from ``Optimizer.state_dict()``.
- By name: the same with names of parameters instead of numbers, from torch's ``get_optimizer_state_dict()``.
- Flattened: ``{'state.<name>.exp_avg': ..., 'param_groups.<name>.lr': ...}``, from the same function with
  ``flatten_optimizer_state_dict=True``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["GROUPS", "MATRICES", "NAMES", "STATE", "by_index", "by_name", "numbered", "unflattened", "with_names"]

STATE, GROUPS = "state", "param_groups"
NAMES = "param_names"
"""The key under which a param group of state by position holds the names of its parameters."""

MATRICES = "matrices"
"""The entry of a parameter's state in which a matrix optimizer has a dict per matrix, whole on every rank, under the
number of the matrix's first element in the parameter."""


def unflattened(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a flattened state as state by name, and a state of another form as it is."""
    dotted = (f"{STATE}.", f"{GROUPS}.")
    if not state_dict or not all(isinstance(key, str) and key.startswith(dotted) for key in state_dict):
        return state_dict
    state: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    for key, value in state_dict.items():
        kind, _, rest = key.partition(".")
        name, _, entry = rest.rpartition(".")
        (state if kind == STATE else groups).setdefault(name, {})[entry] = value
    return {STATE: state, GROUPS: [{**settings, "params": [name]} for name, settings in groups.items()]}


def by_index(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return state by name as state by position: parameters are numbered in the order of the groups.

    State outside of all groups, such as a wrapper's own, keeps its keys. Nothing is changed in place.
    """
    groups, state = state_dict[GROUPS], state_dict[STATE]
    index = {name: number for number, name in enumerate(name for group in groups for name in group.get("params", ()))}
    known = {number: state[name] for name, number in index.items() if name in state}
    return {
        **state_dict,
        STATE: {**known, **{name: entries for name, entries in state.items() if name not in index}},
        GROUPS: [{**group, "params": [index[name] for name in group.get("params", ())]} for group in groups],
    }


def by_name(state_dict: Mapping[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return state by position as state by name. State outside of all groups keeps its keys.

    Args:
        state_dict: State by position. Not changed.
        names: The names in each param group, in the order of its positions.
    """
    own: dict[Any, str] = {}
    groups = []
    for group, members in zip(state_dict[GROUPS], names, strict=True):
        own |= dict(zip(group.get("params", ()), members, strict=True))
        groups.append({**{key: value for key, value in group.items() if key != NAMES}, "params": list(members)})
    state = {own.get(numbered(key), key): entries for key, entries in state_dict[STATE].items()}
    return {**state_dict, STATE: state, GROUPS: groups}


def with_names(state_dict: Mapping[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return state by position whose groups also hold the names, under ``'param_names'`` as in torch.

    Args:
        state_dict: State by position. Not changed.
        names: See `by_name`.
    """
    groups = [{**group, NAMES: list(members)} for group, members in zip(state_dict[GROUPS], names, strict=True)]
    return {**state_dict, GROUPS: groups}


def numbered(key: Any) -> Any:
    """Return a position as a number. Where keys must be strings, positions are stored as ``'0'``, ``'1'``, ..."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key
