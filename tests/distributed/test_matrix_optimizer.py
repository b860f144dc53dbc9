"""Muon on shards is Muon in one process: bit by bit from equal gradients, and in training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import mmfsdp
from mmfsdp.errors import OptimizerStepError, RankMismatchError
from mmfsdp.optimizers.functions import MUON, MatrixFunction
from mmfsdp.optimizers.matrix_optimizer import MatrixOptimizer
from mmfsdp.runtime.dtensors import local_part
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.testing import run_ranks

MUON_SETTINGS: dict[str, Any] = {
    "ns_coefficients": (3.4445, -4.7750, 2.0315),
    "ns_steps": 5,
    "eps": 1e-7,
    "adjust_lr_fn": None,
}


class Net(nn.Module):
    """Matrices that are wide, tall, square, and of fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [(16, 24), (24, 7), (7, 7), (7, 2), (2, 40), (40, 16)]
        self.layers = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def muon(model: nn.Module, **settings: Any) -> MatrixOptimizer:
    state = find_sharded_model(model)
    names = {id(param): name for name, param in model.named_parameters()}
    return MatrixOptimizer(
        model.parameters(), MUON, lr=0.02, mesh=state.mesh, names=names, **{**MUON_SETTINGS, **settings}
    )


def set_gradients(model: nn.Module, seed: int) -> None:
    """Give each parameter the same gradient on any number of ranks."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        grad = torch.randn(param.shape, generator=generator)
        if isinstance(param, DTensor):
            part = local_part(grad, param).clone()
            param.grad = DTensor.from_local(
                part, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
            )
        else:
            param.grad = grad


def stepped(rank: int, config: dict[str, Any], settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Step three times with given gradients."""
    model = mmfsdp.shard(Net(), config)
    optimizer = muon(model, **settings)
    for seed in range(3):
        set_gradients(model, seed)
        optimizer.step()
    weights: dict[str, torch.Tensor] = mmfsdp.model_state_dict(model, rank0_only=False)
    return weights


def alone(settings: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
    model = Net()
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02, **(settings or {}))
    for seed in range(3):
        set_gradients(model, seed)
        optimizer.step()
    return model.state_dict()


CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "two": (2, {}),
    "three": (3, {}),
    "four": (4, {}),
    "hybrid": (4, {"sharding": {"strategy": "HYBRID_SHARD", "shard_size": 2}}),
    "replicated": (2, {"sharding": "NO_SHARD"}),
    "whole": (2, {"sharding": {"ignored_parameters": ["**"]}}),
    "some whole": (3, {"sharding": {"ignored_parameters": ["layers.1.*"]}}),
    "offloaded": (2, {"cpu_offload": True}),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_equals_one_process_bit_by_bit(case: str) -> None:
    ranks, config = CONFIGS[case]
    wanted = alone()
    for found in run_ranks(stepped, ranks, config, {}):
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    "settings",
    [
        {"nesterov": False, "momentum": 0.8},
        {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
        {"ns_steps": 3, "eps": 1e-3},
    ],
)
def test_every_setting(settings: dict[str, Any]) -> None:
    wanted = alone(settings)
    for found in run_ranks(stepped, 2, {}, {**settings, "bucket_bytes": 500}):
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name
