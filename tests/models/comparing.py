"""Running a family on two ranks, and comparing what came of it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tests.models.training import NUM_STEPS, STOP, Outcome, train

from mmfsdp.testing import run_ranks

__all__ = ["check_equal", "check_resumes", "note", "run", "strategy"]


def strategy(kind: str, **wrapper: Any) -> dict[str, Any]:
    """Return the config of FSDPStrategy that saves checkpoints of a kind."""
    wrapper = {"type": "MMFullyShardedDataParallel", **wrapper}
    return {"type": "FSDPStrategy", "model_wrapper": wrapper, "state_dict_cfg": kind}


def run(folder: Path, family: str, strategy: dict[str, Any], **changes: Any) -> Outcome:
    """Train on two ranks, which must agree."""
    first, *others = run_ranks(train, 2, folder, 2, family, strategy, changes)
    for other in others:
        assert {**asdict(other), "digest": ""} == {**asdict(first), "digest": ""}
    return first


def deviation(values: list[float], expected: list[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(value - right) / abs(right) for value, right in zip(values, expected, strict=True))


def check_equal(outcome: Outcome, expected: Outcome, tolerance: float = 1e-5) -> None:
    """Compare losses, gradient norms, optimizer groups and validations of two runs."""
    assert len(outcome.losses) == NUM_STEPS
    assert outcome.groups == expected.groups
    assert outcome.losses == pytest.approx(expected.losses, rel=tolerance)
    assert outcome.norms == pytest.approx(expected.norms, rel=tolerance)
    assert [metrics["count"] for metrics in outcome.metrics] == [48, 48]
    for metrics, wanted in zip(outcome.metrics, expected.metrics, strict=True):
        assert metrics == pytest.approx(wanted, rel=tolerance)
        assert metrics["accuracy"] == pytest.approx(wanted["accuracy"], rel=1e-6)


def note(name: str, outcome: Outcome, expected: Outcome) -> None:
    """Append a row to the file that MODELS_TABLE names, if it does: tests/models/agreement.jsonl has them all."""
    if path := os.environ.get("MODELS_TABLE"):
        row = [name, len(outcome.units), deviation(outcome.losses, expected.losses)]
        row += [deviation(outcome.norms, expected.norms), outcome.metrics[-1]["accuracy"]]
        with Path(path).open("a") as file:
            file.write(json.dumps(row) + "\n")


def check_resumes(folder: Path, family: str, strategy: dict[str, Any], whole: Outcome, **changes: Any) -> None:
    """Go on from the middle of a run, and compare with not having stopped: bit for bit."""
    checkpoint = folder / "whole" / f"iter_{STOP}.pth"
    resumed = run(folder / "resumed", family, strategy, load_from=str(checkpoint), resume=True, **changes)
    assert resumed.losses == whole.losses[STOP:]
    assert resumed.norms == whole.norms[STOP:]
    assert resumed.metrics == whole.metrics  # the checkpoint is older than the validation at its step
    assert resumed.digest == whole.digest
