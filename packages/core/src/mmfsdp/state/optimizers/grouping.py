"""Checks that a state divides parameters among Muon and AdamW, and into matrices, as the optimizer that loads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmfsdp.basics.optimizer_forms import NAMES
from mmfsdp.basics.text import name_list
from mmfsdp.errors import StateDictError

__all__ = ["check_grouping"]

_OPTIMIZERS = ("muon", "adamw")
_DIVISION = ("optimizer", "parts", "is_stack")
_REMEDY = (
    "Shard the model with the settings of optimizer (muon, exclude, fused, stacked) that it had when the state was "
    "saved, or load only the weights."
)


def check_grouping(
    stored: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[str]], settings: Sequence[Mapping[str, Any]]
) -> None:
    """Check the param groups of a state against those of an optimizer that sees whole matrices.

    Args:
        stored: The param groups of a state by position, with or without ``param_names``, or by name.
        groups: The names in each of the optimizer's param groups.
        settings: The optimizer's param groups. If none says how it divides parameters, everything fits.

    Raises:
        StateDictError: The state lacks a parameter, has another one, or divides one otherwise; the message names it.
    """
    own = {
        name: _division(group)
        for group, names in zip(settings, groups, strict=True)
        if group.get("optimizer") in _OPTIMIZERS or "is_stack" in group
        for name in names
    }
    if not own:
        return
    names = [group.get(NAMES) or group["params"] for group in stored]
    if not all(isinstance(name, str) for group in names for name in group):
        if [len(group) for group in names] != [len(group) for group in groups]:
            return  # reported with the numbers of both
        names = [*groups]
    theirs = {name: _division(group) for group, members in zip(stored, names, strict=True) for name in members}
    _report("The optimizer updates {}, which the state does not have.", [name for name in own if name not in theirs])
    known = {name for group in groups for name in group}
    _report("The state has {}, which the optimizer does not update.", [name for name in theirs if name not in known])
    for name, division in own.items():
        unlike = [key for key in _DIVISION if key in division and key in theirs[name]]
        unlike = [key for key in unlike if division[key] != theirs[name][key]]
        if not unlike:
            continue
        key = unlike[0]
        alike = [
            other
            for other in own
            if own[other].get(key) == division[key] and theirs[other].get(key) == theirs[name][key]
        ]
        _report(
            f"The state has {key}={theirs[name][key]!r} for {{}}, but the optimizer has {key}={division[key]!r}.", alike
        )


def _division(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a param group divides its parameters; torch's own groups show their optimizer by their settings."""
    found = {key: group[key] for key in _DIVISION if key in group}
    if not found and ("ns_steps" in group or "betas" in group):
        found["optimizer"] = "muon" if "ns_steps" in group else "adamw"
    return found


def _report(text: str, names: Sequence[str]) -> None:
    if names:
        raise StateDictError(f"{text.format(name_list(names, 3))} {_REMEDY}", fqn=names[0])
