"""Every row of docs/explanation/optimizers.md about torch's own optimizers is what happens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.distributed.optimizer_rows import WHOLE, rows, words_of

from mmfsdp.basics.torch_releases import torch_has

ROWS = rows("torch.optim")
if torch_has((2, 15)):  # as the page says below the table
    ROWS["torch.optim.Rprop"] = ("yes", "yes")
if not torch_has((2, 12)):
    ROWS["torch.optim.Adafactor"] = ("off", "refused")


@pytest.mark.sample(
    "torch.optim.Adafactor", "torch.optim.Rprop", "torch.optim.LBFGS", "torch.optim.AdamW", "torch.optim.SGD"
)
@pytest.mark.parametrize("name", ROWS)
def test_the_row_is_what_happens(name: str, tmp_path: Path) -> None:
    trains, saves = words_of(name, tmp_path)
    assert (trains.partition(" ")[0], saves) == ROWS[name]


def test_every_optimizer_of_torch_has_a_row() -> None:
    found = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    assert {f"torch.optim.{name}" for name in found - {"SparseAdam"}} == ROWS.keys()


@pytest.mark.parametrize("name", ["torch.optim.Adafactor", "torch.optim.LBFGS"])
def test_whole_parameters_are_the_way_out(name: str, tmp_path: Path) -> None:
    assert words_of(name, tmp_path, WHOLE) == ("yes", "yes")


@pytest.mark.exhaustive
def test_flat_parameters_are_a_way_out_too(tmp_path: Path) -> None:
    assert words_of("torch.optim.Rprop", tmp_path, {"engine": "fsdp1"}) == ("yes", "yes")
