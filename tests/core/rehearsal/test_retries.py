"""Torch's allocator on a GPU that is too small for its cache: what it gives back, and what a rehearsal says of it."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import mmfsdp
from mmfsdp import errors
from mmfsdp.basics.text import human_bytes, human_range
from mmfsdp.rehearsal import Allocation, Rehearsal, Retries, report
from mmfsdp.rehearsal.allocator.caching import CachingAllocator, DeviceFullError
from mmfsdp.rehearsal.allocator.kept import retries_said
from mmfsdp.rehearsal.allocator.replaying import replayed
from mmfsdp.rehearsal.allocator.retries import retries_of
from mmfsdp.rehearsal.allocator.wrapping import Wrapped, wrapped_units
from mmfsdp.rehearsal.timing.device_names import device_of

MIB, GIB = 1 << 20, 1 << 30


def test_only_segments_that_are_wholly_free_are_given_back() -> None:
    allocator = CachingAllocator(limit=200 * MIB)
    for block in [allocator.allocate(60 * MIB), allocator.allocate(100 * MIB)]:
        allocator.release(block)
    allocator.allocate(65 * MIB)  # cut from the second segment, of which 35 MiB are left
    allocator.allocate(90 * MIB, "gathers")
    assert (allocator.reserved, allocator.retries, allocator.returned) == (190 * MIB, 1, 60 * MIB)
    allocator.allocate(30 * MIB)  # from what is left
    with pytest.raises(DeviceFullError):
        allocator.allocate(20 * MIB)
    assert (allocator.reserved, allocator.retries) == (190 * MIB, 2)


def test_no_more_than_the_limit_is_ever_taken() -> None:
    random, live, limit = Random(2), list[Any](), 400 * MIB
    allocator = CachingAllocator(limit=limit)
    for _ in range(3_000):
        if live and (random.random() < 0.5 or allocator.allocated > 0.7 * limit):
            allocator.release(live.pop(random.randrange(len(live))))
        else:
            size = random.choice([100, 700_000, 3 * MIB, 12 * MIB, 64 * MIB + 5])
            try:
                live.append(allocator.allocate(size, random.choice(["", "gathers"])))
            except DeviceFullError:  # pieces of cut segments are in the way
                assert allocator.reserved > limit - size - 20 * MIB
        assert sum(block.size for block in live) == allocator.allocated <= allocator.reserved <= limit
    assert allocator.retries > 10


def two_streams() -> list[Allocation]:
    """Three activations of 60 MiB, and after them 100 MiB on another stream."""
    activations = [Allocation(60 * MIB, "activation", "", 1 + place, 10) for place in range(3)]
    return [*activations, Allocation(100 * MIB, "reduce buffer", "", 11, 12, stream="reduces")]


@pytest.mark.parametrize(
    ("limit", "retries", "returned"), [(280, 0, 0), (279, 2, 280), (180, 2, 280)], ids=["enough", "less", "least"]
)
def test_streams_take_turns_in_what_is_too_little_for_both(limit: int, retries: int, returned: int) -> None:
    for steps in (3, 4):
        step = replayed(two_streams(), limit=limit * MIB, steps=steps)
        assert (step.retries, step.returned) == (retries, returned * MIB)
        assert step.reserved <= limit * MIB
    with pytest.raises(DeviceFullError):
        replayed(two_streams(), limit=179 * MIB)


def test_what_waits_for_the_gpu_is_free_once_torch_has_waited() -> None:
    first, second = Allocation(60 * MIB, "gathered", "", 1, 5, "gathers"), Allocation(100 * MIB, "activation", "", 6, 9)
    late = [replace(first, end=8), second]
    enough, less = (replayed([first, second], limit=size * MIB, steps=3, late=late) for size in (160, 159))
    assert (enough.retries, less.retries, less.returned) == (0, 2, 160 * MIB)


def test_the_range_covers_what_is_taken_beside_the_allocator() -> None:
    def found(memory: int) -> Retries:
        step = two_streams()
        return retries_of(step, step, [("forward", 1)], memory * MIB, (10 * MIB, 20 * MIB), ())

    assert found(300) == Retries()
    assert found(295) == Retries((0, 2), (0, 280 * MIB), (True, True))
    assert found(285) == Retries((2, 2), (280 * MIB, 280 * MIB), (True, True))
    assert found(195) == Retries((2, 2), (280 * MIB, 280 * MIB), (False, True))
    assert found(180) == Retries(fits=(False, False))
    assert [bool(found(memory)) for memory in (300, 295, 180)] == [False, True, True]


class Block(nn.Module):
    """Makes activations that are much larger than weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4096, 16_384), nn.Linear(16_384, 4096)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def rehearsed(gib: float | None) -> Rehearsal:
    with torch.device("meta"):
        model, batch = nn.Sequential(*(Block() for _ in range(8))), torch.empty(16_384, 4096)
    config = {"wrap": {"kind": "module_class", "classes": "Block"}, "precision": "bf16"}
    device = replace(device_of("h100"), memory=int(gib * GIB)) if gib else None
    return mmfsdp.rehearse(config, model, batch, mesh=2, device_type="cuda", device=device)


def test_a_rehearsal_says_that_a_gpu_is_too_small() -> None:
    large = rehearsed(80)
    assert not large.retries()
    assert large.short_of_memory() == ""
    assert str(large).startswith(f"{large.verdict()}\nPeak of rank 0")
    low, high = (f"{count / GIB:.2f}" for count in large.device_bytes())
    assert large.verdict() == f"{low} to {high} of 80.00 GiB: fits"
    assert large.describe()["retries"]["number"] == {"low": 0, "high": 0}
    small = rehearsed(16)
    assert small.retries().number[0] == 2
    said = small.short_of_memory()
    assert said in str(small).splitlines()
    assert small.verdict().endswith(" of 16.00 GiB: fits, but torch empties its cache in each step")
    assert "cached memory back" in said
    assert "expandable_segments:True takes" in said
    assert said in report(small).replace("&#x27;", "'")
    tiny = rehearsed(large.peak.nbytes / GIB)
    assert tiny.retries().fits == (False, False)
    assert "memory runs out" in tiny.short_of_memory()
    assert tiny.verdict().endswith(": does not fit")


def test_the_memory_may_be_that_of_another_gpu() -> None:
    step = rehearsed(None)
    assert step.describe()["retries"] is None
    assert step.short_of_memory() == ""
    assert step.verdict() == f"{human_range(step.device_bytes())} of each GPU"
    assert step.verdict("79.1GiB").endswith(" of 79.10 GiB: fits")
    assert not step.retries("79.1GiB")
    assert step.retries(step.peak.nbytes).fits == (False, False)
    with pytest.raises(errors.ConfigError, match="How much memory the GPU has is not known"):
        step.retries()
    with pytest.raises(errors.ConfigError, match="has no unit"):
        step.retries("80")
    cpu = mmfsdp.rehearse(None, nn.Linear(8, 8), torch.ones(2, 8), device_type="cpu")
    assert cpu.verdict() == f"{human_bytes(cpu.peak.nbytes)} at the peak"
    assert cpu.retries(1) == Retries()


def test_what_a_run_counts_becomes_a_sentence() -> None:
    assert retries_said(0, 5) == ""
    assert "in 5 steps torch gave cached memory back once, and waited." in retries_said(1, 5)
    assert "in 100 steps torch gave cached memory back 40 times, and waited." in retries_said(40, 100)


def test_wrapping_with_fsdp1_leaves_segments_that_training_finds() -> None:
    # Two parameters of 30 MiB become a flat one of 60, and a shard of 30 in the segment of the first.
    unit = Wrapped((30 * MIB, 30 * MIB), 60 * MIB, 30 * MIB)
    step = [Allocation(30 * MIB, "parameter", "", 0, None), Allocation(20 * MIB, "activation", "", 1, 2)]
    assert replayed(step).reserved == (30 + 20) * MIB
    assert replayed(step, wrapped=[unit]).reserved == (30 + 30 + 60) * MIB
    whole = Wrapped((60 * MIB,), 60 * MIB, 60 * MIB)
    assert replayed(step, wrapped=[whole]).reserved == 2 * 60 * MIB
    assert replayed(step, wrapped=[unit], limit=120 * MIB).retries == 0
    with pytest.raises(DeviceFullError):
        replayed(step, wrapped=[unit], limit=119 * MIB)


def test_units_are_wrapped_as_planned() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)), nn.LayerNorm(64))
    config = {"engine": "fsdp1", "wrap": {"kind": "module_class", "classes": "Linear"}}
    plan = mmfsdp.plan(model, config, 4)
    linear, norm = 64 * 64 * 4, 64 * 4
    assert wrapped_units(plan) == (
        *[Wrapped((linear,), linear, linear // 4)] * 3,
        Wrapped((norm,) * 2, 2 * norm, norm // 2),
    )
    assert sum(unit.shard for unit in wrapped_units(plan)) == plan.param_bytes()
    ignoring = mmfsdp.plan(model, {**config, "sharding": {"ignored_parameters": ["3.*"]}}, 4)
    assert [(unit.flat, unit.shard) for unit in wrapped_units(ignoring)][:2] == [(norm, norm)] * 2
    sent = mmfsdp.plan(nn.Sequential(*(nn.Linear(8192, 8192, bias=False, device="meta") for _ in range(3))), config, 4)
    assert [unit.sent for unit in wrapped_units(sent, synced=True)[:3]] == [(256 * MIB,)] * 3
    assert [unit.sent for unit in wrapped_units(plan, synced=True)] == [(linear,)] * 3 + [(2 * norm,)]
    assert wrapped_units(mmfsdp.plan(model, {**config, "cpu_offload": {"enabled": True}}, 4)) == ()
    assert wrapped_units(mmfsdp.plan(model, {**config, "engine": "fsdp2"}, 4)) == ()


def test_a_small_gpu_gets_less_from_the_allocator_than_a_large_one() -> None:
    step = rehearsed(80)
    low, high = step.reserved()
    assert step.reserved(memory="80GiB") == (low, high)
    less = step.reserved(memory=16 * GIB)
    assert step.peak.nbytes < less[0] < low
    assert less[1] <= high
    assert step.reserved(memory=step.peak.nbytes) == (low, high)  # where memory runs out, this is what was wanted


@pytest.mark.parametrize(("mesh", "strategy"), [(4, "FULL_SHARD"), ((2, 2), "HYBRID_SHARD"), (2, "NO_SHARD")])
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`", "ignore:When using ``NO_SHARD``")
def test_what_wrapping_keeps_is_what_a_step_finds(mesh: Any, strategy: str) -> None:
    model, batch = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)), nn.LayerNorm(64)), torch.empty(2, 64)
    config = {
        "engine": "fsdp1",
        "wrap": {"kind": "module_class", "classes": "Linear"},
        "sharding": {"strategy": strategy, "ignored_parameters": ["2.bias"]},
    }
    step = mmfsdp.rehearse(config, model, batch, mesh=mesh, device_type="cuda")
    assert sum(unit.shard for unit in wrapped_units(step.plan)) == step.static["parameter"]
    assert step.reserved()[0] <= step.reserved()[1]
