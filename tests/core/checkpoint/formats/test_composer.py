"""What Composer's own Trainer wrote: converted, and loaded with its optimizer."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import mmfsdp
from mmfsdp.checkpoint import convert, open_layout, verify
from mmfsdp.errors import FormatError
from mmfsdp.testing import single_rank

GOLDEN = Path(__file__).parents[2] / "composer" / "0.32.1"
FILE = GOLDEN / "ep0-ba1-rank0.pt"


class Model(nn.Module):
    """As in make.py."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 3)


def test_weights_are_those_of_the_live_model(tmp_path: Path) -> None:
    convert(FILE, tmp_path / "out.safetensors")
    torch.testing.assert_close(
        load_file(tmp_path / "out.safetensors"), dict(torch.load(GOLDEN / "full.pth")["model"]), rtol=0, atol=0
    )
    assert verify(FILE).ok


def test_weights_and_optimizer_load_with_all_that_lies_beside_them() -> None:
    expected = torch.load(GOLDEN / "full.pth")
    with single_rank():
        model = mmfsdp.shard(Model())
        optimizer = torch.optim.AdamW(model.parameters())
        rest, report = mmfsdp.load_checkpoint(FILE, model, optimizer)
        assert report.clean
        torch.testing.assert_close(mmfsdp.model_state_dict(model), dict(expected["model"]), rtol=0, atol=0)
        found = mmfsdp.optim_state_dict(model, optimizer)
    torch.testing.assert_close(found["state"], expected["optimizer"]["state"], rtol=0, atol=0)
    assert found["param_groups"][0]["lr"] == 0.01
    assert isinstance(rest["timestamp"]["Timestamp"]["total_wct"], datetime.timedelta)
    assert rest["rng"][0]["numpy"][1].shape == (624,)


def test_the_folder_is_answered_with_its_files(tmp_path: Path) -> None:
    (tmp_path / FILE.name).write_bytes(FILE.read_bytes())
    (tmp_path / "latest-rank0.pt").symlink_to(FILE.name)
    with pytest.raises(FormatError, match=r"whole checkpoint, open one of them, such as 'latest-rank0\.pt'"):
        open_layout(tmp_path)
