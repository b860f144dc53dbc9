"""21 families of models in small, of which it is known that sharding changes nothing but rounding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tests.distributed.families import FAMILIES as TEN
from tests.distributed.families import Case, Layer, Mlp, RmsNorm
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

__all__ = ["FAMILIES", "batch_of", "build", "loss_of"]


class Lstm(nn.Module):
    """Words through a recurrent network, with dropout between its layers."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, dim)
        self.recur = nn.LSTM(dim, dim, 2, batch_first=True, dropout=0.2, bidirectional=True)
        self.head = nn.Linear(2 * dim, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.recur(self.embed(tokens))[0])


class Experts(nn.Module):
    """Two of four experts for each token."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(dim), nn.Linear(dim, 4, bias=False)
        self.experts = nn.ModuleList(Mlp(dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        shares, chosen = self.router(y).float().softmax(-1).topk(2, -1)
        found = torch.zeros_like(x)
        for place, expert in enumerate(self.experts):
            share = (shares * (chosen == place)).sum(-1, keepdim=True).to(x.dtype)
            found = found + share * expert(y)
        return x + found


class Moe(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, dim)
        self.layers = nn.ModuleList([Layer(dim, causal=True), Experts(dim), Layer(dim, causal=True), Experts(dim)])
        self.head = nn.Linear(dim, 60)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Dlrm(nn.Module):
    """Bags of embeddings with few rows, beside numbers."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode=mode) for rows, mode in ((3, "sum"), (40, "mean")))
        self.sex = nn.Embedding(3, dim)
        self.below, self.above = Mlp(dim, F.relu), nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, numbers: Tensor, places: Tensor) -> Tensor:
        found = [bag(places) for bag in self.bags] + [self.sex(places[:, 0]), self.below(numbers)]
        vectors = torch.stack([vector.to(found[-1].dtype) for vector in found], 1)
        return self.above((vectors @ vectors.transpose(1, 2)).flatten(1)).squeeze(1)


class DoubleConv(nn.Sequential):
    def __init__(self, wide_in: int, wide: int) -> None:
        super().__init__(nn.Conv2d(wide_in, wide, 3, padding=1), nn.GroupNorm(4, wide), nn.SiLU())


class Unet(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.first, self.second = DoubleConv(3, dim), DoubleConv(dim, 2 * dim)
        self.up, self.last = nn.ConvTranspose2d(2 * dim, dim, 2, 2), DoubleConv(2 * dim, dim)
        self.head = nn.Conv2d(dim, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images)
        y = self.up(self.second(F.avg_pool2d(x, 2)))
        return self.head(self.last(torch.cat([x, y], 1)))


class MixerLayer(nn.Module):
    def __init__(self, tokens: int, dim: int) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tokens, self.channels = Mlp(tokens), Mlp(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.after(x))


class Mixer(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 8, 8)
        self.layers = nn.ModuleList(MixerLayer(16, dim) for _ in range(2))
        self.head = nn.Linear(dim, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class T5Layer(nn.Module):
    """Attention with a bias by distance, and perhaps to a memory."""

    def __init__(self, dim: int, *, crosses: bool) -> None:
        super().__init__()
        self.norm, self.after = RmsNorm(dim), RmsNorm(dim)
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.cross = nn.MultiheadAttention(dim, 4, 0.1, bias=False, batch_first=True) if crosses else None
        self.mlp, self.drop = Mlp(dim, F.relu), nn.Dropout(0.1)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        query, key, value = (
            part(y).unflatten(-1, (4, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=bias.to(query.dtype))
        x = x + self.drop(self.out(found.transpose(1, 2).flatten(2)))
        if self.cross is not None:
            x = x + self.cross(x, memory, memory, need_weights=False)[0]
        return x + self.drop(self.mlp(self.after(x)))


class T5(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.shared = nn.Embedding(64, dim)
        self.distances, self.distances_back = nn.Embedding(9, 4), nn.Embedding(9, 4)
        self.encoder = nn.ModuleList(T5Layer(dim, crosses=False) for _ in range(2))
        self.decoder = nn.ModuleList(T5Layer(dim, crosses=True) for _ in range(2))
        self.head = nn.Linear(dim, 64, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        apart = (places[:, None] - places).clamp(-4, 4) + 4
        memory = self.shared(tokens)
        for layer in self.encoder:
            memory = layer(memory, self.distances(apart).permute(2, 0, 1))
        x = self.shared(tokens.roll(1, 1))
        for layer in self.decoder:
            x = layer(x, self.distances_back(apart).permute(2, 0, 1), memory)
        return self.head(x * x.shape[-1] ** -0.5)


class Albert(nn.Module):
    """One layer that is called four times, a factored embedding, and one of two kinds of segments."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.embed, self.segment, self.widen = nn.Embedding(60, 8), nn.Embedding(60, 8), nn.Linear(8, dim)
        self.layer = Layer(dim)
        self.head = nn.Linear(dim, 60)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.widen(self.embed(tokens) + self.segment(tokens % 2))
        for _ in range(4):
            x = self.layer(x)
        return self.head(x)


class MbConv(nn.Module):
    """An inverted bottleneck with batch norms and squeezing."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        wide = 4 * dim
        self.widen = nn.Sequential(nn.Conv2d(dim, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU())
        self.spatial = nn.Sequential(
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.SiLU()
        )
        self.squeeze = nn.Sequential(nn.Conv2d(wide, 8, 1), nn.SiLU(), nn.Conv2d(8, wide, 1), nn.Sigmoid())
        self.narrow = nn.Sequential(nn.Conv2d(wide, dim, 1, bias=False), nn.BatchNorm2d(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = self.spatial(self.widen(x))
        return x + self.narrow(y * self.squeeze(y.mean((2, 3), keepdim=True)))


class EfficientNet(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, dim, 3, 2, 1, bias=False), nn.BatchNorm2d(dim), nn.SiLU())
        self.layers = nn.Sequential(MbConv(dim), MbConv(dim))
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(dim, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.drop(self.layers(self.stem(images)).mean((2, 3))))


class Adapted(nn.Module):
    """A linear layer that is frozen, and an adapter of low rank that begins at zero."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.base = nn.Linear(dim, dim).requires_grad_(False)
        self.down, self.up = nn.Linear(dim, 4, bias=False), nn.Linear(4, dim, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.base(x) + self.up(self.down(x)))


class Lora(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, dim).requires_grad_(False)
        self.layers = nn.ModuleList(Adapted(dim) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(dim).requires_grad_(False), nn.Linear(dim, 60)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Wav2vec(nn.Module):
    """Sound through convolutions, one of which has normalised weights, and layers."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv1d(1, dim, 10, 5), nn.GroupNorm(dim, dim), nn.GELU(), nn.Conv1d(dim, dim, 4, 4)
        )
        self.place = weight_norm(nn.Conv1d(dim, dim, 5, padding=2, groups=4), dim=2)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(2))
        self.head = nn.Linear(dim, 12)

    def forward(self, sound: Tensor) -> Tensor:
        x = self.stem(sound[:, None])
        x = (x + F.gelu(self.place(x))).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _images(count: int) -> Tensor:
    return torch.empty(count, 3, 32, 32)


def _large_images(count: int) -> Tensor:
    return torch.empty(count, 3, 64, 64)


def _tokens(count: int) -> Tensor:
    return torch.empty(count, 12, dtype=torch.int64)


def _numbers_and_places(count: int) -> tuple[Tensor, Tensor]:
    return torch.empty(count, 16), torch.empty(count, 5, dtype=torch.int64)


def _sound(count: int) -> Tensor:
    return torch.empty(count, 320)


def _masked(count: int) -> tuple[Tensor, Tensor]:
    return _large_images(count), torch.empty(count, 64)


def _next_word(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def _classified(model: nn.Module, images: Tensor) -> Tensor:
    labels = (images.flatten(1)[:, :10].float()).argmax(1)
    return F.cross_entropy(model(images).float(), labels)


def _clicked(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(*batch).float(), (batch[0][:, 0] > 0).float())


def _denoised(model: nn.Module, images: Tensor) -> Tensor:
    return (model(images) - images.roll(1, 3)).float().square().mean()


def _spoken(model: nn.Module, sound: Tensor) -> Tensor:
    logits = model(sound).float()
    return F.cross_entropy(logits.flatten(0, 1), torch.arange(logits.shape[1]).repeat(len(sound)) % 12)


def _restored(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(batch[0], batch[1].argsort(1))


FAMILIES: dict[str, Case] = {
    **TEN,
    "mae": Case(TEN["mae"].model, _masked, _restored, TEN["mae"].layer),
    "lstm": Case(Lstm, _tokens, _next_word, ("LSTM",)),
    "moe": Case(Moe, _tokens, _next_word, ("Layer", "Experts")),
    "dlrm": Case(Dlrm, _numbers_and_places, _clicked, ("EmbeddingBag", "Mlp")),
    "unet": Case(Unet, _images, _denoised, ("DoubleConv",)),
    "mixer": Case(Mixer, _images, _classified, ("MixerLayer",)),
    "t5": Case(T5, _tokens, _next_word, ("T5Layer",)),
    "albert": Case(Albert, _tokens, _next_word, ("Layer",)),
    "efficientnet": Case(EfficientNet, _images, _classified, ("MbConv",)),
    "lora": Case(Lora, _tokens, _next_word, ("Adapted",)),
    "wav2vec": Case(Wav2vec, _sound, _spoken, ("Layer",)),
}


def build(family: str) -> nn.Module:
    """Return a family's model, with the same weights each time."""
    torch.manual_seed(1)
    return FAMILIES[family].model()


def batch_of(family: str, count: int) -> Any:
    """Return tensors with the shapes of a batch."""
    return FAMILIES[family].batch(count)


def loss_of(family: str, model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of a family's model."""
    return FAMILIES[family].loss(model, batch)
