"""Checkpoints of DeepSpeed load into a sharded model and its optimizer, on other numbers of ranks than wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.core.checkpoint.formats.test_deepspeed import ARCHIVES, unpacked
from tests.core.deepspeed.make import Model
from tests.core.dtensors.make import whole

import mmfsdp
from mmfsdp.testing import run_ranks

CASES = ("zero1_2ranks_bf16", "zero2_2ranks_fp16_groups", "zero3_4ranks_subgroups")


def load(rank: int, directory: Path) -> dict[str, Any]:
    found = {}
    for case in CASES:
        torch.manual_seed(rank)
        model = mmfsdp.shard(Model(frozen=True), {"wrap": {"kind": "none"}})
        params = [param for param in model.parameters() if param.requires_grad]
        groups = [{"params": params[:3]}, {"params": params[3:]}] if "_groups" in case else params
        optimizer = torch.optim.AdamW(groups, lr=1.0)
        content, _ = mmfsdp.load_checkpoint(directory / case, model, optimizer)
        names = {param: name for name, param in model.named_parameters()}
        found[case] = whole(
            {
                "weights": {name: param.detach() for name, param in model.named_parameters()},
                "exp_avg": {names[param]: state["exp_avg"] for param, state in optimizer.state.items()},
                "lr": [group["lr"] for group in optimizer.param_groups],
                "mean": model.mean,
                "epoch": content["epoch"],
            }
        )
    return found


def test_three_ranks_load_what_two_and_four_wrote(tmp_path: Path) -> None:
    [archive] = [path for path in ARCHIVES if path.name == "0.19.8.tar.gz"]
    unpacked(archive, tmp_path)
    for found in run_ranks(load, 3, tmp_path):
        for case, loaded in found.items():
            truth = torch.load(tmp_path / case / "truth.pth")
            for kind, expected in (("weights", "fp32"), ("exp_avg", "exp_avg")):
                for name, tensor in truth[expected].items():
                    assert torch.equal(loaded[kind][name], tensor), (case, kind, name)
            assert loaded["lr"] == ([0.1, 0.01] if "_groups" in case else [0.02])
            assert torch.equal(loaded["mean"], torch.arange(5) / 3)
            assert loaded["epoch"] == 3
