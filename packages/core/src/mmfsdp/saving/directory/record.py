"""The file ``run.json`` in the directory of a run: to which run and model it belongs, and the metrics of its steps."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from typing import Any

from mmfsdp.errors import RunDirectoryError

__all__ = ["RECORD_NAME", "checked_record", "identity_of", "metrics_of", "record_bytes", "with_metric"]

RECORD_NAME = "run.json"


def identity_of(params: Iterable[tuple[str, tuple[int, ...]]]) -> str:
    """Return what identifies a model, from the names and shapes of its parameters in any order."""
    return hashlib.sha256(repr(sorted(params)).encode()).hexdigest()


def checked_record(data: bytes | None, directory: str, *, run: str | None, model: str) -> dict[str, Any]:
    """Return what a directory says about its run, or a new record if it says nothing.

    Args:
        data: The content of the file; ``None`` if it is missing.
        directory: The directory, for messages.
        run: The name of the run, or ``None`` for any.
        model: Identifies the names and shapes of the model.

    Raises:
        RunDirectoryError: It belongs to another run or model, or cannot be read.
    """
    if data is None:
        return {"version": 1, "run": run, "model": model, "metrics": {}}
    try:
        found = json.loads(data)
        stored, stored_run, _ = found["model"], found["run"], found["metrics"].items()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunDirectoryError(
            f"{RECORD_NAME} says to which run the directory belongs, and cannot be read: {error!r}. If the directory "
            "is the right one, remove that file; only the metrics of its checkpoints are lost.",
            file=f"{directory}/{RECORD_NAME}",
        ) from error
    if run is not None and stored_run is not None and run != stored_run:
        raise RunDirectoryError(
            f"The directory belongs to run {stored_run!r}, not to {run!r}. Choose another directory for this run.",
            file=directory,
        )
    if stored != model:
        raise RunDirectoryError(
            "The directory holds checkpoints of another model: its parameters have other names or shapes. Choose "
            "another directory for this model, or load weights that fit with load_checkpoint(strict=False).",
            file=directory,
        )
    return {**found, "run": stored_run if run is None else run}


def with_metric(record: dict[str, Any], step: int, metric: float | None) -> dict[str, Any]:
    """Return a record that says how good a step is; a metric that is not finite says nothing."""
    metrics = {key: value for key, value in record["metrics"].items() if key != str(step)}
    if metric is not None and math.isfinite(metric):
        metrics[str(step)] = metric
    return {**record, "metrics": metrics}


def metrics_of(record: dict[str, Any]) -> dict[int, float]:
    """Return the metrics by step."""
    return {int(step): value for step, value in record["metrics"].items()}


def record_bytes(record: dict[str, Any]) -> bytes:
    """Return the content of the file."""
    return json.dumps(record).encode()
