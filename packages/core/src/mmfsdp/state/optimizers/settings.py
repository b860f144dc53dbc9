"""Compares the settings that a state brings with the settings of the optimizer that loads it."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from mmfsdp.basics.text import name_list
from mmfsdp.errors import StateDictError

__all__ = ["check_same_class", "check_same_moments", "report_changed_settings"]

_INDEXED = ("params", "param_names")
_CYCLED = ("momentum", "betas")  # by schedulers that put these into the group, too
# Settings of one family of torch's classes, which tell it from others that fill in what a foreign group lacks.
_TELLING = ("amsgrad", "momentum_decay")
_MOMENTS = {  # what torch's classes keep for each parameter from its first step on, and look up in every other one
    "Adam": ("exp_avg", "exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "Adamax": ("exp_avg", "exp_inf"),
    "NAdam": ("exp_avg", "exp_avg_sq", "mu_product"),
    "RAdam": ("exp_avg", "exp_avg_sq"),
}
_log = logging.getLogger("mmfsdp.state")


def check_same_class(stored: Sequence[Mapping[str, Any]], optimizer: Optimizer) -> None:
    """Check that the param groups of a state were made by an optimizer of the same class, as far as they show it.

    ``load_state_dict()`` of torch replaces the whole group, and the next step fails or computes with foreign settings.

    Args:
        stored: The param groups of a state of any form.
        optimizer: What loads it. Not changed.

    Raises:
        StateDictError: The groups lack settings of the optimizer, and have others in their stead; or they say that
            weight decay is coupled, which the class of the optimizer decides, or the reverse.
    """
    name = type(optimizer).__name__
    for group in stored:
        saved = {key for key in group if key not in _INDEXED}
        known = set().union(*(own for own in optimizer.param_groups))
        missing, foreign = sorted({*optimizer.defaults} - _filled_in(group, optimizer)), sorted(saved - known)
        telling = [key for key in foreign if key in _TELLING and _is_of_torch(optimizer)]
        if telling and not missing:
            raise StateDictError(
                f"The state was saved by another optimizer than {name}, which has no {telling[0]!r}. Build the "
                "optimizer that saved it, or load only the weights."
            )
        if missing and foreign:
            raise StateDictError(
                f"The state was saved by another optimizer than {name}: its param groups hold {name_list(foreign)}, "
                f"and lack {name_list(missing)}. Build the optimizer that saved it, or load only the weights."
            )
        key = "decoupled_weight_decay"  # what tells AdamW from Adam since torch 2.8, where one derives from the other
        own = optimizer.defaults.get(key)
        if key not in _parameters(optimizer) and own is not None and group.get(key, own) is not own:
            raise StateDictError(
                f"The state was saved by another optimizer than {name}: it has {key}={group[key]}. Build the optimizer "
                "that saved it, or load only the weights."
            )


def check_same_moments(stored: Iterable[Mapping[str, Any]], optimizer: Optimizer) -> None:
    """Check that a state holds what torch's own classes look up for each parameter; for others nothing is known.

    Args:
        stored: What a state holds for each parameter.
        optimizer: What loads it. Not changed.

    Raises:
        StateDictError: The state lacks a moment, so another class of optimizer wrote it.
    """
    name = type(optimizer).__name__
    wanted = _MOMENTS.get(name, ()) if _is_of_torch(optimizer) else ()
    for entries in stored if wanted else ():
        lacking = [moment for moment in wanted if moment not in entries]
        if lacking and len(lacking) < len(wanted):
            raise StateDictError(
                f"The state was saved by another optimizer than {name}: it holds {name_list(sorted(entries))} for a "
                f"parameter, and lacks {name_list(lacking)}. Build the optimizer that saved it, or load only the "
                "weights."
            )


def _is_of_torch(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def report_changed_settings(stored: Sequence[Mapping[str, Any]], optimizer: Optimizer) -> None:
    """Log which settings of the program a state is about to replace. For one rank.

    Args:
        stored: The param groups of a state that fits the optimizer, by position.
        optimizer: What loads it. Not changed.
    """
    changed = [
        f"{key}={_plain(own)!r} by {_plain(saved)!r} in param group {number}"
        for number, (group, ours) in enumerate(zip(stored, optimizer.param_groups, strict=True))
        for key, own, saved in _differences(group, ours, _parameters(optimizer))
    ]
    if changed:
        more = f", and {len(changed) - 3} more" if len(changed) > 3 else ""
        _log.warning(
            "The state that is loaded replaces settings of %s: %s%s. To train with those of the program, set them in "
            "optimizer.param_groups after loading.",
            type(optimizer).__name__,
            ", ".join(changed[:3]),
            more,
        )


def _differences(
    group: Mapping[str, Any], ours: Mapping[str, Any], settings: Collection[str]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield settings with different values: key, the optimizer's and the state's."""
    for key in sorted(settings):
        if key not in group or key not in ours or (key in _CYCLED and "max_momentum" in group):
            continue
        own, saved = ours[key], group[key]
        if key == "lr" and "initial_lr" in group:  # a scheduler has changed lr; initial_lr is the setting
            key, own, saved = "initial_lr", ours.get("initial_lr", own), group["initial_lr"]
        if _plain(own) != _plain(saved):
            yield key, own, saved


def _parameters(optimizer: Optimizer) -> Collection[str]:
    """Return the parameters of an optimizer's class: other settings in its groups may be state, such as counters."""
    return inspect.signature(type(optimizer).__init__).parameters.keys() - {"self", *_INDEXED}


def _filled_in(group: Mapping[str, Any], optimizer: Optimizer) -> set[str]:
    """Return the settings of a group once the class has added those that earlier releases of it did not have."""
    probe = object.__new__(type(optimizer))
    groups = [{**group, "params": []}]
    with contextlib.suppress(Exception):  # some classes read settings there that a foreign group lacks
        probe.__setstate__({"defaults": dict(optimizer.defaults), "state": defaultdict(dict), "param_groups": groups})
    return {*groups[0]}


def _plain(value: Any) -> Any:
    """Return a setting as what can be compared: a learning rate may be a tensor, a list in JSON was a tuple."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return tuple(value) if isinstance(value, list) else value
