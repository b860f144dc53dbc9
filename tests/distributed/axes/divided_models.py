"""Models that torch's public tensor parallelism has divided, and what one process makes of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mmfsdp

__all__ = ["MESHES", "batch_of", "divide", "make_llama", "make_mesh", "train_alone", "train_step"]

MESHES = {
    "shard 2, tensor 2": {"shard": 2, "tensor": 2},
    "tensor 4": {"shard": 1, "tensor": 4},
    "replicate 2, tensor 2": {"replicate": 2, "shard": 1, "tensor": 2},
    "shard 4": {"shard": 4},
}
VOCABULARY = 96


def make_llama(*, tied: bool = False) -> nn.Module:
    """Return a small Llama of transformers, the same in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def make_mesh(sizes: dict[str, int]) -> DeviceMesh:
    """Return a mesh with these axes."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def divide(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide a Llama by torch's styles, and tie it again if it was: torch unties in silence."""
    axis = next((name for name in mesh.mesh_dim_names or () if name in ("tensor", "tp")), None)
    if axis is None:
        return
    base: Any = model.model  # type: ignore[union-attr]
    tied = model.lm_head.weight is base.embed_tokens.weight  # type: ignore[union-attr]
    styles: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        styles[f"model.layers.*.{part}"] = ColwiseParallel()
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        styles[f"model.layers.*.{part}"] = RowwiseParallel()
    parallelize_module(model, mesh[axis], styles, src_data_rank=None)
    if tied:
        model.lm_head.weight = base.embed_tokens.weight  # type: ignore[union-attr]


def batch_of(step: int) -> torch.Tensor:
    """Return the tokens of a step for all ranks together: 4 rows."""
    return torch.randint(0, VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(100 + step))


def own_rows(tokens: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    """Return the rows of this rank: ranks of a tensor group share them."""
    if mesh is None:
        return tokens
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    at = dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True))
    parts = sizes.get("replicate", 1) * sizes["shard"]
    return tokens.chunk(parts)[at.get("replicate", 0) * sizes["shard"] + at["shard"]]


def train_step(
    model: nn.Module,
    optimizer: Any,
    step: int,
    mesh: DeviceMesh | None = None,
    seen: dict[str, torch.Tensor] | None = None,
) -> tuple[float, float]:
    """Train a step, and return the loss of all ranks and the norm of the gradients, which are put into ``seen``."""
    tokens = own_rows(batch_of(step), mesh)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    if seen is not None:
        with mmfsdp.full_params(model, with_grads=True, writeback=False):
            seen |= {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    if mesh is None:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    else:
        norm = mmfsdp.clip_grad_norm_(model, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    value = loss.detach().clone()
    if mesh is not None:
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return float(value), float(norm)


def train_alone(steps: int, *, tied: bool = False) -> tuple[list[tuple[float, float]], nn.Module, dict[str, Any]]:
    """Train in one process: losses and norms, the model, and the gradients of the first step by name."""
    model = make_llama(tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = batch_of(0)
    model(input_ids=tokens, labels=tokens).loss.backward()
    grads = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    optimizer.zero_grad()
    return [train_step(model, optimizer, step) for step in range(steps)], model, grads
