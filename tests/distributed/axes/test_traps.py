"""What makes divided models train wrongly in silence elsewhere is right here, or an error."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.axes.divided_models import divide, make_mesh, train_step
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import mmfsdp
from mmfsdp.errors import PlanError, RankMismatchError, ShardStateError
from mmfsdp.testing import run_ranks

Steps = list[tuple[float, float]]


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


@pytest.mark.exhaustive
def test_compiled_blocks_behind_a_divided_embedding_give_it_its_gradient() -> None:
    model = make_blocks()
    run_ranks(behind_embeddings, 2, gradients(model))


def make_qwen(keys: int = 2) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=96,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=keys,
        head_dim=8,
        use_cache=False,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


def silent_elsewhere(rank: int, truth: Steps) -> None:
    mesh = make_mesh({"shard": 1, "tensor": 2})

    def train(model: nn.Module) -> Steps:
        model = mmfsdp.shard(model, wrap="Qwen3DecoderLayer", mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return [train_step(model, optimizer, step, mesh) for step in range(2)]

    def divided(model: Any, *, norms: bool = True) -> Any:
        divide(model, mesh)
        if norms:
            of_heads = SequenceParallel(sequence_dim=2, use_local_output=True)
            attention = "model.layers.*.self_attn"
            styles = {f"{attention}.q_norm": of_heads, f"{attention}.k_norm": of_heads}
            parallelize_module(model, mesh["tensor"], styles, src_data_rank=None)
        return model

    for mine, other in zip(train(divided(make_qwen())), truth, strict=True):
        assert mine == pytest.approx(other, rel=1e-5)
    with pytest.raises(RankMismatchError, match=r"'model.layers.0.self_attn.[qk]_norm.weight' differs.*of the heads"):
        train(divided(make_qwen(), norms=False))

    with pytest.raises(RuntimeError, match="invalid for input of size") as caught:
        train(divided(make_qwen(keys=1)))
    [note] = caught.value.__notes__
    assert "divides 'model.layers.0.self_attn.k_proj.weight' over 2 ranks, which cuts a head: its heads, 1 in" in note

    model = divided(make_qwen())
    weight = model.lm_head.weight.detach()
    for copy in (weight.clone(), model.model.embed_tokens.weight.detach().full_tensor()):
        model.lm_head.weight = nn.Parameter(copy)
        with pytest.raises(PlanError, match=r"ties 'lm_head.weight' to 'model.embed_tokens.weight', yet.*tie_weights"):
            mmfsdp.plan(model, mesh=mesh)
    model.lm_head.weight = nn.Parameter(weight * 2)  # on purpose
    mmfsdp.plan(model, mesh=mesh)
    model.tie_weights()
    assert mmfsdp.plan(model, mesh=mesh) == mmfsdp.plan(divided(make_qwen()), mesh=mesh)

    for param in model.parameters():
        nn.init.normal_(param, std=0.02)
    with pytest.raises(ShardStateError, match="Of every parameter that 'tensor' divides, the ranks of this axis hold"):
        train(model)


def test_norms_of_heads_cut_heads_ties_and_late_initialisation() -> None:
    model = make_qwen()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run_ranks(silent_elsewhere, 2, [train_step(model, optimizer, step) for step in range(2)])
