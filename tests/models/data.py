"""Generated data that can be learnt from, the same in every process, and the metric for it."""

from __future__ import annotations

from typing import Any

import torch
from mmengine.evaluator import BaseMetric
from mmengine.registry import DATASETS, METRICS
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["Boxes", "Images", "Masks", "Scores", "Words"]

NUM_SAMPLES = 48
NUM_CLASSES = 5


class _Samples(Dataset):
    def __init__(self, size: int) -> None:
        self.samples = self.make(torch.Generator().manual_seed(3), size)

    def make(self, generator: torch.Generator, size: int) -> dict[str, Tensor]:
        raise NotImplementedError

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.samples.items()}


@DATASETS.register_module(force=True)
class Images(_Samples):
    """Noise with stripes as wide as the label says; with ``noise``, what MAE masks by."""

    def __init__(self, size: int = 32, patches: int | None = None) -> None:
        self.patches = patches
        super().__init__(size)

    def make(self, generator: torch.Generator, size: int) -> dict[str, Tensor]:
        labels = torch.randint(0, NUM_CLASSES, (NUM_SAMPLES,), generator=generator)
        stripes = torch.sin(torch.arange(size) / (1.0 + labels[:, None]))[:, None, None]
        inputs = 0.3 * torch.randn(NUM_SAMPLES, 3, size, size, generator=generator) + stripes
        if self.patches is None:
            return {"inputs": inputs, "labels": labels}
        return {"inputs": inputs, "noise": torch.rand(NUM_SAMPLES, self.patches, generator=generator)}


@DATASETS.register_module(force=True)
class Masks(_Samples):
    """Quarters of an image, each of a class that sets its brightness."""

    def make(self, generator: torch.Generator, size: int) -> dict[str, Tensor]:
        quarters = torch.randint(0, NUM_CLASSES, (NUM_SAMPLES, 2, 2), generator=generator)
        masks = quarters.repeat_interleave(size // 2, 1).repeat_interleave(size // 2, 2)
        noise = 0.3 * torch.randn(NUM_SAMPLES, 3, size, size, generator=generator)
        return {"inputs": noise + masks[:, None] - 2.0, "masks": masks}


@DATASETS.register_module(force=True)
class Boxes(_Samples):
    """Two bright boxes per image, each of a class, in relative centre and size."""

    def make(self, generator: torch.Generator, size: int) -> dict[str, Tensor]:
        labels = torch.randint(0, NUM_CLASSES, (NUM_SAMPLES, 2), generator=generator)
        centres = 0.25 + 0.5 * torch.rand(NUM_SAMPLES, 2, 2, generator=generator)
        sides = 0.1 + 0.3 * torch.rand(NUM_SAMPLES, 2, 2, generator=generator)
        grid = (torch.arange(size) + 0.5) / size
        near = (grid - centres[..., None]).abs() < sides[..., None] / 2
        shapes = (near[:, :, 0, None, :] & near[:, :, 1, :, None]) * (1.0 + labels[..., None, None])
        inputs = 0.1 * torch.randn(NUM_SAMPLES, 3, size, size, generator=generator) + shapes.amax(1, keepdim=True)
        return {"inputs": inputs, "boxes": torch.cat([centres, sides], 2), "labels": labels}


@DATASETS.register_module(force=True)
class Words(_Samples):
    """Texts that count upwards in steps; with ``masked``, four words of each to guess."""

    def __init__(self, size: int = 16, vocabulary: int = 96, masked: bool = False) -> None:
        self.vocabulary = vocabulary
        self.masked = masked
        super().__init__(size)

    def make(self, generator: torch.Generator, size: int) -> dict[str, Tensor]:
        starts = torch.randint(0, self.vocabulary, (NUM_SAMPLES, 1), generator=generator)
        steps = torch.randint(1, 4, (NUM_SAMPLES, 1), generator=generator)
        tokens = 1 + (starts + steps * torch.arange(size)) % self.vocabulary
        if not self.masked:
            return {"tokens": tokens}
        places = torch.rand(NUM_SAMPLES, size, generator=generator).argsort(1)
        return {"tokens": tokens, "masked": places < 4}


@METRICS.register_module(force=True)
class Scores(BaseMetric):
    """Mean share of right predictions, and mean loss."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += [(float(sample["right"]), float(sample["loss"])) for sample in data_samples]

    def compute_metrics(self, results: list[tuple[float, float]]) -> dict[str, float]:
        right, losses = zip(*results, strict=True)
        return {"accuracy": sum(right) / len(right), "loss": sum(losses) / len(losses), "count": len(right)}
