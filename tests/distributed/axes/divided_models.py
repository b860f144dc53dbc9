"""Models that torch's public tensor parallelism has divided, and what one process makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mmfsdp
from mmfsdp.checkpoint import convert
from mmfsdp.testing import single_rank

__all__ = [
    "KINDS",
    "MESHES",
    "VOCABULARY",
    "Steps",
    "batch_of",
    "check_files",
    "divide",
    "make_llama",
    "make_mesh",
    "make_model",
    "make_neox",
    "make_small",
    "near",
    "own_rows",
    "resume",
    "take_step",
    "train_alone",
    "train_and_save",
    "train_step",
]

KINDS = {"sharded": "d", "local": "l", "full": "pth"}
"""Kinds of checkpoints, and how the names of theirs end."""
Steps = list[tuple[float, float]]
"""The loss and the norm of the gradients of each step."""

MESHES = {
    "shard 2, tensor 2": {"shard": 2, "tensor": 2},
    "tensor 4": {"shard": 1, "tensor": 4},
    "replicate 2, tensor 2": {"replicate": 2, "shard": 1, "tensor": 2},
    "shard 4": {"shard": 4},
}
VOCABULARY = 96


def make_small(family: str, **own: Any) -> Any:
    """Return a small causal model of a family of transformers, the same in every process."""
    import transformers

    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
        **own,
    )
    return getattr(transformers, f"{family}ForCausalLM")(config)


def make_llama(*, tied: bool = False) -> nn.Module:
    """Return a small Llama of transformers, the same in every process."""
    model: nn.Module = make_small("Llama", num_key_value_heads=4, tie_word_embeddings=tied)
    return model


def make_neox() -> nn.Module:
    """Return a small GPT-NeoX: one matrix for queries, keys and values, head after head, and blocks side by side."""
    model: nn.Module = make_small("GPTNeoX", use_parallel_residual=True)
    return model


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
    return take_step(model, optimizer, loss, mesh)


def take_step(model: nn.Module, optimizer: Any, loss: torch.Tensor, mesh: DeviceMesh | None) -> tuple[float, float]:
    """Clip and step after a backward, and return the loss of all ranks and the norm of the gradients."""
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


def near(found: Steps, truth: Steps, within: float = 1e-5) -> None:
    """Check losses and norms."""
    for mine, other in zip(found, truth, strict=True):
        assert mine == pytest.approx(other, rel=within, abs=within), (found, truth)


def train_and_save(
    built: tuple[DeviceMesh, nn.Module, torch.optim.Optimizer], path: str, truth: Steps, grads: dict[str, torch.Tensor]
) -> None:
    """Train 5 steps as one process did, and save every kind of checkpoint."""
    mesh, model, optimizer = built
    near([train_step(model, optimizer, 0, mesh, seen := {})], truth[:1])
    for fqn, grad in grads.items():
        torch.testing.assert_close(seen[fqn], grad, rtol=1e-5, atol=1e-5)
    near([train_step(model, optimizer, step, mesh) for step in range(1, 5)], truth[1:5])
    for kind, suffix in KINDS.items():
        mmfsdp.save_checkpoint(f"{path}.{suffix}", model, optimizer, kind=kind, blocking=kind != "local").result()
    mmfsdp.save_checkpoint(f"{path}.safetensors", model, kind="safetensors")


def resume(
    built: tuple[DeviceMesh, nn.Module, torch.optim.Optimizer], path: str, kind: str, truth: Steps, within: float = 1e-5
) -> None:
    """Load a checkpoint of `train_and_save`, and train 5 steps more."""
    mesh, model, optimizer = built
    mmfsdp.load_checkpoint(f"{path}.{KINDS[kind]}", model, optimizer)
    near([train_step(model, optimizer, step, mesh) for step in range(5, 10)], truth[5:], within)


def check_files(path: Path) -> dict[str, torch.Tensor]:
    """Check that what `train_and_save` wrote holds the same weights to the last bit, and return them by name."""
    found: dict[str, torch.Tensor] = torch.load(f"{path}.pth", weights_only=True)["state_dict"]
    live = load_file(f"{path}.safetensors")
    assert live.keys() <= found.keys()
    assert all(torch.equal(value, found[fqn]) for fqn, value in live.items())
    for kind, suffix in KINDS.items():
        convert(f"{path}.{suffix}", target := f"{path}-{kind}.safetensors")
        for fqn, value in load_file(target).items():
            assert torch.equal(value, found[fqn]), (path, kind, fqn)
    content = {"state_dict": {fqn: torch.zeros_like(value) for fqn, value in found.items()}}
    with single_rank():
        dcp.load(content, checkpoint_id=f"{path}.d")
    assert all(torch.equal(value, found[fqn]) for fqn, value in content["state_dict"].items())
    return found


def train_alone(steps: int, model: nn.Module | str = "llama") -> tuple[Steps, nn.Module, dict[str, torch.Tensor]]:
    """Train in one process: losses and norms, the model, and the gradients of the first step by name."""
    model = make_model(model) if isinstance(model, str) else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = batch_of(0)
    model(input_ids=tokens, labels=tokens).loss.backward()
    grads = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    optimizer.zero_grad()
    return [train_step(model, optimizer, step) for step in range(steps)], model, grads
