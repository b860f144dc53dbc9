"""The models of published runs, as far as their memory and time depend on them: shapes, norms, and what is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

__all__ = ["Block", "Decoder", "HubShape", "Norm", "Shape"]

_KEPT = (
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
)
"""What torchtitan's selective checkpointing kept in 2024, besides reduce-scatters: of CUDA's attention only."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder, and what its project computes differently."""

    dim: int
    layers: int
    heads: int
    vocabulary: int
    hidden: int
    kv_heads: int = 0
    """0: as many as heads."""
    norm: str = "rms"
    """``rms``: composed in float32, as torchtitan and LitGPT write it; ``fused``: one kernel; ``layer``: LayerNorm."""
    is_gated: bool = True
    has_bias: bool = False
    positions: int = 0
    """Rows of a table of learned positions; 0: rotary, as complex float32 numbers."""
    is_tied: bool = False
    packed: bool = False
    """Whether one product makes queries, keys and values."""
    widens: bool = False
    """Whether the model returns logits in float32."""
    repeats: bool = False
    """Whether keys and values are repeated for each head of the query before attention."""
    keeps_products: bool = False
    """Whether a block is recomputed but for attention and every other product, as torchtitan's ``op`` says."""


@dataclass(frozen=True)
class HubShape:
    """The sizes that the ``config.json`` of a model on the hub states."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    hidden: int


class Norm(nn.Module):
    """RMSNorm of its parts."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.size = shape, shape.dim // shape.heads
        self.kv_heads = shape.kv_heads or shape.heads
        rows = self.size * self.kv_heads
        if shape.packed:
            self.qkv = _linear(shape, shape.dim, shape.dim + 2 * rows)
        else:
            self.q, self.k, self.v = (_linear(shape, shape.dim, size) for size in (shape.dim, rows, rows))
        self.out = _linear(shape, shape.dim, shape.dim)

    def forward(self, x: torch.Tensor, angles: torch.Tensor | None) -> torch.Tensor:
        batch, rows, dim = x.shape
        if self.shape.packed:
            sizes = [dim, self.kv_heads * self.size, self.kv_heads * self.size]
            query, key, value = self.qkv(x).split(sizes, dim=-1)
        else:
            query, key, value = self.q(x), self.k(x), self.v(x)
        query = query.view(batch, rows, -1, self.size)
        key, value = (part.view(batch, rows, -1, self.size) for part in (key, value))
        if angles is not None:
            query, key = _rotated(query, angles), _rotated(key, angles)
        if self.shape.repeats and self.kv_heads < self.shape.heads:
            times = self.shape.heads // self.kv_heads
            key, value = (
                part[:, :, :, None, :].expand(-1, -1, -1, times, -1).reshape(batch, rows, -1, self.size)
                for part in (key, value)
            )
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        grouped = key.shape[1] != query.shape[1]
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return self.out(found.transpose(1, 2).reshape(batch, rows, dim))


class Network(nn.Module):
    """The feed-forward network of a block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.is_gated = shape.is_gated
        self.up = _linear(shape, shape.dim, shape.hidden)
        if shape.is_gated:
            self.gate = _linear(shape, shape.dim, shape.hidden)
        self.down = _linear(shape, shape.hidden, shape.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x) if self.is_gated else F.gelu(self.up(x)))


class Block(nn.Module):
    """One layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.keeps_products = shape.keeps_products
        self.norm1, self.norm2 = _norm(shape), _norm(shape)
        self.attn, self.mlp = Attention(shape), Network(shape)

    def forward(self, x: torch.Tensor, angles: torch.Tensor | None) -> torch.Tensor:
        if self.keeps_products:
            found: torch.Tensor = checkpoint(self.compute, x, angles, use_reentrant=False, context_fn=_selecting)
            return found
        return self.compute(x, angles)

    def compute(self, x: torch.Tensor, angles: torch.Tensor | None) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), angles)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A causal language model. Returns logits, (batch, rows, vocabulary)."""

    def __init__(self, shape: Shape, rows: int) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocabulary, shape.dim)
        if shape.positions:
            self.places = nn.Embedding(shape.positions, shape.dim)
        else:
            angles = torch.empty(rows, shape.dim // shape.heads // 2, dtype=torch.complex64)
            self.register_buffer("angles", angles, persistent=False)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.dim, shape.vocabulary, bias=False)
        if shape.is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if self.shape.positions:
            x = x + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        angles = None if self.shape.positions else self.angles
        for block in self.blocks:
            x = block(x, angles)
        logits = self.head(self.norm(x))
        return logits.float() if self.shape.widens else logits


def _norm(shape: Shape) -> nn.Module:
    if shape.norm == "layer":
        return nn.LayerNorm(shape.dim, bias=shape.has_bias)
    return nn.RMSNorm(shape.dim, eps=1e-5) if shape.norm == "fused" else Norm(shape.dim)


def _selecting() -> Any:
    """Return contexts that keep attention and every other product of matrices, and recompute the rest."""
    counts = {False: 0, True: 0}

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func is torch.ops.aten.mm.default:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if func in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _linear(shape: Shape, inputs: int, outputs: int) -> nn.Module:
    return nn.Linear(inputs, outputs, bias=shape.has_bias)


def _rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turn pairs of columns as complex numbers."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles[: x.shape[1], None, :]).flatten(3).type_as(x)
