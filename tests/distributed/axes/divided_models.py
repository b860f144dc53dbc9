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

__all__ = [
    "MESHES",
    "VOCABULARY",
    "batch_of",
    "divide",
    "make_llama",
    "make_mesh",
    "make_model",
    "make_neox",
    "own_rows",
    "train_alone",
    "train_step",
]

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


def make_neox() -> nn.Module:
    """Return a small GPT-NeoX: one matrix for queries, keys and values, head after head, and blocks side by side."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(1)
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_parallel_residual=True,
        use_cache=False,
    )
    return GPTNeoXForCausalLM(config)


def make_model(kind: str) -> nn.Module:
    """Return a model, the same in every process: ``'llama'``, ``'tied'``, which is one, or ``'neox'``."""
    return make_neox() if kind == "neox" else make_llama(tied=kind == "tied")


def make_mesh(sizes: dict[str, int]) -> DeviceMesh:
    """Return a mesh with these axes."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


_STYLES: dict[str, dict[str, Any]] = {
    "model": {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        **dict.fromkeys((f"layers.*.self_attn.{part}_proj" for part in "qkv"), ColwiseParallel()),
        "layers.*.self_attn.o_proj": RowwiseParallel(),
        **dict.fromkeys((f"layers.*.mlp.{part}_proj" for part in ("gate", "up")), ColwiseParallel()),
        "layers.*.mlp.down_proj": RowwiseParallel(),
    },
    "gpt_neox": {
        "embed_in": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "layers.*.attention.query_key_value": ColwiseParallel(),
        "layers.*.attention.dense": RowwiseParallel(),
        "layers.*.mlp.dense_h_to_4h": ColwiseParallel(),
        "layers.*.mlp.dense_4h_to_h": RowwiseParallel(),
    },
}
"""torch's styles of the modules of each model, by the name of the module that holds them all."""


def divide(model: Any, mesh: DeviceMesh) -> None:
    """Divide a model by torch's styles, and tie it again if it was: torch unties in silence."""
    axis = next((name for name in mesh.mesh_dim_names or () if name in ("tensor", "tp")), None)
    if axis is None:
        return
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    base = model.base_model_prefix
    styles = {f"{base}.{name}": style for name, style in _STYLES[base].items()}
    styles["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh[axis], styles, src_data_rank=None)
    if tied:
        model.lm_head.weight = model.get_input_embeddings().weight


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


def train_alone(
    steps: int, kind: str = "llama"
) -> tuple[list[tuple[float, float]], nn.Module, dict[str, torch.Tensor]]:
    """Train in one process: losses and norms, the model, and the gradients of the first step by name."""
    model = make_model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = batch_of(0)
    model(input_ids=tokens, labels=tokens).loss.backward()
    grads = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    optimizer.zero_grad()
    return [train_step(model, optimizer, step) for step in range(steps)], model, grads
