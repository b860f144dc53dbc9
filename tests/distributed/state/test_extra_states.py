"""What modules save with `get_extra_state`: tensors of any length, as Transformer Engine's, and other values."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mmfsdp
from mmfsdp.errors import MmfsdpError, StateDictError
from mmfsdp.testing import run_ranks


class Scaled(nn.Linear):
    """Its extra state is a pickle in a tensor of bytes, as long as its history."""

    def __init__(self, history: list[int]) -> None:
        super().__init__(6, 6)
        self.history = history

    def get_extra_state(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(pickle.dumps(self.history)), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.history = pickle.loads(state.detach().cpu().numpy().tobytes())
        if not self.history:
            raise ValueError("no history")


def sharded(engine: str, history: list[int]) -> Any:
    model = nn.Sequential(nn.Sequential(Scaled(history), nn.Linear(6, 6)), nn.Linear(6, 6))
    return mmfsdp.shard(model, {"engine": engine, "wrap": {"kind": "module_class", "classes": "Sequential"}})


def restored(rank: int, engine: str, folder: str) -> list[list[int]]:
    model = sharded(engine, [1, 2, 3])
    found = []
    for kind in ("sharded", "local", "full"):
        mmfsdp.save_checkpoint(f"{folder}/{kind}", model, kind=kind)  # type: ignore[arg-type]
        other = sharded(engine, [0])
        _, report = mmfsdp.load_checkpoint(f"{folder}/{kind}", other)
        assert report.clean
        found.append(_scaled(other).history)
    weights = mmfsdp.model_state_dict(model, rank0_only=False)
    for state, from_rank0 in ((weights, False), (weights if rank == 0 else {}, True)):
        other = sharded(engine, [0])
        assert mmfsdp.load_model_state_dict(other, state, from_rank0=from_rank0).clean
        found.append(_scaled(other).history)
    return found


def _scaled(model: nn.Module) -> Scaled:
    [found] = [module for module in model.modules() if isinstance(module, Scaled)]
    return found


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "replicate"])
def test_tensors_of_any_length_come_back(engine: str, tmp_path: Path) -> None:
    for found in run_ranks(restored, 2, engine, str(tmp_path)):
        assert found == [[1, 2, 3]] * 5


def refused_by_one(rank: int) -> str:
    model = sharded("fsdp2", [4])
    weights = mmfsdp.model_state_dict(model, rank0_only=False)
    if rank == 1:
        weights["0.0._extra_state"] = torch.frombuffer(bytearray(pickle.dumps([])), dtype=torch.uint8)
    with pytest.raises((MmfsdpError, ValueError)) as caught:
        mmfsdp.load_model_state_dict(model, weights)
    return str(caught.value)


def test_a_module_that_refuses_its_state_on_one_rank_is_an_error_on_all() -> None:
    first, second = run_ranks(refused_by_one, 2)
    assert second == "no history"
    assert first == "Rank 1 failed: ValueError: no history [rank=1]"


def unit_of_its_own(rank: int) -> str:
    wrap = {"kind": "module_class", "classes": "Scaled"}
    model = mmfsdp.shard(nn.Sequential(Scaled([1]), nn.Linear(6, 6)), {"engine": "fsdp1", "wrap": wrap})
    with pytest.raises(StateDictError) as caught:
        mmfsdp.model_state_dict(model)
    return str(caught.value)


def test_what_torch_cannot_save_is_said() -> None:
    for text in run_ranks(unit_of_its_own, 2):
        assert text.endswith("Write engine 'fsdp2', or a wrap policy whose units contain that module.")
