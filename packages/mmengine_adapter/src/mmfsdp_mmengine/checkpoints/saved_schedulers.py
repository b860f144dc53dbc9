"""Compares the parameter schedulers whose states a checkpoint holds with those of the config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmfsdp.errors import StateDictError

__all__ = ["check_same_schedulers", "scheduler_classes"]

_REMEDY = "Configure the schedulers that were saved, or load only the weights with load_from and resume=False."


def scheduler_classes(schedulers: Any) -> dict[str, str]:
    """Return the class names of parameter schedulers, joined, by the name of their optimizer wrapper.

    Args:
        schedulers: A list of them, or with several optimizers a dict of lists.
    """
    return {name: ", ".join(type(item).__name__ for item in items) for name, items in _lists(schedulers).items()}


def check_same_schedulers(content: Mapping[str, Any], filename: str, schedulers: Any) -> None:
    """Check that a checkpoint's states of schedulers are of those that load them. Not collective.

    MMEngine pairs them by position, and a scheduler takes every attribute that a state holds. Of checkpoints that
    MMEngine itself wrote, only the attributes tell the class.

    Args:
        content: The checkpoint's content.
        filename: Its name, for messages.
        schedulers: See `scheduler_classes`.

    Raises:
        StateDictError: Their number, their classes, or what they schedule differs.
    """
    stored, own = _lists(content["param_schedulers"]), _lists(schedulers)
    classes = scheduler_classes(schedulers)
    saved = content.get("progress", {}).get("schedulers", {})
    if saved and saved != classes:
        raise StateDictError(
            f"{filename} was saved with the schedulers {saved}, but the config has {classes}. {_REMEDY}"
        )
    if _counts(stored) != _counts(own):
        raise StateDictError(
            f"{filename} holds the states of {_counts(stored)}, but the config has {_counts(own)}: {classes}. {_REMEDY}"
        )
    for name, states in stored.items():
        for number, (state, scheduler) in enumerate(zip(states, own[name], strict=True)):
            _check(state, scheduler, f"Scheduler {number} of {name!r} in {filename}", bool(saved))


def _check(state: Any, scheduler: Any, where: str, is_known: bool) -> None:
    mine = scheduler.state_dict()
    if not isinstance(state, Mapping) or not isinstance(mine, Mapping):
        return
    name, sets = mine.get("param_name"), state.get("param_name")
    if name is not None and sets is not None and name != sets:
        raise StateDictError(
            f"{where} schedules {sets!r}, but that of the config, {type(scheduler).__name__}, {name!r}. {_REMEDY}"
        )
    foreign, lacking = sorted({*state} - {*mine}), sorted({*mine} - {*state})
    if not is_known and foreign and lacking:
        raise StateDictError(
            f"{where} is of another class than that of the config, {type(scheduler).__name__}: its "
            f"state holds {', '.join(foreign)}, and lacks {', '.join(lacking)}. {_REMEDY}"
        )


def _lists(schedulers: Any) -> dict[str, list[Any]]:
    if isinstance(schedulers, Mapping):
        return {str(name): [*items] for name, items in schedulers.items()}
    return {"optimizer": [*schedulers]}


def _counts(lists: Mapping[str, list[Any]]) -> str:
    counts = {name: len(items) for name, items in sorted(lists.items()) if items}  # an empty list may not be stored
    parts = (f"{count} scheduler{'s' * (count != 1)} of {name!r}" for name, count in counts.items())
    return " and ".join(parts) or "no schedulers"
