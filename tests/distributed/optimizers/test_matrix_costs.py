"""A step of Muon has the state, messages, bytes and FLOPs that the plan says; twenty steps are those of one process."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.optimizers.test_matrix_optimizer import (
    CONFIGS,
    OPTIMIZER,
    Deep,
    Net,
    difference,
    set_and_step,
    set_gradients,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import mmfsdp
from mmfsdp.optimizers.shards import local_of
from mmfsdp.planning import ShardPlan, estimate_memory
from mmfsdp.testing import run_ranks

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20}


class Sent(TorchDispatchMode):
    """Counts messages, and the bytes that this rank sends to others."""

    def __init__(self) -> None:
        super().__init__()
        self.messages, self.nbytes = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.alltoall_base_.default:
            splits = args[4]
            self.messages += 1
            self.nbytes += (sum(splits) - splits[dist.get_rank()]) * args[1].element_size()
        return func(*args, **(kwargs or {}))


def counted(rank: int, config: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Return what the plan says and what a step does on this rank."""
    model = mmfsdp.shard(Deep(), {"wrap": "Block", "optimizer": OPTIMIZER, **config})
    optimizer = mmfsdp.build_optimizer(model)
    set_and_step(model, [optimizer], range(1))
    set_gradients(model, 1)
    with Sent() as sent, FlopCounterMode(display=False) as flops:
        optimizer.step()
    held = {"muon": 0, "adamw": 0}
    for group in optimizer.param_groups:
        for param in group["params"]:
            tensors = [local_of(value) for name, value in optimizer.state[param].items() if name != "step"]
            held[group["optimizer"]] += sum(tensor.nbytes for tensor in tensors)
    real = {"messages": sent.messages, "sent": sent.nbytes, "flops": flops.get_total_flops(), **held}
    plan = mmfsdp.runtime.find_sharded_model(model).plan
    counts = sum(len(group["params"]) for group in optimizer.param_groups if group["optimizer"] == "adamw")
    assert estimate_memory(plan, rank=rank).optimizer_state == sum(held.values()) + 4 * counts
    return planned(plan), real


def planned(plan: ShardPlan) -> dict[str, float]:
    rows = [row.split() for row in str(plan).splitlines()]
    found = {"messages": 0.0, "sent": 0.0, "flops": 0.0, "muon": 0.0, "adamw": 0.0}
    for row in rows:
        if row[:1] == ["muon"]:
            found["muon"] += float(row[3]) * UNITS[row[4]]
            found["messages"] += 0 if row[5] == "shared" else int(row[5])
            found["sent"] += float(row[6]) * UNITS[row[7]]
            found["flops"] += float(row[8])
        elif row[:1] == ["adamw"]:
            found["adamw"] += float(row[3]) * UNITS[row[4]]
    return found


@pytest.mark.sample("two", "one")
@pytest.mark.parametrize("case", ["one", "two", "four", "hybrid", "replicated"])
def test_the_plan_counts_what_a_step_does(case: str) -> None:
    ranks, config = CONFIGS[case]
    answers = run_ranks(counted, ranks, config)
    plan, _ = answers[0]
    reals = [real for _, real in answers]
    assert plan["flops"] > 0
    assert (plan["messages"] > 0) == (ranks > 1)
    assert {real["messages"] for real in reals} == {plan["messages"]}
    assert sum(real["flops"] for real in reals) == pytest.approx(plan["flops"], rel=0.01)
    for name in ("muon", "adamw"):
        assert max(real[name] for real in reals) == pytest.approx(plan[name], rel=0.01)
    sent = sum(real["sent"] for real in reals) / ranks
    assert sent == pytest.approx(plan["sent"], rel=0.06)  # an element in front of each piece of some dozens
    params = sum(param.numel() for name, param in Deep().named_parameters() if under_muon(name, param))
    if case in ("two", "four"):
        assert sent <= 4 * params * (ranks - 1) / ranks**2 * 1.06


def under_muon(name: str, param: nn.Parameter) -> bool:
    return param.dim() > 1 and "embed" not in name and "head" not in name


def in_float32(matrix: torch.Tensor, state: dict[str, Any], settings: Any) -> torch.Tensor:
    """Muon's iterations in the gradient's own dtype."""
    a, b, c = 3.4445, -4.7750, 2.0315
    found = matrix / matrix.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = found @ found.T
        found = a * found + (b * gram + c * gram @ gram) @ found
    return found


def in_training(rank: int, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train for 20 steps with accumulation and clipping."""
    model = mmfsdp.shard(Net(), config)
    optimizer = mmfsdp.matrix_optimizer(model, in_float32, lr=0.002)
    for step in range(20):
        inputs = torch.randn(24, 16, generator=torch.Generator().manual_seed(step))
        for number, part in enumerate(inputs.chunk(dist.get_world_size())[rank].chunk(2)):
            with mmfsdp.no_sync(model) if number == 0 else nullcontext():
                ((model(part) - part).square().mean() / 2).backward()
        mmfsdp.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    weights: dict[str, torch.Tensor] = mmfsdp.model_state_dict(model, rank0_only=False)
    return weights


@pytest.mark.sample("two")
@pytest.mark.parametrize("case", ["two", "three", "hybrid"])
def test_twenty_steps_in_float32_are_those_of_one_process(case: str) -> None:
    [wanted] = run_ranks(in_training, 1, {})
    ranks, config = CONFIGS[case]
    for found in run_ranks(in_training, ranks, config):
        assert difference(found, wanted) < 1e-5


def twenty(rank: int) -> dict[str, torch.Tensor]:
    model = mmfsdp.shard(Deep(), {"wrap": "Block", "optimizer": OPTIMIZER})
    set_and_step(model, [mmfsdp.build_optimizer(model)], range(20))
    weights: dict[str, torch.Tensor] = mmfsdp.model_state_dict(model, rank0_only=False)
    return weights


@pytest.mark.exhaustive
def test_twenty_steps_of_muon_from_equal_gradients_are_equal_bit_by_bit() -> None:
    [wanted] = run_ranks(twenty, 1)
    for found in run_ranks(twenty, 3):
        for name, value in wanted.items():
            if under_muon(name, value):
                assert torch.equal(found[name], value), name
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)
