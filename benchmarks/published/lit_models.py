"""LitGPT's model with LoRA, as far as its memory depends on it (commit 8641822: ``lit_gpt/lora.py``, ``model.py``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

__all__ = ["LitBlock", "LitDecoder", "LitShape", "lit_loss"]

_CHUNK = 128  # tokens whose logits are computed at a time, and whose loss is


@dataclass(frozen=True)
class LitShape:
    """The sizes of a model in ``lit_gpt/config.py``."""

    dim: int
    layers: int
    heads: int
    vocabulary: int
    hidden: int
    is_llama: bool = True
    """RMSNorm and a gated network; otherwise LayerNorm, GELU and biases."""
    rotary: int = 0
    """Columns of a head that are turned; 0: all."""
    is_parallel: bool = False
    """Whether attention and the feed-forward network read the same input."""
    shares_norm: bool = False
    """Whether they share its norm."""
    head_bias: bool = False
    rank: int = 8
    dropout: float = 0.05


class _Scaled(torch.autograd.Function):
    """A product with a frozen weight as torch 2.1 records it: the other factor is kept, though nothing needs it."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight, x)
        return weight * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        weight, _ = ctx.saved_tensors
        return None, gradient * weight


class LitNorm(nn.Module):
    """RMSNorm in the dtype of its input."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = _Scaled.apply(
            self.weight, x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-5)
        )
        return normed


class LitAttention(nn.Module):
    """Attention whose product for queries, keys and values has adapters of queries and values."""

    def __init__(self, shape: LitShape) -> None:
        super().__init__()
        self.shape, dim = shape, shape.dim
        self.attn = nn.Linear(dim, 3 * dim, bias=not shape.is_llama)
        self.lora_A, self.lora_B = (
            nn.Parameter(torch.empty(2 * shape.rank, dim)),
            nn.Parameter(torch.empty(2 * dim, shape.rank)),
        )
        self.dropout = nn.Dropout(shape.dropout)
        self.proj = nn.Linear(dim, dim, bias=not shape.is_llama)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        batch, rows, dim = x.shape
        heads, size = self.shape.heads, dim // self.shape.heads
        qkv = self._project(x).view(batch, rows, heads, 3, size).permute(0, 2, 3, 1, 4)
        query, key, value = (part.reshape(batch, heads, rows, size) for part in qkv.split((1, 1, 1), dim=2))
        query, key = (_turned(part, cosine, sine) for part in (query, key))
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.proj(found.transpose(1, 2).reshape(batch, rows, dim))

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        made = self.attn(x)
        narrow = F.linear(self.dropout(x), self.lora_A).transpose(-2, -1)
        added = F.conv1d(narrow, self.lora_B.unsqueeze(-1), groups=2).transpose(-2, -1).transpose(0, 1)
        padded = added.new_zeros((*added.shape[:-1], made.shape[-1])).view(-1, made.shape[-1])
        dim = x.shape[-1]
        places = torch.cat((torch.arange(dim), torch.arange(2 * dim, 3 * dim)))
        padded = padded.index_copy(1, places, added.reshape(-1, 2 * dim))
        return made + padded.view((*added.shape[:-1], made.shape[-1])).transpose(0, 1) * 2.0


class LitNetwork(nn.Module):
    """The feed-forward network."""

    def __init__(self, shape: LitShape) -> None:
        super().__init__()
        self.is_gated = shape.is_llama
        self.fc_1 = nn.Linear(shape.dim, shape.hidden, bias=not shape.is_llama)
        if shape.is_llama:
            self.fc_2 = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.proj = nn.Linear(shape.hidden, shape.dim, bias=not shape.is_llama)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(F.silu(self.fc_1(x)) * self.fc_2(x) if self.is_gated else F.gelu(self.fc_1(x)))


class LitBlock(nn.Module):
    """One layer."""

    def __init__(self, shape: LitShape) -> None:
        super().__init__()
        self.shape = shape
        self.norm_1 = _norm(shape)
        self.attn = LitAttention(shape)
        if not shape.shares_norm:
            self.norm_2 = _norm(shape)
        self.mlp = LitNetwork(shape)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        normed = self.norm_1(x)
        attended = self.attn(normed, cosine, sine)
        if self.shape.is_parallel:
            other = normed if self.shape.shares_norm else self.norm_2(x)
            return x + attended + self.mlp(other)
        x = x + attended
        return x + self.mlp(self.norm_2(x))


class LitDecoder(nn.Module):
    """A causal language model whose adapters alone are trained.

    Returns logits of 128 tokens each, in float32: Lightning Fabric casts what a model returns.
    """

    def __init__(self, shape: LitShape, rows: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocabulary, shape.dim)
        self.blocks = nn.ModuleList(LitBlock(shape) for _ in range(shape.layers))
        self.ln_f = _norm(shape)
        self.lm_head = nn.Linear(shape.dim, shape.vocabulary, bias=shape.head_bias)
        columns = shape.rotary or shape.dim // shape.heads
        for name in ("cosine", "sine"):
            self.register_buffer(name, torch.empty(rows, columns, dtype=torch.float16), persistent=False)
        for name, param in self.named_parameters():
            param.requires_grad_("lora_" in name)

    def forward(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x, self.cosine, self.sine)
        logits = [self.lm_head(part) for part in self.ln_f(x).split(_CHUNK, dim=1)]
        return [part.float() for part in logits]


def lit_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the loss as LitGPT computes it: of 128 tokens at a time."""
    logits = model(batch[0])
    targets = batch[1].split(_CHUNK, dim=1)
    losses = [
        F.cross_entropy(part.reshape(-1, part.size(-1)), target.reshape(-1), reduction="none")
        for part, target in zip(logits, targets, strict=True)
    ]
    found = torch.cat(losses).mean()
    found.logits = logits  # type: ignore[attr-defined] # the loop holds them until the next step
    return found


def _norm(shape: LitShape) -> nn.Module:
    return LitNorm(shape.dim) if shape.is_llama else nn.LayerNorm(shape.dim)


def _turned(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Turn the first columns of each head. Products of bfloat16 and float16 are in float32."""
    count = cosine.shape[-1]
    part = x[..., :count]
    halves = torch.cat((-part[..., count // 2 :], part[..., : count // 2]), dim=-1)
    return torch.cat((((part * cosine) + (halves * sine)).type_as(x), x[..., count:]), dim=-1)
