"""Ten families of models in small, written with torch alone: what a rehearsal predicts is compared with real runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["FAMILIES", "Case", "make"]


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, *, causal: bool = False, shrink: int = 1) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.both, self.out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.shrink = nn.Conv1d(dim, dim, shrink, shrink) if shrink > 1 else None

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        if self.shrink is not None:
            memory = self.shrink(memory.transpose(1, 2)).transpose(1, 2)
        parts = [self.query(x), *self.both(memory).chunk(2, -1)]
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(found.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, dim: int, activation: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        self.up, self.down, self.activation = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class Layer(nn.Module):
    """A layer of a transformer, the norm first."""

    def __init__(self, dim: int, heads: int = 4, **attention: Any) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(dim), Attention(dim, heads, **attention)
        self.after, self.mlp = nn.LayerNorm(dim), Mlp(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.after(x))


class PostNormLayer(nn.Module):
    """A layer as BERT's, with dropout."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention, self.norm = Attention(dim, 4), nn.LayerNorm(dim)
        self.mlp, self.after, self.drop = Mlp(dim), nn.LayerNorm(dim), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.drop(self.attention(x)))
        return self.after(x + self.drop(self.mlp(x)))


class Vit(nn.Module):
    def __init__(self, dim: int = 96, depth: int = 2) -> None:
        super().__init__()
        self.patch, self.place = nn.Conv2d(3, dim, 8, 8), nn.Parameter(torch.zeros(1, 64, dim))
        self.layers = nn.ModuleList(Layer(dim) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2) + self.place
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


class WindowLayer(Layer):
    """Attention within windows, every other time shifted, as Swin's."""

    def __init__(self, dim: int, shift: int) -> None:
        super().__init__(dim)
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        batch, side, _, dim = x.shape
        y = torch.roll(self.norm(x), (-self.shift, -self.shift), (1, 2)) if self.shift else self.norm(x)
        windows = y.unflatten(1, (-1, 4)).unflatten(3, (-1, 4)).transpose(2, 3).reshape(-1, 16, dim)
        y = self.attention(windows).reshape(batch, side // 4, side // 4, 4, 4, dim).transpose(2, 3)
        y = y.reshape(x.shape)
        x = x + (torch.roll(y, (self.shift, self.shift), (1, 2)) if self.shift else y)
        return x + self.mlp(self.after(x))


class Swin(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.layers = nn.ModuleList([WindowLayer(dim, 0), WindowLayer(dim, 2)])
        self.merge, self.norm = nn.Linear(4 * dim, 2 * dim, bias=False), nn.LayerNorm(4 * dim)
        self.deeper = nn.ModuleList([WindowLayer(2 * dim, 0), WindowLayer(2 * dim, 2)])
        self.head = nn.Linear(2 * dim, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).permute(0, 2, 3, 1)
        for layer in self.layers:
            x = layer(x)
        x = torch.cat([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], -1)
        x = self.merge(self.norm(x))
        for layer in self.deeper:
            x = layer(x)
        return self.head(x.mean((1, 2)))


class ConvLayer(nn.Module):
    """A block of ConvNeXt."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.spatial = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm, self.mlp, self.scale = nn.LayerNorm(dim), Mlp(dim), nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(self.spatial(x).permute(0, 2, 3, 1)))
        return x + (self.scale * y).permute(0, 3, 1, 2)


class ConvNext(nn.Sequential):
    def __init__(self, dim: int = 32) -> None:
        wide = 2 * dim
        super().__init__(
            nn.Conv2d(3, dim, 4, 4), *(ConvLayer(dim) for _ in range(2)), nn.Conv2d(dim, wide, 2, 2),
            *(ConvLayer(wide) for _ in range(2)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide, 10),
        )  # fmt: skip


class Bottleneck(nn.Module):
    def __init__(self, wide_in: int, wide: int, stride: int) -> None:
        super().__init__()
        narrow = wide // 4
        self.body = nn.Sequential(
            nn.Conv2d(wide_in, narrow, 1, bias=False), nn.BatchNorm2d(narrow), nn.ReLU(inplace=True),
            nn.Conv2d(narrow, narrow, 3, stride, 1, bias=False), nn.BatchNorm2d(narrow), nn.ReLU(inplace=True),
            nn.Conv2d(narrow, wide, 1, bias=False), nn.BatchNorm2d(wide),
        )  # fmt: skip
        self.short = nn.Sequential(nn.Conv2d(wide_in, wide, 1, stride, bias=False), nn.BatchNorm2d(wide))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


class ResNet(nn.Sequential):
    def __init__(self, dim: int = 32) -> None:
        super().__init__(
            nn.Conv2d(3, dim, 7, 2, 3, bias=False), nn.BatchNorm2d(dim), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
            Bottleneck(dim, 4 * dim, 1), Bottleneck(4 * dim, 4 * dim, 1), Bottleneck(4 * dim, 8 * dim, 2),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * dim, 10),
        )  # fmt: skip


class Mae(nn.Module):
    """Encodes the patches that are kept, and decodes all."""

    def __init__(self, dim: int = 96, narrow: int = 64) -> None:
        super().__init__()
        self.patch = nn.Linear(192, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(3))
        self.bridge, self.mask = nn.Linear(dim, narrow), nn.Parameter(torch.zeros(1, 1, narrow))
        self.decoder = nn.ModuleList(Layer(narrow) for _ in range(2))
        self.head = nn.Linear(narrow, 192)

    def forward(self, images: Tensor, order: Tensor) -> Tensor:
        patches = F.unfold(images, 8, stride=8).transpose(1, 2)
        kept = order[:, : order.shape[1] // 4]
        x = self.patch(patches.gather(1, kept[..., None].expand(-1, -1, patches.shape[2])))
        for layer in self.layers:
            x = layer(x)
        x = self.bridge(x)
        rest = self.mask.expand(len(x), order.shape[1] - x.shape[1], -1)
        x = torch.cat([x, rest.to(x.dtype)], 1)
        x = x.gather(1, order.argsort(1)[..., None].expand(-1, -1, x.shape[2]))
        for layer in self.decoder:
            x = layer(x)
        return (self.head(x).float() - patches).square().mean()


class Segformer(nn.Module):
    """Stages at two resolutions, of which a head makes one map."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, dim, 7, 4, 3), nn.Conv2d(dim, 2 * dim, 3, 2, 1)
        self.layers = nn.ModuleList(Layer(dim, 1, shrink=16) for _ in range(2))
        self.deeper = nn.ModuleList(Layer(2 * dim, 2, shrink=4) for _ in range(2))
        self.mix, self.norm = nn.Conv2d(3 * dim, dim, 1, bias=False), nn.BatchNorm2d(dim)
        self.head = nn.Conv2d(dim, 8, 1)

    def forward(self, images: Tensor) -> Tensor:
        maps, x = [], images
        for merge, layers in ((self.first, self.layers), (self.second, self.deeper)):
            x = merge(x)
            sides = x.shape[2:]
            x = x.flatten(2).transpose(1, 2)
            for layer in layers:
                x = layer(x)
            x = x.transpose(1, 2).unflatten(2, sides)
            maps.append(x)
        size = maps[0].shape[2:]
        same = [F.interpolate(item, size, mode="bilinear", align_corners=False) for item in maps]
        logits = self.head(F.relu(self.norm(self.mix(torch.cat(same, 1)))))
        return F.interpolate(logits, images.shape[2:], mode="bilinear", align_corners=False)


class DecoderLayer(Layer):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.between, self.cross = nn.LayerNorm(dim), Attention(dim, 4)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm(x))
        x = x + self.cross(self.between(x), memory)
        return x + self.mlp(self.after(x))


class Detr(nn.Module):
    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 32, 7, 4, 3), nn.BatchNorm2d(32), nn.ReLU(), Bottleneck(32, dim, 2))
        self.encoder = nn.ModuleList(Layer(dim) for _ in range(2))
        self.decoder = nn.ModuleList(DecoderLayer(dim) for _ in range(2))
        self.queries = nn.Embedding(25, dim)
        self.classes, self.boxes = nn.Linear(dim, 9), nn.Linear(dim, 4)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        memory = self.backbone(images).flatten(2).transpose(1, 2)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.queries.weight.expand(len(images), -1, -1).to(memory.dtype)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.classes(x), self.boxes(x).sigmoid()


class RmsNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class LlamaLayer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.after, self.attention = RmsNorm(dim), RmsNorm(dim), Attention(dim, 4, causal=True)
        self.gate, self.up, self.down = (nn.Linear(*pair, bias=False) for pair in ((dim, 256), (dim, 256), (256, dim)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        y = self.after(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Packed(nn.Parameter):
    """Codes of 4 bits, two in a byte, with the scales of 64 each, which are no buffer: as bitsandbytes keeps them."""

    def __new__(cls, data: Tensor) -> Packed:
        return torch.Tensor._make_subclass(cls, data, False)  # as its parameters are made


class Adapted(nn.Module):
    """A linear layer whose weight is frozen and packed, with an adapter of rank 8 that is trained."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.shape = layer.weight.shape
        self.weight = nn.Parameter(
            torch.randint(256, (self.shape.numel() // 2, 1), dtype=torch.uint8), requires_grad=False
        )
        self.scales = torch.rand(self.shape.numel() // 64, 1) / 50
        self.down, self.up = nn.Linear(self.shape[1], 8, bias=False), nn.Linear(8, self.shape[0], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(self.weight, Packed):  # FSDP has gathered a plain one
            self.weight = Packed(self.weight)
        codes = torch.cat([self.weight >> 4, self.weight & 15], 1).view(-1, 64)
        whole = ((codes.float() - 7) * self.scales).view(self.shape)
        return F.linear(x, whole.to(x.dtype)) + self.up(self.down(x))


def _adapted() -> nn.Module:
    """Return a model of words whose layers have adapters, all else frozen."""
    model = Words([LlamaLayer(96) for _ in range(2)], 96, RmsNorm(96)).requires_grad_(False)
    for layer in [*model.layers.modules()]:
        for name, child in [*layer.named_children()]:
            if isinstance(child, nn.Linear):
                setattr(layer, name, Adapted(child))
    return model


class Words(nn.Module):
    """A model of words: an embedding, layers, a norm and a head, which may be tied to the embedding."""

    def __init__(self, layers: list[nn.Module], dim: int, norm: nn.Module, *, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.layers, self.norm = nn.Embedding(1000, dim), nn.ModuleList(layers), norm
        self.head = nn.Linear(dim, 1000, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Case:
    """A family: what makes its model and its batch, and what computes the loss.

    Args:
        model: Makes the model.
        batch: Makes a batch for a number of samples.
        loss: ``(model, batch) -> loss``.
        layer: Classes of the layers that are shard units and that recompute their activations.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    layer: tuple[str, ...]


def _images(count: int) -> Tensor:
    return torch.randn(count, 3, 64, 64)


def _tokens(count: int) -> Tensor:
    return torch.randint(0, 1000, (count, 128))


def _classified(model: nn.Module, images: Tensor) -> Tensor:
    return F.cross_entropy(model(images).float(), torch.zeros(len(images), dtype=torch.long))


def _next_word(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def _same_word(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def _segmented(model: nn.Module, images: Tensor) -> Tensor:
    return F.cross_entropy(model(images).float(), torch.zeros(len(images), 64, 64, dtype=torch.long))


def _detected(model: nn.Module, images: Tensor) -> Tensor:
    classes, boxes = model(images)
    wanted = torch.zeros(classes.shape[:2], dtype=torch.long).flatten()
    return F.cross_entropy(classes.flatten(0, 1).float(), wanted) + (boxes.float() - 0.5).abs().mean()


def _masked(count: int) -> tuple[Tensor, Tensor]:
    return _images(count), torch.rand(count, 64).argsort(1)


FAMILIES: dict[str, Case] = {
    "vit": Case(Vit, _images, _classified, ("Layer",)),
    "swin": Case(Swin, _images, _classified, ("WindowLayer",)),
    "convnext": Case(ConvNext, _images, _classified, ("ConvLayer",)),
    "resnet": Case(ResNet, _images, _classified, ("Bottleneck",)),
    "mae": Case(Mae, _masked, lambda model, batch: model(*batch), ("Layer",)),
    "segformer": Case(Segformer, _images, _segmented, ("Layer",)),
    "detr": Case(Detr, _images, _detected, ("Layer", "DecoderLayer", "Bottleneck")),
    "llama": Case(
        lambda: Words([LlamaLayer(96) for _ in range(2)], 96, RmsNorm(96)), _tokens, _next_word, ("LlamaLayer",)
    ),
    "gpt2": Case(
        lambda: Words([Layer(96, causal=True) for _ in range(2)], 96, nn.LayerNorm(96), tied=True),
        _tokens,
        _next_word,
        ("Layer",),
    ),
    "bert": Case(
        lambda: Words([PostNormLayer(96) for _ in range(2)], 96, nn.LayerNorm(96)),
        _tokens,
        _same_word,
        ("PostNormLayer",),
    ),
    "qlora": Case(_adapted, _tokens, _next_word, ("LlamaLayer",)),
}


def make(family: str | Case) -> nn.Module:
    """Return a family's model, with the same weights each time."""
    case = FAMILIES[family] if isinstance(family, str) else family
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return case.model()
