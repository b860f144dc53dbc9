"""Param groups with shards and whole parameters step with torch's kernels for many tensors, and stay one group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.distributed.models import BLOCKS, batches, build
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import mmfsdp
from mmfsdp.runtime.refusals.guards import is_mixed
from mmfsdp.testing import run_ranks

WHOLE = {"wrap": BLOCKS, "sharding": {"ignored_parameters": ["head.*", "blocks.0.*.bias"]}}
OPTIMIZERS: dict[str, Any] = {
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "SGD foreach": (torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
    "Adagrad foreach": (torch.optim.Adagrad, {"foreach": True}),
    "RMSprop foreach": (torch.optim.RMSprop, {"foreach": True}),
}


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=3)
    for step in range(3):
        for x, y in batches(step, rank, ranks, 1):
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    named = {name: param.detach() for name, param in model.named_parameters()}
    return {name: param.full_tensor() if isinstance(param, DTensor) else param for name, param in named.items()}


def trained(rank: int, name: str) -> tuple[dict[str, torch.Tensor], int, list[str], int]:
    model = mmfsdp.shard(build(), WHOLE)
    make, settings = OPTIMIZERS[name]
    optimizer = make(model.parameters(), lr=0.01, **settings)
    group = optimizer.param_groups[0]
    lengths: list[int] = []
    optimizer.register_step_pre_hook(lambda optimizer, *_: lengths.append(len(optimizer.param_groups)))
    found = steps(model, optimizer, rank, 2)
    assert optimizer.param_groups == [group]
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.01
    kernels = [str(group["foreach"]), str(group.get("fused"))]
    return found, len(optimizer.param_groups), kernels, len(group["params"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_in_one_process(name: str) -> None:
    single = build()
    make, settings = OPTIMIZERS[name]
    optimizer = make(single.parameters(), lr=0.01, **settings)
    expected = steps(single, optimizer, 0, 1)
    for found, groups, kernels, count in run_ranks(trained, 2, name):
        assert (groups, count) == (1, len(list(single.parameters())))
        assert kernels == [str(settings.get("foreach")), str(settings.get("fused"))]
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=key)


class FailsOnceError(Exception):
    pass


class Once(torch.optim.SGD):
    """Fails in its second step, and changes a setting of its groups in each."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        type(self).count += 1
        if type(self).count == 2:
            raise FailsOnceError
        super().step()


def failing(rank: int) -> list[int]:
    model = mmfsdp.shard(build(), WHOLE)
    optimizer = Once(model.parameters(), lr=0.1, foreach=True)
    found = []
    for step in range(3):
        for x, y in batches(step, rank, 2, 1):
            nn.functional.cross_entropy(model(x), y).backward()
        try:
            optimizer.step()
        except FailsOnceError:
            assert len(optimizer.param_groups) > 1
            continue
        found += [len(optimizer.param_groups), optimizer.param_groups[0]["k"]]
    return found


def test_a_step_that_raises_loses_no_parameter() -> None:
    for found in run_ranks(failing, 2):
        assert found == [1, 1, 1, 3]


def with_two_meshes(rank: int) -> bool:
    meshes = [init_device_mesh("cpu", (1,)) for _ in range(2)]
    assert meshes[0] is not meshes[1]
    params = [nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)])) for mesh in meshes]
    return is_mixed(torch.optim.AdamW(params).param_groups[0])


def test_equal_meshes_are_stepped_together() -> None:
    """Each model makes a mesh, and DTensors may come with that of an earlier one from a cache of torch's."""
    assert run_ranks(with_two_meshes, 1) == [False]
