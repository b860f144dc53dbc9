"""Families of models with rarer operators, in small: recurrent, generative, sparse, spectral and volumetric ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.distributed.families import Case, DecoderLayer, Layer, Mlp, WindowLayer
from torch import Tensor, nn

__all__ = ["RARER"]


class Recurrent(nn.Module):
    """Three layers of LSTM, whose sequences come first by sample, as one unit."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.embed, self.cells = nn.Embedding(1000, dim), nn.LSTM(dim, dim, 3, batch_first=True)
        self.head = nn.Linear(dim, 1000)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.cells(self.embed(tokens))[0])


class Speech(nn.Module):
    """Convolutions in time, a GRU of both directions, and letters for CTC."""

    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.reduce = nn.Sequential(nn.Conv1d(24, dim, 5, 2, 2), nn.BatchNorm1d(dim), nn.GELU())
        self.cells, self.head = nn.GRU(dim, dim, 2, bidirectional=True, batch_first=True), nn.Linear(2 * dim, 30)

    def forward(self, sound: Tensor) -> Tensor:  # (batch, 24, 64) -> (32, batch, 30)
        x = self.cells(self.reduce(sound).transpose(1, 2))[0]
        return self.head(x).float().log_softmax(-1).transpose(0, 1)


class Up(nn.Sequential):
    """Doubles the sides of a map."""

    def __init__(self, wide_in: int, wide: int) -> None:
        super().__init__(nn.ConvTranspose2d(wide_in, wide, 4, 2, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU(True))


class Down(nn.Sequential):
    """Halves the sides of a map."""

    def __init__(self, wide_in: int, wide: int) -> None:
        super().__init__(nn.Conv2d(wide_in, wide, 4, 2, 1, bias=False), nn.BatchNorm2d(wide), nn.LeakyReLU(0.2, True))


class Gan(nn.Module):
    """A generator of images, and what tells them from real ones."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.make = nn.Sequential(
            nn.ConvTranspose2d(64, 4 * dim, 8, bias=False), nn.BatchNorm2d(4 * dim), nn.ReLU(True),
            Up(4 * dim, 2 * dim), Up(2 * dim, dim), nn.ConvTranspose2d(dim, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.judge = nn.Sequential(
            nn.Conv2d(3, dim, 4, 2, 1), nn.LeakyReLU(0.2, True), Down(dim, 2 * dim), Down(2 * dim, 4 * dim),
            nn.Conv2d(4 * dim, 1, 8),
        )  # fmt: skip

    def forward(self, noise: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        return self.judge(self.make(noise)).flatten(), self.judge(images).flatten()


class Experts(nn.Module):
    """Tokens go to the best two of four experts, each of which takes the first ones up to its capacity."""

    def __init__(self, dim: int, count: int = 4) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(dim), nn.Linear(dim, count, bias=False)
        self.experts = nn.ModuleList(Mlp(dim) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)
        scores = self.gate(rows).float().softmax(-1)
        found = torch.zeros_like(rows)
        for place, expert in enumerate(self.experts):
            weights, taken = scores[:, place].topk(len(rows) // 2)
            made = expert(rows[taken]) * weights[:, None]
            found = found.index_add(0, taken, made.to(found.dtype))
        return x + found.view_as(x)


class ExpertTokens(nn.Module):
    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(1000, dim), nn.Linear(dim, 10)
        self.layers = nn.ModuleList([Layer(dim), Experts(dim), Layer(dim), Experts(dim)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class Bags(nn.Module):
    """Sums of embeddings of what a user has seen, beside numbers, as DLRM's."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(500, dim, mode=mode) for mode in ("sum", "mean", "max"))
        self.dense, self.mlp, self.head = nn.Linear(13, dim), Mlp(4 * dim), nn.Linear(4 * dim, 1)

    def forward(self, numbers: Tensor, seen: Tensor) -> Tensor:
        parts = [self.dense(numbers), *(bag(seen[:, place]) for place, bag in enumerate(self.bags))]
        return self.head(self.mlp(torch.cat([part.to(parts[0].dtype) for part in parts], 1))).flatten()


class Messages(nn.Module):
    """A layer of a graph network: messages along edges are added up at their ends, and their largest is kept."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.message, self.update = Mlp(2 * dim), nn.Linear(5 * dim, dim)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        begins, ends = edges
        sent = self.message(torch.cat([x[begins], x[ends]], 1))
        added = x.new_zeros(len(x), sent.shape[1]).index_add(0, ends, sent)
        spread = ends[:, None].expand_as(sent)
        most = x.new_zeros(len(x), sent.shape[1]).scatter_reduce(0, spread, sent, "amax", include_self=False)
        return x + F.relu(self.update(torch.cat([x, added, most], 1)))


class Graph(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, dim), nn.Linear(dim, 1)
        self.layers = nn.ModuleList(Messages(dim) for _ in range(3))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = self.embed(nodes)
        for layer in self.layers:
            x = layer(x, edges)
        return self.head(x).float().square().mean()


class Spectral(nn.Module):
    """A layer of a Fourier neural operator: the lowest frequencies are multiplied by complex weights."""

    def __init__(self, dim: int, modes: int = 8) -> None:
        super().__init__()
        self.modes, self.short = modes, nn.Conv2d(dim, dim, 1)
        self.weight = nn.Parameter(torch.randn(dim, dim, modes, modes, 2) / dim)

    def forward(self, x: Tensor) -> Tensor:
        waves, size = torch.fft.rfft2(x.float()), self.modes
        weight = torch.view_as_complex(self.weight.float())
        kept = torch.einsum("bixy,ioxy->boxy", waves[:, :, :size, :size], weight)
        whole = torch.zeros_like(waves)
        whole[:, :, :size, :size] = kept
        return F.gelu(self.short(x) + torch.fft.irfft2(whole, s=x.shape[2:]).to(x.dtype))


class Fourier(nn.Sequential):
    def __init__(self, dim: int = 16) -> None:
        super().__init__(nn.Conv2d(3, dim, 1), *(Spectral(dim) for _ in range(3)), nn.Conv2d(dim, 8, 1))


class Volume(nn.Module):
    """A residual block of three dimensions."""

    def __init__(self, wide_in: int, wide: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv3d(wide_in, wide, 3, 2, 1, bias=False), nn.BatchNorm3d(wide), nn.ReLU(inplace=True),
            nn.Conv3d(wide, wide, 3, 1, 1, bias=False), nn.BatchNorm3d(wide),
        )  # fmt: skip
        self.short = nn.Conv3d(wide_in, wide, 1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


class Video(nn.Sequential):
    def __init__(self, dim: int = 16) -> None:
        super().__init__(
            nn.Conv3d(3, dim, 3, (1, 2, 2), 1), Volume(dim, 2 * dim), Volume(2 * dim, 4 * dim),
            nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4 * dim, 10),
        )  # fmt: skip


class Mix(nn.Module):
    """A block of RWKV: a decaying sum over what came before, one step at a time, and a squared ReLU."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.share, self.decay, self.bonus = (nn.Parameter(torch.rand(dim)) for _ in range(3))
        self.key, self.value, self.gate, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = torch.lerp(F.pad(y, (0, 0, 1, -1)), y, self.share)
        key, value, gate = self.key(y).float(), self.value(y).float(), self.gate(y).sigmoid()
        top = bottom = torch.zeros_like(key[:, 0])
        made, decay = [], torch.exp(-torch.exp(self.decay.float()))
        for time in range(x.shape[1]):
            weight, now = torch.exp(key[:, time]), torch.exp(self.bonus + key[:, time])
            made.append((top + now * value[:, time]) / (bottom + now + 1e-4))
            top, bottom = decay * top + weight * value[:, time], decay * bottom + weight
        x = x + self.out(gate * torch.stack(made, 1).to(gate.dtype))
        return x + self.down(F.relu(self.up(self.after(x))).square())


class Rwkv(nn.Module):
    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(1000, dim), nn.ModuleList(Mix(dim) for _ in range(2))
        self.head = nn.Linear(dim, 1000, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :32])
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Whisper(nn.Module):
    """An encoder of spectrograms behind two convolutions, and a decoder of words."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(24, dim, 3, 1, 1), nn.Conv1d(dim, dim, 3, 2, 1)
        self.encoder = nn.ModuleList(Layer(dim) for _ in range(2))
        self.embed, self.decoder = nn.Embedding(1000, dim), nn.ModuleList(DecoderLayer(dim) for _ in range(2))

    def forward(self, sound: Tensor, tokens: Tensor) -> Tensor:
        memory = F.gelu(self.second(F.gelu(self.first(sound)))).transpose(1, 2)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.embed(tokens)
        for layer in self.decoder:
            x = layer(x, memory)
        return x @ self.embed.weight.to(x.dtype).T


class Residual(nn.Module):
    """A block of a diffusion model, which gets the time, too."""

    def __init__(self, wide_in: int, wide: int) -> None:
        super().__init__()
        self.norm, self.first = nn.GroupNorm(8, wide_in), nn.Conv2d(wide_in, wide, 3, 1, 1)
        self.after, self.second = nn.GroupNorm(8, wide), nn.Conv2d(wide, wide, 3, 1, 1)
        self.time, self.short = nn.Linear(64, wide), nn.Conv2d(wide_in, wide, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.first(F.silu(self.norm(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.short(x) + self.second(F.silu(self.after(y)))


class Unet(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.begin, self.time, self.end = nn.Conv2d(3, dim, 3, 1, 1), nn.Linear(64, 64), nn.Conv2d(dim, 3, 3, 1, 1)
        self.downs = nn.ModuleList([Residual(dim, dim), Residual(dim, 2 * dim), Residual(2 * dim, 4 * dim)])
        self.ups = nn.ModuleList([Residual(8 * dim, 2 * dim), Residual(4 * dim, dim), Residual(2 * dim, dim)])
        self.wider = nn.ModuleList(nn.ConvTranspose2d(wide * dim, wide * dim, 2, 2) for wide in (4, 2, 1))
        self.middle = Layer(4 * dim)

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        waves = times[:, None] * torch.exp(-torch.arange(32) / 4)
        time = self.time(torch.cat([waves.sin(), waves.cos()], 1).to(self.time.weight.dtype))
        x, kept = self.begin(images), []
        for block in self.downs:
            x = block(x, time)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, x.shape[2:])
        for block, wider in zip(self.ups, self.wider, strict=True):
            x = block(torch.cat([wider(x), kept.pop()], 1), time)
        return self.end(x)


class MaxVitLayer(nn.Module):
    """A block of MaxViT: an inverted bottleneck, attention within windows, and attention within a grid."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        wide = 4 * dim
        self.body = nn.Sequential(
            nn.BatchNorm2d(dim), nn.Conv2d(dim, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.GELU(),
            nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.GELU(),
        )  # fmt: skip
        self.squeeze, self.excite, self.project = (
            nn.Conv2d(wide, dim, 1),
            nn.Conv2d(dim, wide, 1),
            nn.Conv2d(wide, dim, 1),
        )
        self.window, self.grid = WindowLayer(dim, 0), Layer(dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y = y * self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True)))).sigmoid()
        x = self.window((x + self.project(y)).permute(0, 2, 3, 1))
        batch, side, _, dim = x.shape
        grid = x.reshape(batch, 4, side // 4, 4, side // 4, dim).permute(0, 2, 4, 1, 3, 5)
        found = self.grid(grid.reshape(-1, 16, dim)).view(batch, side // 4, side // 4, 4, 4, dim)
        return found.permute(0, 3, 1, 4, 2, 5).reshape(x.shape).permute(0, 3, 1, 2)


class MaxVit(nn.Sequential):
    def __init__(self, dim: int = 32) -> None:
        super().__init__(
            nn.Conv2d(3, dim, 3, 2, 1), nn.BatchNorm2d(dim), nn.GELU(), nn.Conv2d(dim, dim, 3, 2, 1),
            *(MaxVitLayer(dim) for _ in range(2)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(dim, 10),
        )  # fmt: skip


class ResponseLayer(nn.Module):
    """A block of ConvNeXt V2, with its global response normalization."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.spatial, self.norm = nn.Conv2d(dim, dim, 7, padding=3, groups=dim), nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.gain, self.shift = nn.Parameter(torch.zeros(4 * dim)), nn.Parameter(torch.zeros(4 * dim))

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(self.norm(self.spatial(x).permute(0, 2, 3, 1))))
        norms = torch.linalg.vector_norm(y, dim=(1, 2), keepdim=True)
        y = self.gain * (y * (norms / (norms.mean(-1, keepdim=True) + 1e-6))) + self.shift + y
        return x + self.down(y).permute(0, 3, 1, 2)


class ConvNextV2(nn.Sequential):
    def __init__(self, dim: int = 32) -> None:
        wide = 2 * dim
        super().__init__(
            nn.Conv2d(3, dim, 4, 4), *(ResponseLayer(dim) for _ in range(2)), nn.Conv2d(dim, wide, 2, 2),
            *(ResponseLayer(wide) for _ in range(2)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide, 10),
        )  # fmt: skip


def _images(count: int) -> Tensor:
    return torch.randn(count, 3, 64, 64)


def _tokens(count: int) -> Tensor:
    return torch.randint(0, 1000, (count, 128))


def _edges(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(128 * count, 8), torch.randint(0, 128 * count, (2, 1024 * count))


def _classified(model: nn.Module, images: Tensor) -> Tensor:
    return F.cross_entropy(model(images).float(), torch.zeros(len(images), dtype=torch.long))


def _next_word(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens)[:, :-1].flatten(0, 1).float()
    return F.cross_entropy(logits, tokens[:, 1 : 1 + len(logits) // len(tokens)].flatten())


def _same_word(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(*batch).flatten(0, 1).float(), batch[1].flatten())


def _heard(model: nn.Module, sound: Tensor) -> Tensor:
    letters, lengths = torch.ones(len(sound), 20, dtype=torch.long), torch.full((len(sound),), 32)
    return F.ctc_loss(model(sound), letters, lengths, torch.full((len(sound),), 20))


def _judged(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    made, real = (part.float() for part in model(*batch))
    wanted = torch.ones_like(made)
    return F.binary_cross_entropy_with_logits(made, wanted) + F.binary_cross_entropy_with_logits(real, wanted)


def _clicked(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(*batch).float(), torch.ones(len(batch[0])))


def _segmented(model: nn.Module, images: Tensor) -> Tensor:
    return F.cross_entropy(model(images).float(), torch.zeros(len(images), 64, 64, dtype=torch.long))


def _denoised(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(*batch).float(), batch[0])


RARER: dict[str, Case] = {
    "lstm": Case(Recurrent, _tokens, _next_word, ("LSTM",)),
    "speech": Case(Speech, lambda count: torch.randn(count, 24, 64), _heard, ("GRU",)),
    "gan": Case(Gan, lambda count: (torch.randn(count, 64, 1, 1), _images(count)), _judged, ("Up", "Down")),
    "experts": Case(ExpertTokens, _tokens, _classified, ("Layer", "Experts")),
    "bags": Case(
        Bags,
        lambda count: (torch.randn(64 * count, 13), torch.randint(0, 500, (64 * count, 3, 20))),
        _clicked,
        ("EmbeddingBag", "Mlp"),
    ),
    "graph": Case(Graph, _edges, lambda model, batch: model(*batch), ("Messages",)),
    "fourier": Case(Fourier, _images, _segmented, ("Spectral",)),
    "video": Case(Video, lambda count: torch.randn(count, 3, 8, 32, 32), _classified, ("Volume",)),
    "rwkv": Case(Rwkv, _tokens, _next_word, ("Mix",)),
    "whisper": Case(
        Whisper, lambda count: (torch.randn(count, 24, 256), _tokens(count)), _same_word, ("Layer", "DecoderLayer")
    ),
    "unet": Case(Unet, lambda count: (_images(count), torch.rand(count)), _denoised, ("Residual", "Layer")),
    "maxvit": Case(MaxVit, _images, _classified, ("MaxVitLayer",)),
    "convnextv2": Case(ConvNextV2, _images, _classified, ("ResponseLayer",)),
}
