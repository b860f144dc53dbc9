"""Findings about parameter schedulers: those that are built already, and those that would begin after training ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mmfsdp.frontends import Finding
from mmfsdp_mmengine.doctor.subject import Subject, name_of

__all__ = ["FINDINGS"]


def built_already(subject: Subject) -> Iterator[Finding]:
    """Schedulers that a Python config builds itself."""
    if subject.sharding is not None and any(
        item is not None and not isinstance(item, Mapping | list | tuple) for _, item in _schedulers(subject)
    ):
        yield Finding(
            "changed",
            "param_scheduler",
            "schedulers that are built already are kept.",
            "rebuilt and then dropped them.",
        )


def beyond_the_end(subject: Subject) -> Iterator[Finding]:
    """Schedulers that end before they begin, as they do if training is made shorter for a try."""
    length, by_epoch = _length_of_training(subject.settings.get("train_cfg"))
    for path, item in _schedulers(subject):
        if not isinstance(item, Mapping):
            continue
        default = length if item.get("by_epoch", True) == by_epoch else None
        begin, end = item.get("begin", 0), item.get("end", default)
        if isinstance(begin, int) and isinstance(end, int) and begin >= end:
            what = "it ends at" if "end" in item else "training ends at"
            option = path.replace("[", ".").replace("]", "")
            yield Finding(
                "error",
                f"{path}.begin",
                f"{what} {end} and this scheduler begins at {begin}: MMEngine raises a ValueError. Let it begin "
                f"earlier, in the config or with --cfg-options {option}.begin={max(end - 1, 0)}.",
            )


def _schedulers(subject: Subject) -> list[tuple[str, Any]]:
    """Return path and config of each scheduler of a single optimizer."""
    given = subject.settings.get("param_scheduler")
    if isinstance(given, list | tuple):
        return [(f"param_scheduler[{index}]", item) for index, item in enumerate(given)]
    return [("param_scheduler", given)]


def _length_of_training(given: Any) -> tuple[int | None, bool]:
    """Return how many epochs or iterations MMEngine's own loops train, and whether they are epochs."""
    if not isinstance(given, Mapping):
        return None, True
    by_epoch = name_of(given.get("type", "")) == "EpochBasedTrainLoop" or given.get("by_epoch", False)
    if not by_epoch and "by_epoch" not in given and name_of(given.get("type", "")) != "IterBasedTrainLoop":
        return None, True  # a loop of another kind
    length = given.get("max_epochs" if by_epoch else "max_iters")
    return (length if isinstance(length, int) else None), bool(by_epoch)


FINDINGS = (built_already, beyond_the_end)
"""All findings of this module."""
