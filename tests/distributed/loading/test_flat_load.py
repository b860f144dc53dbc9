"""Weights that are loaded into FSDP1's flat parameters are the unsharded model's, however a unit lays them out."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh

from mmfsdp import FullyShardedDataParallel, load_model_state_dict, model_state_dict
from mmfsdp.saving.reading.contents import read_checkpoint
from mmfsdp.testing import run_ranks


class Odd(nn.Module):
    """Sizes that divide by no number of ranks, channels last, tied weights, a scalar, buffers, an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5)).to(
            memory_format=torch.channels_last
        )
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.note = "new"

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.stem(x).mean((2, 3)))) * self.scale


def loaded(rank: int, folder: Path, wrapper: dict[str, Any]) -> list[str]:
    """What was wrong after loading: before anything ran, after training and validation, from a file, in part."""
    torch.manual_seed(1)
    if wrapper["sharding_strategy"] == "HYBRID_SHARD":
        wrapper["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = FullyShardedDataParallel(
        Odd(), engine="fsdp1", config={"wrap": {"kind": "module_class", "classes": "Sequential"}}, **wrapper
    )
    x = torch.randn(4, 3, 4, 4)
    wrong = []
    for case in ("before", "after", "file", "first rank"):
        if case == "after":
            model(x).sum().backward()
            with torch.no_grad():
                model.eval()(x)
        alone = Odd()
        with torch.no_grad():
            for value in (*alone.parameters(), alone.seen):
                value.normal_()
        alone.note = case
        weights = dict(alone.state_dict())
        offered: Any = dict(weights)
        if case == "file":
            kept = {name: value.clone().contiguous() for name, value in weights.items() if torch.is_tensor(value)}
            path = folder / f"{rank}.safetensors"
            save_file(kept, path)
            offered = {**weights, **read_checkpoint(path)["state_dict"]}
        if case == "first rank" and rank:
            offered = {}
        report = load_model_state_dict(model, offered, from_rank0=case == "first rank")
        gathered = model_state_dict(model, rank0_only=False)
        same = all(not torch.is_tensor(value) or torch.equal(gathered[name], value) for name, value in weights.items())
        with torch.no_grad():
            outputs = torch.allclose(model.eval()(x), alone.eval()(x), atol=1e-5)
        if not (report.clean and gathered.keys() == weights.keys() and same and outputs and model.note == case):
            wrong.append(f"{case}: {report}, values {same}, outputs {outputs}, extra state {model.note}")
    before = copy.deepcopy(model_state_dict(model, rank0_only=False))
    report = load_model_state_dict(
        model, {"seen": torch.ones(3), "stem.0.weight": torch.ones(2), "new": torch.ones(1)}, strict=False
    )
    after = model_state_dict(model, rank0_only=False)
    changed = [name for name, value in before.items() if torch.is_tensor(value) and not torch.equal(value, after[name])]
    if (
        changed != ["seen"]
        or report.unexpected != ("new",)
        or len(report.mismatched) != 1
        or "scale" not in report.missing
    ):
        wrong.append(f"in part: {changed} {report}")
    return wrong


@pytest.mark.sample("FULL_SHARD-False", "NO_SHARD-True", "SHARD_GRAD_OP-True")
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_all_layouts(tmp_path: Path, strategy: str, use_orig_params: bool) -> None:
    wrapper = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    assert run_ranks(loaded, 2, tmp_path, wrapper) == [[], []]


def test_hybrid(tmp_path: Path) -> None:
    assert run_ranks(loaded, 4, tmp_path, {"sharding_strategy": "HYBRID_SHARD"}) == [[]] * 4
