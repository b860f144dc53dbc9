"""A runner that ignores the setting that would shard the model says so, and what to write instead."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from mmengine.config import Config
from mmengine.runner import FlexibleRunner, Runner
from tests.mmengine_adapter.toy import UNSHARDED, config, strategy

from mmfsdp.testing import run_ranks
from mmfsdp_mmengine import FSDPStrategy

WRAPPER = {"type": "mmengine.MMFullyShardedDataParallel"}
PLAIN = "The plain Runner ignores strategy, so the model is not sharded. Write runner_type='FlexibleRunner'"
FLEXIBLE = "FlexibleRunner ignores model_wrapper_cfg, so the model is not sharded. Write strategy=dict("
ALONE = "launcher is 'none', so each of the 2 processes trains the whole model by itself"
CASES: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "strategy for the plain Runner": (Runner, {"strategy": strategy()}, [PLAIN]),
    "a class as strategy": (Runner, {"strategy": {"type": FSDPStrategy}}, [PLAIN]),
    "another strategy": (Runner, {"strategy": {"type": "DDPStrategy"}}, []),
    "both for the plain Runner": (Runner, {"strategy": strategy(), "model_wrapper_cfg": WRAPPER}, [ALONE]),
    "no launcher": (Runner, {"strategy": None, "model_wrapper_cfg": WRAPPER}, [ALONE]),
    "replicas without a launcher": (
        Runner,
        {"strategy": None, "model_wrapper_cfg": {"type": "MMDistributedDataParallel"}},
        [],
    ),
    "wrapper for FlexibleRunner": (FlexibleRunner, {"strategy": UNSHARDED, "model_wrapper_cfg": WRAPPER}, [FLEXIBLE]),
    "both for FlexibleRunner": (FlexibleRunner, {"strategy": strategy(), "model_wrapper_cfg": WRAPPER}, []),
}


def logged(rank: int, folder: Path, case: str) -> str:
    """What building the runner writes into its log file."""
    runner, changes, _ = CASES[case]
    os.environ["WORLD_SIZE"] = "2"  # as a launcher sets it
    try:
        settings = Config({**config(folder, 1, **changes), "experiment_name": "".join(case.split())})
        runner.from_cfg(settings)
    finally:
        os.environ["WORLD_SIZE"] = "1"
    return "".join(path.read_text() for path in folder.rglob("*.log"))


@pytest.mark.parametrize("case", CASES)
def test_says_so(tmp_path: Path, case: str) -> None:
    (text,) = run_ranks(logged, 1, tmp_path, case)
    for warning in (PLAIN, FLEXIBLE, ALONE):
        assert (warning in text) == (warning in CASES[case][2])
