"""Fits an optimizer's state of any form, by position, by name or flattened, to the param groups of an optimizer.

`mmfsdp.basics.optimizer_forms` describes the forms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmfsdp.basics.optimizer_forms import GROUPS, NAMES, STATE, by_index, by_name, numbered, unflattened
from mmfsdp.basics.text import name_list
from mmfsdp.errors import StateDictError, closest

__all__ = ["REBUILD", "fit_state", "renamed"]


REBUILD = "Build the optimizer as it was built when the state was saved."
"""Advice for a state that does not fit an optimizer."""


def fit_state(
    state_dict: Mapping[str, Any], groups: Sequence[Sequence[str]], settings: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return state of any form as state by position.

    Args:
        state_dict: State of any form. Not changed.
        groups: The names in each of the optimizer's param groups.
        settings: The optimizer's param groups; a setting that the state lacks keeps its value here.

    Raises:
        StateDictError: The state has no known form, is for other parameters, has contradictory settings in a group, or
            divides parameters otherwise than an optimizer that sees whole matrices.
    """
    state_dict = unflattened(state_dict)
    for key in (GROUPS, STATE):
        if key not in state_dict:
            raise StateDictError(f"An optimizer's state needs 'state' and 'param_groups'; {key!r} is missing.")
    stored = state_dict[GROUPS]
    if not isinstance(stored, Sequence) or not all(
        isinstance(group, Mapping) and "params" in group for group in stored
    ):
        raise StateDictError("'param_groups' of an optimizer's state must be a list of dicts, each with 'params'.")
    _check_grouping(stored, groups, settings)
    if not any(isinstance(name, str) for group in stored for name in group["params"]):
        named = [group.get(NAMES) for group in stored]
        if named == [*map(list, groups)] or not _same_sizes(named, groups):
            known = {name for group in settings for name in group}
            return {
                **state_dict,
                STATE: {numbered(key): entries for key, entries in state_dict[STATE].items()},
                GROUPS: [_without_unknown_names(group, known) for group in stored],
            }
        state_dict = by_name(state_dict, named)  # the same parameters in another order
        stored = state_dict[GROUPS]
    said: dict[str, Mapping[str, Any]] = {}
    for group in stored:
        for name in group["params"]:
            if name in said:
                raise StateDictError(f"The state has {name!r} in two param groups.", fqn=name)
            said[name] = group
    own = [name for group in groups for name in group]
    _check_names(own, {**said, **state_dict[STATE]})
    _check_names(own, said)
    fitting = []
    for group, names in zip(settings, groups, strict=True):
        for name in names:
            _check_same(said[name], said[names[0]], name, names[0])
        fitting.append({**group, **(said[names[0]] if names else {}), "params": names})
    return by_index({**state_dict, GROUPS: fitting})


def renamed(state_dict: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return a state of any form with a prefix removed from the names that have it."""

    def short(name: Any) -> Any:
        return name.removeprefix(prefix) if isinstance(name, str) else name

    result = {**unflattened(state_dict)}
    if STATE in result:
        result[STATE] = {short(name): entries for name, entries in result[STATE].items()}
    if GROUPS in result:
        result[GROUPS] = [{**group, "params": [*map(short, group["params"])]} for group in result[GROUPS]]
    return result


def _same_sizes(named: Sequence[Any], groups: Sequence[Sequence[str]]) -> bool:
    """Return whether groups hold the names of the optimizer's parameters, and as many in each group."""
    if not all(isinstance(own, list) for own in named):
        return False
    sizes = [len(own) for own in named] == [len(own) for own in groups]
    return sizes and {name for own in named for name in own} == {name for own in groups for name in own}


def _without_unknown_names(stored: Mapping[str, Any], known: set[str]) -> Mapping[str, Any]:
    # Otherwise an optimizer that was built without names would get them.
    return {key: value for key, value in stored.items() if key != NAMES or NAMES in known}


def _check_names(own: Sequence[str], said: Mapping[str, Any]) -> None:
    known = set(own)
    unexpected, missing = [name for name in said if name not in known], [name for name in own if name not in said]
    for names, text in (
        (unexpected, "The state holds {}, which the optimizer does not have."),
        (missing, "The optimizer has {}, which the state does not hold."),
    ):
        if names:
            hint = closest(names[0], missing if names is unexpected else unexpected, count=1)
            raise StateDictError(f"{text.format(name_list(names, 1))}{hint} {REBUILD}", fqn=names[0])


def _check_same(one: Mapping[str, Any], other: Mapping[str, Any], name: str, first: str) -> None:
    if one is other:
        return
    for key in sorted({*one, *other} - {"params", "param_names"}):
        if one.get(key) != other.get(key):
            raise StateDictError(
                f"{first!r} and {name!r} are in one param group of the optimizer, but the state has {key}="
                f"{other.get(key)!r} for the first and {one.get(key)!r} for the second. {REBUILD}",
                fqn=name,
            )


_OPTIMIZERS = ("muon", "adamw")
_DIVISION = ("optimizer", "parts", "is_stack")
_REMEDY = (
    "Shard the model with the settings of optimizer (muon, exclude, fused, stacked) that it had when the state was "
    "saved, or load only the weights."
)


def _check_grouping(
    stored: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[str]], settings: Sequence[Mapping[str, Any]]
) -> None:
    """Check the param groups of a state against the groups of an optimizer that sees whole matrices.

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
