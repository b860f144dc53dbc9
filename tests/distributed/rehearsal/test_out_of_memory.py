"""A device that runs out of memory in a real step: the error says where, what is held, and what to change."""

from __future__ import annotations

import contextlib
import copy
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mmfsdp
from mmfsdp.rehearsal import Rehearsal, advise, explain_out_of_memory
from mmfsdp.testing import run_ranks

WIDTH, ROWS, RANKS = 64, 512, 2
PLACES = {
    "in forward of 2": ("aten.gelu.default", 3),
    "in backward of 1": ("aten.gelu_backward", 3),
    "while gathering, in forward of 1": ("all_gather_copy_in", 2),
    "in optimizer": ("aten.addcdiv_", 1),
}
"""Where the device is full: an operator of the second step, and which call of it fails."""
CONFIG = {"wrap": {"kind": "module_class", "classes": ["Block"]}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class FullDevice(TorchDispatchMode):
    """A device that fails as CUDA's allocator does, at one call of an operator."""

    def __init__(self, operator: str, call: int) -> None:
        super().__init__()
        self.operator, self.left = operator, call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= self.operator in str(func)
        if not self.left:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return func(*args, **(kwargs or {}))


def note_of(step: Rehearsal, net: nn.Module, batch: torch.Tensor, full: FullDevice) -> str:
    """Train until the device is full, and return the note of the error."""
    model = mmfsdp.shard(net, CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> None:
        for number in range(2):
            with full if number else contextlib.nullcontext():
                model(batch).mean().backward()
                mmfsdp.clip_grad_norm_(model, 1.0)
                optimizer.step()
                optimizer.zero_grad()

    with (
        pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as caught,
        explain_out_of_memory(step, model, optimizer),
    ):
        train()
    (note,) = caught.value.__notes__
    return note


def notes(rank: int) -> list[str]:
    """Return the notes at each of the places, and one of a step that was rehearsed with another optimizer."""
    net, batch = nn.Sequential(*(Block() for _ in range(4))), torch.randn(ROWS, WIDTH)
    step = advise(CONFIG, net, batch, mesh=RANKS, rank=rank, device_type="cpu", max_norm=1.0)
    found = [note_of(step, copy.deepcopy(net), batch, FullDevice(*full)) for full in PLACES.values()]
    other = mmfsdp.rehearse(CONFIG, net, batch, mesh=RANKS, rank=rank, device_type="cpu", optimizer="sgd-momentum")
    return [*found, note_of(other, net, batch, FullDevice("aten.gelu.default", 3))]


@pytest.mark.exhaustive
def test_the_error_says_where_what_is_held_and_what_to_change() -> None:
    for rank, found in enumerate(run_ranks(notes, RANKS)):
        for place, note in zip(PLACES, found[:-1], strict=True):
            first, forecast, *rest = note.splitlines()
            assert first == f"Rank {rank} of 2 ranks ran out of memory {place}."
            assert re.fullmatch(
                r"The forecast holds .* there, and 6.20 MiB at its peak, in backward of 3.down.", forecast
            )
            assert rest[0] == "Held there, as forecast:"  # what the rank keeps does not differ from it
            assert any("less with the forward of every unit recomputed in backward" in line for line in rest)
        assert "    1.50 MiB of activation of {0..2}.up" in found[0].splitlines()
        assert "    258.50 KiB of gathered of 1" in found[2].splitlines()
        different = found[-1].splitlines()
        assert different[2] == "optimizer state: 517.06 KiB here, 258.50 KiB in the forecast."
        assert different[-1] == "To see what to change, rehearse with mmfsdp.rehearsal.advise()."
