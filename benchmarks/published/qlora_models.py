"""Llamas of transformers 4.37 with adapters of peft on frozen products, as AnswerDotAI/fsdp_qlora trains them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from benchmarks.published.hf_models import Factor, turned
from benchmarks.published.models import HubShape, Norm

__all__ = ["QloraBlock", "QloraDecoder", "QloraShape"]

_RANK, _DROPOUT = 64, 0.1
_POSITIONS = 4096
_PACKED = 4  # weights of 4 bits in an element of bfloat16
_BLOCK, _NESTED = 64, 256  # weights that share a scale, and scales that share one


@dataclass(frozen=True)
class QloraShape(HubShape):
    """The sizes of a Llama, and how its frozen products are stored."""

    is_quantized: bool = False
    """Whether products have weights of 4 bits, in bfloat16 memory; otherwise they are in bfloat16."""


class Unpacked(torch.autograd.Function):
    """A product with a weight of 4 bits, which is unpacked in forward and again in backward, as bitsandbytes does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        ctx.weight, ctx.sizes = weight, (rows, columns)
        return F.linear(x, _unpacked(weight, rows, columns))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return grads[0] @ _unpacked(ctx.weight, *ctx.sizes), None, None, None


class Packed(nn.Module):
    """A product with a frozen weight of 4 bits, whose scales every rank has whole."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.sizes, scales = (outputs, inputs), inputs * outputs // _BLOCK
        self.weight = nn.Parameter(torch.empty(inputs * outputs // _PACKED, 1))
        self.register_buffer("scales", torch.empty(scales, dtype=torch.uint8), persistent=False)
        self.register_buffer("nested", torch.empty(scales // _NESTED), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Unpacked.apply(x, self.weight, *self.sizes)
        return found


class Adapted(nn.Module):
    """A frozen product, to which an adapter in bfloat16 adds."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base, self.dropout = base, nn.Dropout(_DROPOUT)
        self.lora_A, self.lora_B = Factor(inputs, _RANK, bias=False), Factor(_RANK, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base(x) + self.lora_B(self.lora_A(self.dropout(x))) * 0.25
        return found


class Attention(nn.Module):
    """Causal attention with adapters on queries, keys and values; every layer has its table of angles."""

    def __init__(self, shape: QloraShape) -> None:
        super().__init__()
        self.size, rows = shape.dim // shape.heads, shape.dim // shape.heads * shape.kv_heads
        self.repeats = shape.heads // shape.kv_heads
        self.q, self.k, self.v = (_adapted(shape, shape.dim, size) for size in (shape.dim, rows, rows))
        self.out = _product(shape, shape.dim, shape.dim)
        for name in ("cosine", "sine"):
            self.register_buffer(name, torch.empty(_POSITIONS, self.size, dtype=torch.bfloat16), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows, dim = x.shape
        places = torch.arange(rows, device=x.device)[None]
        cosine, sine = (table[:rows][places][:, None] for table in (self.cosine, self.sine))
        query, key, value = (
            part(x).view(batch, rows, -1, self.size).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        query, key = turned(query, cosine, sine), turned(key, cosine, sine)
        if self.repeats > 1:
            key, value = (
                part[:, :, None].expand(-1, -1, self.repeats, -1, -1).reshape(query.shape) for part in (key, value)
            )
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(found.transpose(1, 2).reshape(batch, rows, dim))  # type: ignore[no-any-return]


class QloraBlock(nn.Module):
    """One layer."""

    def __init__(self, shape: QloraShape) -> None:
        super().__init__()
        self.norm_1, self.attn, self.norm_2 = Norm(shape.dim), Attention(shape), Norm(shape.dim)
        self.gate, self.up = (_adapted(shape, shape.dim, shape.hidden) for _ in range(2))
        self.down = _adapted(shape, shape.hidden, shape.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm_1(x))
        normed = self.norm_2(x)
        found: torch.Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return found


class QloraDecoder(nn.Module):
    """A causal language model in bfloat16; adapters alone are trained. Returns the loss, which holds the logits."""

    def __init__(self, shape: QloraShape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.dim)
        self.blocks = nn.ModuleList(QloraBlock(shape) for _ in range(shape.layers))
        self.norm, self.head = Norm(shape.dim), nn.Linear(shape.dim, shape.vocabulary, bias=False)
        for name, param in self.named_parameters():
            param.requires_grad_("lora_" in name)
            param.data = param.data.bfloat16()

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens).requires_grad_()
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        shifted, wanted = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        loss = F.cross_entropy(shifted.flatten(0, 1), wanted.flatten())
        loss.logits = logits  # type: ignore[attr-defined]  # the training loop keeps what the model returns
        return loss


def _product(shape: QloraShape, inputs: int, outputs: int) -> nn.Module:
    return Packed(inputs, outputs) if shape.is_quantized else nn.Linear(inputs, outputs, bias=False)


def _adapted(shape: QloraShape, inputs: int, outputs: int) -> Adapted:
    return Adapted(_product(shape, inputs, outputs), inputs, outputs)


def _unpacked(weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return a weight of two dimensions: what is allocated and read, not the values."""
    return weight.view(-1, 1).expand(-1, _PACKED).reshape(rows, columns)
