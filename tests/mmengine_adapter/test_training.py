"""FlexibleRunner with FSDPStrategy trains as MMEngine's unsharded strategy does, on the same global batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.mmengine_adapter.toy import config, run

from mmfsdp.testing import run_ranks

POLICY = {"type": "ModuleWrapPolicy", "module_classes": ["Block"]}
UNSHARDED = {"type": "SingleDeviceStrategy"}


def train(rank: int, work_dir: Path, world_size: int, changes: dict[str, Any]) -> dict[str, Any]:
    history = run(config(work_dir, world_size, **changes))
    return {"losses": history.losses, "norms": history.norms, "metrics": history.metrics}


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Unsharded runs by their changes, each done once."""
    done: dict[str, Any] = {}

    def reference(**changes: Any) -> dict[str, Any]:
        key = repr(sorted(changes.items()))
        if key not in done:
            folder = tmp_path_factory.mktemp("unsharded")
            [done[key]] = run_ranks(train, 1, folder, 1, {**changes, "strategy": UNSHARDED})
        return done[key]

    return reference


def strategy(**wrapper: Any) -> dict[str, Any]:
    return {
        "strategy": {
            "type": "FSDPStrategy",
            "model_wrapper": {"auto_wrap_policy": POLICY, **wrapper},
            "state_dict_cfg": "full",
        }
    }


def check_equal(sharded: dict[str, Any], reference: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert sharded["losses"] == pytest.approx(reference["losses"], rel=tolerance)
    assert sharded["norms"] == pytest.approx(reference["norms"], rel=tolerance)
    assert sharded["metrics"] == reference["metrics"]
    assert len(sharded["losses"]) == 8
    assert sharded["losses"][-1] < 0.8 * sharded["losses"][0]


@pytest.mark.parametrize(
    "wrapper",
    [
        {},
        {"sharding_strategy": "SHARD_GRAD_OP"},
        {"sharding_strategy": "NO_SHARD"},
        {"engine": "fsdp1"},
        {"use_orig_params": False},
    ],
    ids=lambda wrapper: "-".join(map(str, wrapper.values())) or "fsdp2",
)
def test_losses_norms_and_metrics_equal_unsharded(tmp_path: Path, references: Any, wrapper: dict[str, Any]) -> None:
    results = run_ranks(train, 2, tmp_path, 2, strategy(**wrapper))
    assert results[0] == results[1]
    check_equal(results[0], references())
