"""Divides the state of Muon with AdamW into the states of torch's two optimizers, and joins them; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmfsdp.errors import StateDictError

__all__ = ["join_states", "split_state"]

_OWN = ("optimizer", "parts", "is_stack")
"""Settings of a param group that torch's optimizers do not have."""


def split_state(state_dict: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the states of ``torch.optim.Muon`` and ``torch.optim.AdamW``, as their ``load_state_dict()`` takes them.

    Args:
        state_dict: What ``optim_state_dict()`` or ``state_dict()`` of a `MuonWithAdamW` returned, by position. Not
            changed.

    Returns:
        The states under ``'muon'`` and ``'adamw'``. In each, parameters are numbered anew, in the order of the groups.

    Raises:
        StateDictError: A param group does not say which optimizer updates it.
    """
    found: dict[str, dict[str, Any]] = {name: {"state": {}, "param_groups": []} for name in ("muon", "adamw")}
    for number, group in enumerate(state_dict["param_groups"]):
        if group.get("optimizer") not in found:
            raise StateDictError(
                f"Param group {number} has no entry 'optimizer' that is 'muon' or 'adamw'. Give the state of an "
                "optimizer that build_optimizer() built."
            )
        part = found[group["optimizer"]]
        first = sum(len(other["params"]) for other in part["param_groups"])
        part["param_groups"].append(
            {
                **{name: value for name, value in group.items() if name not in _OWN},
                "params": [*range(first, first + len(group["params"]))],
            }
        )
        for position, old in enumerate(group["params"], first):
            if old in state_dict["state"]:
                part["state"][position] = state_dict["state"][old]
    return found


def join_states(muon: Mapping[str, Any], adamw: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of Muon with AdamW, made of the states of ``torch.optim.Muon`` and ``torch.optim.AdamW``.

    Args:
        muon: The ``state_dict()`` of Muon: as many parameters as ``like`` has for Muon, in the same order.
        adamw: The ``state_dict()`` of AdamW, likewise.
        like: ``state_dict()`` of the `MuonWithAdamW` that is to load the result; it gives the groups.

    Raises:
        StateDictError: The numbers of parameters differ.
    """
    given = {"muon": muon, "adamw": adamw}
    wanted = split_state(like)
    for name, part in given.items():
        held, needed = _count(part["param_groups"]), _count(wanted[name]["param_groups"])
        if held != needed:
            raise StateDictError(f"The state of {name} has {held} parameters, but the optimizer has {needed}.")
    state: dict[Any, Any] = {}
    done = {"muon": 0, "adamw": 0}
    groups = []
    for group in like["param_groups"]:
        name = group["optimizer"]
        # torch's optimizer may have all of them in one group.
        settings = _group_of(given[name]["param_groups"], done[name])
        groups.append({**group, **{key: value for key, value in settings.items() if key != "params"}})
        for position, number in enumerate(group["params"], done[name]):
            if position in given[name]["state"]:
                state[number] = given[name]["state"][position]
        done[name] += len(group["params"])
    return {"state": state, "param_groups": groups}


def _count(groups: Sequence[Mapping[str, Any]]) -> int:
    return sum(len(group["params"]) for group in groups)


def _group_of(groups: Sequence[Mapping[str, Any]], position: int) -> Mapping[str, Any]:
    """Return the group that holds the parameter of a number."""
    return next(group for group in groups if position in group["params"] or group is groups[-1])
