"""Families of real models train sharded as in a single process, on the same global batches, and resume exactly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mmengine.hooks import EMAHook
from tests.models.comparing import check_equal, check_resumes, note, run, strategy
from tests.models.families import FAMILIES
from tests.models.training import Outcome

CHECKPOINTS = {"size": "full", "class": "local", "name": "sharded"}


@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_trains_as_alone_and_resumes_exactly(
    tmp_path: Path, alone: Callable[..., Outcome], family: str, kind: str
) -> None:
    settings = strategy(CHECKPOINTS[kind], auto_wrap_policy=FAMILIES[family].policies[kind])
    whole = run(tmp_path / "whole", family, settings)
    assert len(whole.units) > 1
    note(f"{family} {kind}", whole, alone(family))
    check_equal(whole, alone(family))
    check_resumes(tmp_path, family, settings, whole)


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_convnext_with_averaged_weights(tmp_path: Path, alone: Callable[..., Outcome], kind: str) -> None:
    def hooks(name: Any) -> list[dict[str, Any]]:
        return [{"type": name, "ema_type": "ExponentialMovingAverage", "momentum": 0.2}]

    settings = strategy(CHECKPOINTS[kind], auto_wrap_policy=FAMILIES["convnext"].policies[kind])
    whole = run(tmp_path / "whole", "convnext", settings, custom_hooks=hooks("EMAHook"))
    expected = alone("convnext", custom_hooks=hooks(EMAHook))
    assert expected.metrics != alone("convnext").metrics, "averaged weights are validated"
    note(f"convnext+EMA {kind}", whole, expected)
    check_equal(whole, expected)
    check_resumes(tmp_path, "convnext", settings, whole, custom_hooks=hooks("EMAHook"))


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_resnet_with_batch_statistics_trains_as_replicated(tmp_path: Path, kind: str) -> None:
    """Batch norm that normalises by each rank's own batch has no equal in a single process: DDP does the same."""
    model = {**FAMILIES["resnet"].model, "norm_eval": False}
    replicated = {"type": "MMDistributedDataParallel", "broadcast_buffers": False}
    expected = run(tmp_path / "ddp", "resnet", {"type": "DDPStrategy", "model_wrapper": replicated}, model=model)
    settings = strategy(CHECKPOINTS[kind], auto_wrap_policy=FAMILIES["resnet"].policies[kind])
    whole = run(tmp_path / "whole", "resnet", settings, model=model)
    note(f"resnet (DDP) {kind}", whole, expected)
    check_equal(whole, expected)
