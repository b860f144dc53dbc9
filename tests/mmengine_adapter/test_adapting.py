"""Modules that change a state dict while they load it, as many of OpenMMLab's do, change what ``load_from`` loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from mmengine.runner.checkpoint import load_state_dict
from tests.mmengine_adapter.toy import POLICY, Block

from mmfsdp import model_state_dict
from mmfsdp.errors import MmfsdpError
from mmfsdp.testing import run_ranks
from mmfsdp_mmengine import FSDPStrategy


class Position(nn.Module):
    """An embedding per place that fits itself to another number of places, as mmpretrain's ViT does."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(1, places, 8))
        self._register_load_state_dict_pre_hook(self._resize)

    def _resize(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        name = f"{prefix}embedding"
        if name not in state_dict or state_dict[name].shape == self.embedding.shape:
            return
        resized = F.interpolate(state_dict[name].transpose(1, 2), self.embedding.shape[1], mode="linear")
        state_dict[name] = resized.transpose(1, 2)


class Renamed(nn.Linear):
    """Had other names once, as mmcv's deformable convolutions."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}kernel" in state_dict:
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}kernel")
        super()._load_from_state_dict(state_dict, prefix, *args)


@MODELS.register_module(force=True)
class Student(BaseModel):
    """Takes the weights of a single model for two, as mmdet's semi-supervised detectors do."""

    def __init__(self, places: int = 6) -> None:
        super().__init__()
        for name in ("student", "teacher"):
            parts = {"position": Position(places), "block": Block(8), "head": Renamed(8, 3)}
            setattr(self, name, nn.ModuleDict(parts))

    def forward(self, inputs: torch.Tensor, mode: str = "tensor") -> torch.Tensor:
        return inputs

    def _load_from_state_dict(self, state_dict: dict[str, Any], *args: Any) -> None:
        if not any("student" in key for key in state_dict):
            names = list(state_dict.keys())
            state_dict.update({f"student.{name}": state_dict[name] for name in names})
            state_dict.update({f"teacher.{name}": state_dict[name] for name in names})
            for name in names:
                state_dict.pop(name)
        super()._load_from_state_dict(state_dict, *args)


def loaded(rank: int, folder: Path, wrapper: dict[str, Any], files: list[str]) -> list[dict[str, Any]]:
    found = []
    for file in files:
        strategy = FSDPStrategy(work_dir=str(folder), model_wrapper={"auto_wrap_policy": POLICY, **wrapper})
        strategy.prepare({"type": "Student"})
        strategy.load_checkpoint(str(folder / file), strict=True)
        found.append(model_state_dict(strategy.model, rank0_only=False))
    return found


def written(folder: Path) -> dict[str, Mapping[str, torch.Tensor]]:
    """Weights that fit only after the model changed them, by file."""
    torch.manual_seed(4)
    whole = MODELS.build({"type": "Student"}).state_dict()
    one = {name.removeprefix("student."): value for name, value in whole.items() if name.startswith("student.")}
    older = {name.replace("head.weight", "head.kernel"): value for name, value in one.items()}
    files = {
        "own.pth": whole,
        "renamed.pth": older,
        "resized.pth": {**older, "position.embedding": torch.randn(1, 9, 8)},
    }
    for name, weights in files.items():
        torch.save({"state_dict": dict(weights), "meta": {}}, folder / name)
    return files


@pytest.mark.sample("replicated")
@pytest.mark.parametrize("wrapper", [{}, {"sharding_strategy": "NO_SHARD"}], ids=["sharded", "replicated"])
def test_equals_mmengine_s_own_loading(tmp_path: Path, wrapper: dict[str, Any]) -> None:
    files = written(tmp_path)
    for results in run_ranks(loaded, 2, tmp_path, wrapper, [*files]):
        for found, weights in zip(results, files.values(), strict=True):
            model = MODELS.build({"type": "Student"})
            load_state_dict(model, dict(weights), strict=True)
            expected = model.state_dict()
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(found[name], value), name


@MODELS.register_module(force=True)
class Picky(BaseModel):
    """Refuses weights on the second rank."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self._register_load_state_dict_pre_hook(self._check)

    def _check(self, *_: Any) -> None:
        if dist.is_initialized() and dist.get_rank() == 1:
            raise ValueError("the weights are of another model")

    def forward(self, inputs: torch.Tensor, mode: str = "tensor") -> torch.Tensor:
        return inputs


def refused(rank: int, folder: Path) -> str:
    strategy = FSDPStrategy(work_dir=str(folder), model_wrapper={"auto_wrap_policy": "size"})
    strategy.prepare({"type": "Picky"})
    with pytest.raises((MmfsdpError, ValueError)) as caught:
        strategy.load_checkpoint(str(folder / "own.pth"))
    return str(caught.value)


def test_code_that_fails_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    torch.save({"state_dict": nn.ModuleDict({"head": nn.Linear(4, 2)}).state_dict(), "meta": {}}, tmp_path / "own.pth")
    first, second = run_ranks(refused, 2, tmp_path)
    assert second == "the weights are of another model"
    assert first == "Rank 1 failed: ValueError: the weights are of another model [rank=1]"
