"""Checks that training can continue from a checkpoint, and holds what the training loop needs to do so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mmfsdp.errors import FormatError, StateDictError
from mmfsdp_mmengine.optimizers.binding import optim_wrappers_of, waiting_gradients

__all__ = [
    "Resumed",
    "check_resumable",
    "optimizer_classes",
    "warning_of_missing_state",
    "warning_of_waiting_gradients",
]


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
