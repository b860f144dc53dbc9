"""Decoders of transformers 4.45 and 4.48 with adapters of peft, as far as their memory depends on them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.published.models import HubShape, Norm

__all__ = ["Factor", "HfBlock", "HfDecoder", "HfShape", "turned"]


@dataclass(frozen=True)
class HfShape(HubShape):
    """The sizes of a model, and what its class and its version of transformers compute."""

    is_llama: bool = True
    """RMSNorm, rotary positions and a gated network; otherwise as GPTBigCode: LayerNorm, GELU, dropout and biases."""
    positions: int = 0
    """Rows of a table of learned positions; 0: rotary."""
    is_tied: bool = False
    is_scaled: bool = False
    """Whether embeddings, residuals and logits are multiplied by constants, as Granite's."""
    widens: str = "loss"
    """Where logits become float32: in the ``model``, which returns them so, in the ``loss``, or nowhere."""
    rank: int = 0
    """Of the adapters of all four products of attention, in float32; 0: none, and every parameter is trained."""


class Factor(nn.Linear):
    """One of the two matrices of an adapter, which FSDP wraps alone."""


class Adapted(nn.Module):
    """A frozen product, to which an adapter adds."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False)
        self.dropout = nn.Dropout(0.1)
        self.lora_A, self.lora_B = Factor(inputs, rank, bias=False), Factor(rank, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.base(x)
        dtype = found.dtype
        x = x.float()
        found = found + self.lora_B(self.lora_A(self.dropout(x))) * 1.0
        return found.to(dtype)


class Attention(nn.Module):
    """Causal attention by the package flash-attn, which keeps what torch's flash attention keeps."""

    def __init__(self, shape: HfShape) -> None:
        super().__init__()
        self.shape, self.size = shape, shape.dim // shape.heads
        rows = self.size * shape.kv_heads
        if shape.is_llama:
            self.q, self.k, self.v = (_product(shape, shape.dim, size) for size in (shape.dim, rows, rows))
            self.out = _product(shape, shape.dim, shape.dim)
        else:
            self.qkv, self.out = nn.Linear(shape.dim, shape.dim + 2 * rows), nn.Linear(shape.dim, shape.dim)

    def forward(
        self, x: torch.Tensor, cosine: torch.Tensor | None, sine: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output, and keys and values if they are cached: views of a product that queries are part of."""
        batch, rows, dim = x.shape
        cached, dropout = None, 0.0
        if self.shape.is_llama:
            query, key, value = self._heads(self.q(x)), self._heads(self.k(x)), self._heads(self.v(x))
        else:
            first, cached = self.qkv(x).split([dim, 2 * self.size * self.shape.kv_heads], dim=2)
            query, key, value = (self._heads(part) for part in (first, *cached.chunk(2, dim=2)))
            dropout = 0.1
        if cosine is not None and sine is not None:
            query, key = turned(query, cosine, sine), turned(key, cosine, sine)
        grouped = key.shape[1] != query.shape[1]
        found = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True, enable_gqa=grouped)
        return F.dropout(self.out(found.transpose(1, 2).reshape(batch, rows, dim)), dropout), cached

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], -1, self.size).transpose(1, 2)


class Network(nn.Module):
    """The feed-forward network of a block."""

    def __init__(self, shape: HfShape) -> None:
        super().__init__()
        self.is_gated = shape.is_llama
        self.up = nn.Linear(shape.dim, shape.hidden, bias=not shape.is_llama)
        if self.is_gated:
            self.gate = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.dim, bias=not shape.is_llama)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_gated:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        return F.dropout(self.down(F.gelu(self.up(x), approximate="tanh")), 0.1)


class HfBlock(nn.Module):
    """One layer."""

    def __init__(self, shape: HfShape) -> None:
        super().__init__()
        self.scale = 0.22 if shape.is_scaled else None
        self.norm_1, self.attn = _norm(shape), Attention(shape)
        self.norm_2, self.mlp = _norm(shape), Network(shape)

    def forward(
        self, x: torch.Tensor, cosine: torch.Tensor | None, sine: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        attended, cached = self.attn(self.norm_1(x), cosine, sine)
        x = x + self._scaled(attended)
        return x + self._scaled(self.mlp(self.norm_2(x))), cached

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.scale is None else x * self.scale


class HfDecoder(nn.Module):
    """A causal language model in bfloat16, whose adapters alone are trained if it has any. Returns the loss.

    Blocks are recomputed by torch's reentrant checkpoint, as ``gradient_checkpointing=True`` asks for by itself.
    """

    def __init__(self, shape: HfShape, rows: int) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocabulary, shape.dim)
        if shape.positions:
            self.places = nn.Embedding(shape.positions, shape.dim)
        self.blocks = nn.ModuleList(HfBlock(shape) for _ in range(shape.layers))
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.dim, shape.vocabulary, bias=False)
        if shape.is_tied:
            self.head.weight = self.embed.weight
        for name, param in self.named_parameters():
            param.requires_grad_("lora_" in name or not shape.rank)
            if "lora_" not in name:
                param.data = param.data.bfloat16()

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        caches: list[torch.Tensor | None] = []  # GPTBigCode's are part of what it returns
        hidden = self._hidden(tokens, caches)
        logits = self.head(hidden)
        if self.shape.is_scaled:
            logits = logits / 9.0
        if self.shape.widens == "model":
            logits = logits.float()
        return self._loss(logits, labels)  # while the caller holds the logits and what they were made of

    def _hidden(self, tokens: torch.Tensor, caches: list[torch.Tensor | None]) -> torch.Tensor:
        x = self.embed(tokens)
        if self.shape.rank:
            x.requires_grad_()
        if self.shape.is_scaled:
            x = x * 12.0
        cosine = sine = None
        if self.shape.positions:
            x = F.dropout(x + self.places(torch.arange(tokens.shape[1], device=tokens.device)), 0.1)
        else:
            size = self.shape.dim // self.shape.heads
            angles = torch.empty(1, 1, tokens.shape[1], size, device=tokens.device)
            cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:  # each in a region of recomputation, around what shards it
            x, cached = checkpoint(block, x, cosine, sine, use_reentrant=True)
            caches.append(cached)
        return self.norm(x)

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.shape.widens == "loss":
            logits = logits.float()
        shifted = logits[..., :-1, :].contiguous()
        wanted = labels[..., 1:].contiguous()
        return F.cross_entropy(shifted.view(-1, self.shape.vocabulary), wanted.view(-1))


def _norm(shape: HfShape) -> nn.Module:
    return Norm(shape.dim) if shape.is_llama else nn.LayerNorm(shape.dim)


def _product(shape: HfShape, inputs: int, outputs: int) -> nn.Module:
    return Adapted(inputs, outputs, shape.rank) if shape.rank else nn.Linear(inputs, outputs, bias=False)


def turned(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Turn columns with those half a head away."""
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x * cosine + torch.cat((-second, first), dim=-1) * sine
