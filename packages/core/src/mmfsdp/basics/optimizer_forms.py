"""The forms that an optimizer's state has on disk and in memory, and how the flattened form is recognised.

- By position: ``{'state': {0: {...}}, 'param_groups': [{'params': [0], ...}]}``, from ``Optimizer.state_dict()``.
- By name: the same with names of parameters instead of numbers, from torch's ``get_optimizer_state_dict()``.
- Flattened: ``{'state.<name>.exp_avg': ..., 'param_groups.<name>.lr': ...}``, from the same function with
  ``flatten_optimizer_state_dict=True``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["GROUPS", "MATRICES", "NAMES", "STATE", "numbered", "unflattened"]

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


def numbered(key: Any) -> Any:
    """Return a position as a number: where keys must be strings, positions are stored as ``'0'``, ``'1'``, ..."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key
