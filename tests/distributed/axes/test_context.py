"""Ranks that share a batch and divide its sequences shard parameters, and average gradients, as ranks of data do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.distributed.axes.divided_models import VOCABULARY, batch_of, divide, make_llama, make_mesh, take_step
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import mmfsdp
from mmfsdp.runtime import find_sharded_model
from mmfsdp.testing import run_ranks

MESHES = {
    "shard 2, context 2": {"shard": 2, "context": 2},
    "replicate 2, context 2": {"replicate": 2, "shard": 1, "context": 2},
    "context 2, tensor 2": {"shard": 1, "context": 2, "tensor": 2},
}
CONFIG = {"wrap": {"kind": "module_class", "classes": "LlamaDecoderLayer"}}


class Gathered(torch.autograd.Function):
    """The parts of a sequence of all ranks of a group, along dimension 2."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        whole = grads[0].contiguous()
        dist.all_reduce(whole, group=ctx.group)
        return whole.chunk(dist.get_world_size(ctx.group), 2)[dist.get_rank(ctx.group)], None


def use_context(model: Any, group: dist.ProcessGroup) -> None:
    """Have attention see the keys and values of all ranks of a group."""
    from transformers import AttentionInterface

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> tuple[torch.Tensor, None]:
        key, value = Gathered.apply(key, group), Gathered.apply(value, group)
        first = dist.get_rank(group) * query.shape[2]
        seen = torch.arange(key.shape[2]) <= torch.arange(first, first + query.shape[2])[:, None]
        out = F.scaled_dot_product_attention(query, key, value, seen)
        return out.transpose(1, 2), None

    AttentionInterface.register("context", attention)
    model.set_attn_implementation("context")


def loss_of(model: Any, tokens: torch.Tensor, labels: torch.Tensor, **settings: Any) -> torch.Tensor:
    logits = model(input_ids=tokens, **settings).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train_step(model: Any, optimizer: Any, step: int, mesh: DeviceMesh | None) -> tuple[float, float]:
    tokens = batch_of(step)
    labels = tokens.roll(-1, 1)
    if mesh is None:
        loss = loss_of(model, tokens, labels)
    else:
        ranks, at = mmfsdp.data_parallel_size(mesh), mmfsdp.data_parallel_rank(mesh)
        group = mesh["context"].get_group()
        position = torch.arange(tokens.shape[1])[None].chunk(dist.get_world_size(group), 1)[dist.get_rank(group)]
        own = [rows.chunk(ranks)[at][:, position[0]] for rows in (tokens, labels)]
        loss = loss_of(model, *own, position_ids=position)
    loss.backward()
    return take_step(model, optimizer, loss, mesh)


def build(name: str) -> tuple[DeviceMesh, nn.Module, torch.optim.Optimizer]:
    mesh = make_mesh(MESHES[name])
    model = make_llama()
    divide(model, mesh)
    use_context(model, mesh["context"].get_group())
    model = mmfsdp.shard(model, CONFIG, mesh)
    return mesh, model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(rank: int, names: list[str], folder: str, truth: list[tuple[float, float]]) -> None:
    for name in names:
        mesh, model, optimizer = build(name)
        plan = find_sharded_model(model).plan
        held = sum(param.to_local().nbytes for param in model.parameters())
        assert held == plan.param_bytes(rank)
        assert mmfsdp.data_parallel_size(model) * 2 == 4 // plan.mesh.tensor
        found = [train_step(model, optimizer, step, mesh) for step in range(3)]
        mmfsdp.save_checkpoint(f"{folder}/{name}", model, optimizer, kind="local")
        _, again, other = build(name)
        mmfsdp.load_checkpoint(f"{folder}/{name}", again, other)
        found += [train_step(again, other, step, mesh) for step in range(3, 5)]
        for mine, theirs in zip(found, truth, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5), (name, found, truth)


@pytest.mark.sample("some")
@pytest.mark.parametrize("names", [[*MESHES][:1], [*MESHES][1:]], ids=["some", "others"])
def test_sequences_divided_over_ranks(names: list[str], tmp_path: Path) -> None:
    model = make_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    truth = [train_step(model, optimizer, step, None) for step in range(5)]
    run_ranks(train, 4, names, str(tmp_path), truth)


def test_a_plan_of_sequences_divided_over_ranks() -> None:
    plan = mmfsdp.plan(nn.Linear(16, VOCABULARY), mesh={"replicate": 2, "shard": 4, "context": 2})
    assert str(plan.mesh) == "2 x 4 x 2 ranks (replicate x shard x context; batches over replicate x shard)"
    assert plan.param_bytes(0) == mmfsdp.plan(nn.Linear(16, VOCABULARY), mesh=8).param_bytes(0)
    assert "mean over replicate x shard x context" in plan.params_table()
