"""What makes divided models train wrongly in silence elsewhere is right here, or an error."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed.axes.divided_models import make_mesh
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mmfsdp
from mmfsdp.testing import run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def make_blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 8), Block(), Block(), nn.Linear(8, 20))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    tokens = torch.arange(12).reshape(2, 6)
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    whole = mmfsdp.full_params(model, with_grads=True, writeback=False) if dist.is_initialized() else nullcontext()
    with whole:
        return {name.replace("_orig_mod.", ""): param.grad.clone() for name, param in model.named_parameters()}


def behind_embeddings(rank: int, truth: dict[str, torch.Tensor]) -> None:
    mesh = make_mesh({"shard": 1, "tensor": 2})
    styles: dict[str, Any] = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "*.up": ColwiseParallel(),
        "*.down": RowwiseParallel(),
    }
    backend = "aot_eager"

    def check(before: Callable[[Any], Any] = str, after: Callable[[Any], Any] = str, **settings: Any) -> None:
        model = make_blocks()
        parallelize_module(model, mesh["tensor"], styles, src_data_rank=None)
        before(model)
        model = mmfsdp.shard(model, wrap="Block", mesh=mesh, **settings)
        after(model)
        torch.testing.assert_close(gradients(model), truth, rtol=1e-5, atol=1e-6)

    def wrap_first(model: Any) -> None:
        model[1] = torch.compile(model[1], backend=backend)

    check(compile={"backend": backend})
    check(before=wrap_first)
    check(after=lambda model: model[1].compile(backend=backend))


def test_compiled_blocks_behind_a_divided_embedding_give_it_its_gradient() -> None:
    model = make_blocks()
    run_ranks(behind_embeddings, 2, gradients(model))
