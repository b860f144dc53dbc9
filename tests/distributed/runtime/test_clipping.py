"""Clipping by the norm over all ranks, for every kind of gradient, against a single process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.distributed.models import BLOCKS, build
from torch import nn

import mmfsdp
from mmfsdp.runtime.gradients.clipping import global_norm
from mmfsdp.testing import run_ranks

X = torch.arange(8)
CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "sharded": (2, {"wrap": BLOCKS}),
    "hybrid": (4, {"wrap": BLOCKS, "sharding": {"strategy": "HYBRID_SHARD", "shard_size": 2}}),
    "replicated": (2, {"wrap": BLOCKS, "sharding": "NO_SHARD"}),
    "partly whole": (2, {"wrap": BLOCKS, "sharding": {"ignored_parameters": ["blocks.*.down.*"]}}),
    "four, uneven": (4, {"wrap": BLOCKS}),
}
NORMS = [*((norm, None) for norm in (2.0, 1.0, 3.5, 0.5, math.inf)), (2.0, True), (2.0, False), (math.inf, True)]


def clipped(rank: int, config: dict[str, Any]) -> list[float]:
    found = []
    single, model = build(), mmfsdp.shard(build(), config)
    for norm_type, foreach in NORMS:
        for net in (single, model):
            net.zero_grad()
            (net(X).square().mean() * 100).backward()
        want = nn.utils.clip_grad_norm_(single.parameters(), 0.3, norm_type)
        got = mmfsdp.clip_grad_norm_(model, 0.3, norm_type, foreach=foreach)
        found.append(abs(float(got) / float(want) - 1))
        grads = {name: param.grad for name, param in single.named_parameters()}
        for name, param in model.named_parameters():
            whole = param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad
            found.append((whole - grads[name]).abs().max().item())
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_as_in_one_process(name: str) -> None:
    for found in run_ranks(clipped, *CONFIGS[name]):
        assert max(found) < 1e-5


class Mixed(nn.Module):
    """Two dtypes, a unit each."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(5, 3).bfloat16(), nn.Linear(3, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.high(self.low(x.bfloat16()).double())


def of_two_dtypes(rank: int) -> tuple[float, float, str]:
    torch.manual_seed(0)
    single = Mixed()
    model = mmfsdp.shard(Mixed(), {"wrap": {"kind": "module_name", "patterns": ["low", "high"]}})
    mmfsdp.load_model_state_dict(model, single.state_dict())
    for net in (single, model):
        (net(torch.ones(2, 5)) * 7).sum().backward()
    got = mmfsdp.clip_grad_norm_(model.parameters(), 1e-3)
    want = torch.sqrt(sum(param.grad.double().square().sum() for param in single.parameters()))
    return float(got), float(want), str(got.dtype)


def test_two_dtypes() -> None:
    for got, want, dtype in run_ranks(of_two_dtypes, 2):
        assert got == pytest.approx(want, rel=1e-2)
        assert dtype == "torch.float64"


def not_finite(rank: int, value: float, norm_type: float) -> list[Any]:
    """One element of one rank's part is not a number."""
    model = mmfsdp.shard(build(), {"wrap": BLOCKS})
    model(X).sum().backward()
    if rank == 1:
        model.head.weight.grad.to_local()[0] = value
    total = mmfsdp.clip_grad_norm_(model, 1.0, norm_type)
    model.zero_grad()
    model(X).sum().backward()
    if rank == 1:
        model.head.weight.grad.to_local()[0] = value
    with pytest.raises(RuntimeError, match="so they cannot be clipped"):
        mmfsdp.clip_grad_norm_(model, 1.0, norm_type, error_if_nonfinite=True)
    return [str(float(total))]


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_infinite_and_nan(value: float, norm_type: float) -> None:
    assert run_ranks(not_finite, 2, value, norm_type) == [[str(value)]] * 2


def edges(rank: int) -> list[float]:
    model = mmfsdp.shard(build(), {"wrap": BLOCKS})
    nothing = mmfsdp.clip_grad_norm_(model, 1.0)
    model(X).sum().backward()
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(1e16)
    huge = mmfsdp.clip_grad_norm_(iter(model.parameters()), 1.0)
    single = mmfsdp.clip_grad_norm_(next(model.parameters()), math.inf)
    for norm_type in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="must be positive"):
            mmfsdp.clip_grad_norm_(model, 1.0, norm_type)
    return [float(nothing), float(huge), float(single)]


def test_edges() -> None:
    """No gradients; a norm that is large; one parameter."""
    for nothing, huge, single in run_ranks(edges, 2):
        assert nothing == 0
        assert 1e16 < huge < math.inf
        assert 0 < single < 1.01


def test_large_gradients() -> None:
    """torch's own norm of so many numbers in float32, on the CPU with one thread, is wrong by 3e-4."""
    parameters = [nn.Parameter(torch.zeros(size)) for size in ((2**23 + 7,), (300, 1001), (5,))]
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    for norm_type in (2.0, 1.0, math.inf):
        parts = [torch.linalg.vector_norm(parameter.grad.double(), norm_type) for parameter in parameters]
        exact = torch.linalg.vector_norm(torch.stack(parts), norm_type)
        found = global_norm(parameters, norm_type, None)
        assert abs(float(found) / float(exact) - 1) < 2e-6, norm_type
