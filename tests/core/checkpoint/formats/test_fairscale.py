"""Directories of fairscale's FSDP equal what its own function puts together."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mmfsdp
from mmfsdp.checkpoint import convert, diff, open_layout, verify
from mmfsdp.errors import CheckpointError, CorruptCheckpointError, FormatError, IncompleteCheckpointError
from mmfsdp.testing import single_rank

GOLDEN = Path(__file__).parents[2] / "fairscale/0.4.13"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN / "shards", tmp_path / "shards")
    return tmp_path / "shards"


def test_equals_what_fairscale_consolidates(tmp_path: Path) -> None:
    expected = torch.load(GOLDEN / "whole.pth", weights_only=True)
    layout = open_layout(GOLDEN / "shards")
    assert (layout.format, layout.world_size) == ("fairscale", 3)
    assert verify(GOLDEN / "shards").ok
    convert(layout, tmp_path / "all.pth", keep="all", fsync=False, verify_output=True)
    report = diff(layout, tmp_path / "all.pth")
    assert report.same
    assert report.compared == len(expected) + 3  # with tied names
    content = torch.load(tmp_path / "all.pth", weights_only=True)
    found = content["state_dict"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    assert content["epoch"] == 3
    assert [part["state"][0]["exp_avg"].tolist() for part in content["optimizer"]] == [[0.0] * 2, [1.0] * 2, [2.0] * 2]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.inner = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
        self.plain, self.last = nn.Linear(5, 3, bias=False), nn.Linear(3, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight


def test_loads_into_a_sharded_model(copy: Path) -> None:
    for path in copy.iterdir():  # metaseq's names are not the only ones
        content = torch.load(path, weights_only=False)
        content = {"weights": content["model"], "meta": content["shard_metadata"]}
        torch.save(content, copy / f"checkpoint_{path.stem[-1]}.torch")
        path.unlink()
    with single_rank():
        model = mmfsdp.shard(Model(), {"wrap": {"kind": "none"}})
        mmfsdp.load_checkpoint(copy, model)
        found = mmfsdp.model_state_dict(model)
    for name, tensor in torch.load(GOLDEN / "whole.pth", weights_only=True).items():
        assert torch.equal(found[name], tensor)


def _without_metadata(content: dict[str, Any]) -> None:
    del content["shard_metadata"]


def _of_another_model(content: dict[str, Any]) -> None:
    content["shard_metadata"]["param_metadata"][1]["params"]["flat_param_0"]["numels"][0] += 1


def _longer(content: dict[str, Any]) -> None:
    content["model"]["plain.weight"] = torch.ones(6)


def _padding(content: dict[str, Any]) -> None:
    content["shard_metadata"]["param_metadata"][0]["params"]["flat_param_0"]["padding"] = -1


def _nonsense(content: dict[str, Any]) -> None:
    content["shard_metadata"]["param_metadata"][0] = "unit"


def _experts(content: dict[str, Any]) -> None:
    content["shard_metadata"]["param_metadata"][1]["no_broadcast_optim_state"] = True


def _of_another_epoch(content: dict[str, Any]) -> None:
    content["epoch"] = 4


@pytest.mark.parametrize(
    ("rank", "change", "error", "said"),
    [
        (1, _without_metadata, FormatError, r"shard1\.pt holds no local_metadata_dict\(\) of fairscale"),
        (2, _of_another_model, CorruptCheckpointError, r"shard2\.pt does not hold 'inner\.flat_param_0' as "),
        (1, _longer, CorruptCheckpointError, r"'plain\.weight' have 16 elements together, expected 15"),
        (2, _padding, CorruptCheckpointError, r"shard2\.pt does not hold 'flat_param_0' as "),
        (1, _nonsense, CorruptCheckpointError, "is not what local_metadata_dict\\(\\) returns: TypeError"),
        (2, _of_another_epoch, CorruptCheckpointError, r"shard2\.pt is of another save \(epoch 4\) than .*shard0\.pt"),
        (0, _experts, FormatError, "parameters of 'inner' are other ones on each rank"),
    ],
)
def test_bad_files(
    rank: int, change: Callable[[dict[str, Any]], None], error: type[CheckpointError], said: str, copy: Path
) -> None:
    path = copy / f"checkpoint_3-shard{rank}.pt"
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)
    with pytest.raises(error, match=said):
        open_layout(copy)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_missing_file_is_named(rank: int, copy: Path) -> None:
    (copy / f"checkpoint_3-shard{rank}.pt").unlink()
    with pytest.raises(IncompleteCheckpointError, match=rf"checkpoint_3-shard{rank}\.pt is missing"):
        open_layout(copy)


def test_one_file_is_not_taken_for_the_whole(copy: Path) -> None:
    part = copy / "checkpoint_3-shard1.pt"
    with pytest.raises(FormatError, match=r"shard1.pt is one rank's part of a sharded checkpoint; open its directory"):
        convert(part, copy.parent / "out.safetensors")
    with pytest.raises(FormatError, match="one rank's part"):
        convert(part, copy.parent / "out.pth", keep="all")
