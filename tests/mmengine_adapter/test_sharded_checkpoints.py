"""Checkpoints in torch's distributed format from MMEngine: every way to ask for them, resumed on any world size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from mmengine.registry import MODELS
from tests.mmengine_adapter.toy import strategy, train
from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType

from mmfsdp.checkpoint import open_layout, verify
from mmfsdp.errors import ConfigError
from mmfsdp.testing import run_ranks
from mmfsdp_mmengine.checkpoints.live_content import read_content
from mmfsdp_mmengine.configs.arguments import state_dict_settings

FORMS: list[Any] = [
    "sharded",
    {"state_dict_type": "SHARDED_STATE_DICT"},
    {"state_dict_type": StateDictType.SHARDED_STATE_DICT},
    {"state_dict_config": {"type": "ShardedStateDictConfig", "offload_to_cpu": True}},
    {"state_dict_config": {"type": "torch.distributed.fsdp.ShardedStateDictConfig"}},
    {"optim_state_dict_config": ShardedOptimStateDictConfig},
    {"optim_state_dict_config": {"type": ShardedOptimStateDictConfig, "offload_to_cpu": False}},
    {
        "state_dict_type": "SHARDED_STATE_DICT",
        "state_dict_config": ShardedStateDictConfig(offload_to_cpu=True),
        "optim_state_dict_config": {"type": "ShardedOptimStateDictConfig"},
    },
]


@pytest.mark.parametrize("given", FORMS, ids=str)
def test_forms(given: Any) -> None:
    settings = state_dict_settings(given)
    assert settings.kind == "sharded"
    assert settings.state_dict_type is StateDictType.SHARDED_STATE_DICT


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("shard", r"'sharded' or a dict, got 'shard'\. Did you mean 'sharded'\?"),
        (
            {"state_dict_config": {"type": "ShardedStateDictConfig", "offload_cpu": True}},
            r"ShardedStateDictConfig has no argument 'offload_cpu'\. Did you mean 'offload_to_cpu'\?",
        ),
        (
            {"state_dict_type": "SHARDED_STATE_DICT", "state_dict_config": {"type": "LocalStateDictConfig"}},
            "contradicts itself: state_dict_type is SHARDED, state_dict_config is LOCAL",
        ),
    ],
)
def test_what_is_not_accepted(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        state_dict_settings(given)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_resumed_on_any_world_size(engine: str, tmp_path: Path) -> None:
    paramwise = {"norm_decay_mult": 0.0, "custom_keys": {"head": {"lr_mult": 2.0}}}
    optim = {
        "optimizer": {"type": "AdamW", "lr": 0.01, "weight_decay": 0.05},
        "paramwise_cfg": paramwise,
        "clip_grad": {"max_norm": 0.5},
    }
    hooks = [{"type": "History"}, {"type": "KeepsOwnState"}]
    settings = {"strategy": strategy("sharded", engine=engine), "optim_wrapper": optim, "custom_hooks": hooks}
    whole = run_ranks(train, 2, tmp_path / "whole", 2, settings)[0]
    saved = tmp_path / "whole" / "epoch_1.pth"
    assert {".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"} == {path.name for path in saved.iterdir()}
    report = verify(saved, trust=True)
    assert report.ok
    assert report.manifest

    # Training goes on as if it had not stopped: bit by bit on as many ranks, closely on others and as another kind.
    again = run_ranks(train, 2, tmp_path / "again", 2, {**settings, "load_from": str(saved), "resume": True})[0]
    assert again["losses"] == whole["losses"][4:]
    assert again["metrics"] == whole["metrics"][1:]
    changes = {**settings, "strategy": strategy("full"), "load_from": str(saved), "resume": True}
    alone = run_ranks(train, 1, tmp_path / "alone", 1, changes)[0]
    assert len(alone["losses"]) == 4
    assert alone["losses"] == pytest.approx(whole["losses"][4:], rel=1e-5)

    # What a resumed run saves is whole: the next one can resume from it.
    for resumed in ("again", "alone"):
        kept = read_content(tmp_path / resumed / "epoch_2.pth")["optimizer"]["base_param_settings"]
        assert kept["params"].shape == (1,)

    # And torch reads the weights.
    weights = MODELS.build({"type": "ToyModel"}).state_dict()
    dcp.load({"state_dict": weights}, checkpoint_id=tmp_path / "whole" / "epoch_2.pth", no_dist=True)
    layout = open_layout(tmp_path / "whole" / "epoch_2.pth", trust=True)
    assert "optimizer/state/head.weight/exp_avg" in layout.tensors
    assert {name for name in layout.tensors if name.startswith("state_dict/")} == {f"state_dict/{n}" for n in weights}
    assert not torch.equal(weights["head.weight"], MODELS.build({"type": "ToyModel"}).state_dict()["head.weight"])
