"""The example's MMEngine parts: data, model, metric, and a hook that writes each step's loss down."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.dist import all_reduce
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, HOOKS, METRICS, MODELS
from sklearn.datasets import load_digits
from torch.utils.data import Dataset
from vit import VisionTransformer

__all__ = ["Accuracy", "Digits", "DigitsClassifier", "StepLosses", "StopAfter"]


@DATASETS.register_module()
class Digits(Dataset[dict[str, Any]]):
    """The 1,797 handwritten digits of scikit-learn, 8 x 8 pixels; every fifth is for validation."""

    def __init__(self, train: bool) -> None:
        data = load_digits()
        chosen = [index for index in range(len(data.target)) if (index % 5 == 0) != train]
        self.images = torch.tensor(data.images[chosen], dtype=torch.float32).unsqueeze(1) / 16
        self.labels = torch.tensor(data.target[chosen])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"inputs": self.images[index], "labels": self.labels[index]}


@MODELS.register_module()
class DigitsClassifier(BaseModel):
    """`VisionTransformer` as MMEngine calls it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.vit = VisionTransformer(**kwargs)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor, mode: str = "tensor") -> Any:
        logits = self.vit(inputs)
        if mode == "loss":
            return {"loss": F.cross_entropy(logits, labels, label_smoothing=0.1)}
        if mode == "predict":
            return [
                {"prediction": guess, "label": label}
                for guess, label in zip(logits.argmax(dim=1).tolist(), labels.tolist(), strict=True)
            ]
        return logits


@METRICS.register_module()
class Accuracy(BaseMetric):
    """Share of right predictions, in percent, over all ranks."""

    def process(self, data_batch: Any, data_samples: Sequence[dict[str, int]]) -> None:
        self.results.extend(sample["prediction"] == sample["label"] for sample in data_samples)

    def compute_metrics(self, results: list[bool]) -> dict[str, float]:
        return {"accuracy": 100.0 * sum(results) / len(results)}


@HOOKS.register_module()
class StepLosses(Hook):
    """Appends each step's loss, averaged over ranks, to ``losses.jsonl`` in the work directory."""

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        assert outputs is not None
        loss = outputs["loss"].detach().clone()
        all_reduce(loss, "mean")
        if runner.rank == 0:
            with open(Path(runner.work_dir) / "losses.jsonl", "a") as file:
                file.write(json.dumps({"step": runner.iter, "loss": loss.item()}) + "\n")


@HOOKS.register_module()
class StopAfter(Hook):
    """Ends training after some epochs, as a job that runs out of time would; the checkpoint is saved before."""

    priority = "LOWEST"

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def after_train_epoch(self, runner: Any) -> None:
        if runner.epoch + 1 == self.epochs:
            runner.train_loop.stop_training = True
