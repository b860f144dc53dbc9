"""Flipped bits are found when a strategy loads a checkpoint, of whatever kind, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.model import BaseModel
from torch import nn

from mmfsdp.checkpoint import open_layout
from mmfsdp.errors import CorruptCheckpointError
from mmfsdp.testing import run_ranks
from mmfsdp_mmengine import FSDPStrategy


class Wide(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(601, 601)

    def forward(self, inputs: torch.Tensor, mode: str = "tensor") -> Any:
        return self.net(inputs)


def prepared(folder: str, kind: str) -> Any:
    strategy = FSDPStrategy(work_dir=folder, state_dict_cfg=kind)
    strategy.logger.setLevel("ERROR")
    strategy.prepare(Wide())
    return strategy


def saved(rank: int, folder: str, kind: str) -> None:
    prepared(folder, kind).save_checkpoint(f"{folder}/saved.pth", save_optimizer=False, save_param_scheduler=False)


def loaded(rank: int, folder: str, kind: str) -> str:
    strategy = prepared(folder, kind)
    try:
        strategy.load_checkpoint(f"{folder}/saved.pth", strict=True)
    except CorruptCheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["full", "local", "sharded"])
def test_flipped_bits_are_named_on_every_rank(kind: str, tmp_path: Path) -> None:
    run_ranks(saved, 2, str(tmp_path), kind)
    assert run_ranks(loaded, 2, str(tmp_path), kind) == ["", ""]
    chunk = open_layout(tmp_path / "saved.pth").tensors["state_dict/net.weight"].chunks()[0]
    with chunk.file.open("r+b") as file:
        file.seek(chunk.offset + chunk.nbytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))
    for world_size in (1, 2):
        for text in run_ranks(loaded, world_size, str(tmp_path), kind):
            assert "is damaged: the CRC-32 of bytes" in text
