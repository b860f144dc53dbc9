"""Checks that training can continue from a checkpoint, and holds the state that the training loop needs for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mmfsdp.errors import FormatError, StateDictError
from mmfsdp_mmengine.optimizers.binding import optim_wrappers_of, waiting_gradients

__all__ = [
    "Resumed",
    "check_resumable",
    "check_same_schedulers",
    "optimizer_classes",
    "scheduler_classes",
    "warning_of_missing_state",
    "warning_of_waiting_gradients",
]

_REMEDY = "Configure the schedulers that were saved, or load only the weights with load_from and resume=False."


@dataclass(frozen=True, slots=True)
class Resumed:
    """State of a resumed checkpoint that the training loop needs, besides weights and optimizers."""

    progress: dict[str, Any]
    seed: int
    """The seed of this rank."""
    random_state: bytes | None
    """The state of this rank's random number generators; None if another number of ranks saved the checkpoint."""


def check_resumable(content: Mapping[str, Any], filename: str, own: Mapping[str, str]) -> None:
    """Check that a checkpoint has what resuming needs. Not collective.

    Args:
        content: The checkpoint's content.
        filename: Its name, for messages.
        own: What `optimizer_classes` returns for the config, or an empty mapping to accept any optimizer.

    Raises:
        FormatError: The checkpoint lacks ``meta``, or the iteration in it.
        StateDictError: It was saved with other optimizers.
    """
    if "iter" not in (content.get("meta") or {}):
        lacks = "meta['iter']" if content.get("meta") else "'meta'"
        raise FormatError(
            f"Training cannot be resumed from {filename}: it has no {lacks}, which says where training stopped. "
            "To start from its weights, use load_from without resume.",
            file=str(filename),
        )
    saved = content.get("progress", {}).get("optimizers", {})
    if own and saved and saved != own:
        raise StateDictError(
            f"{filename} was saved with the optimizers {saved}, but the config has {own}. Configure the "
            "optimizers that were saved, or load only the weights with load_from and resume=False."
        )


def warning_of_missing_state(content: Mapping[str, Any], filename: str, wanted: Iterable[str]) -> str | None:
    """Return a warning if a checkpoint lacks state that training would continue from, else None.

    Args:
        content: The checkpoint's content.
        filename: Its name.
        wanted: Top-level keys, such as ``'optimizer'``.
    """
    missing = [name for name in wanted if name not in content]
    if not missing:
        return None
    return (
        f"{filename} has no {' and no '.join(map(repr, missing))}, as with save_optimizer=False or "
        f"save_param_scheduler=False. Training continues after iteration {content['meta'].get('iter')} with the "
        "weights of the checkpoint; what it lacks starts anew, so the run will differ from one that never stopped."
    )


def optimizer_classes(optim_wrapper: Any) -> dict[str, str]:
    """Return the class name of each optimizer in an optimizer wrapper, by the name of its wrapper."""
    wrappers = optim_wrappers_of(optim_wrapper)
    return {name or "optimizer": type(wrapper.optimizer).__name__ for name, wrapper in wrappers.items()}


def warning_of_waiting_gradients(optim_wrapper: Any, filename: str) -> str | None:
    """Return a warning if a checkpoint that is saved now lacks accumulated gradients, else None."""
    waiting = waiting_gradients(optim_wrapper)
    if waiting is None:
        return None
    done, counts = waiting
    return (
        f"{filename} is saved after {done} of accumulative_counts={counts} iterations. Accumulated gradients are not "
        f"saved: resuming from it loses those of {done} iterations. Save at multiples of {counts} iterations. This "
        "warning appears once."
    )


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
