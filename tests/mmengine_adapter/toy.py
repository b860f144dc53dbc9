"""A small model, generated data and a runner for them, for the tests of the MMEngine adapter."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.dist import all_reduce
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseDataPreprocessor, BaseModel
from mmengine.registry import DATASETS, HOOKS, METRICS, MODELS
from mmengine.runner import FlexibleRunner
from torch.utils.data import Dataset

from mmfsdp_mmengine.checkpoints.live_content import safe_globals

__all__ = [
    "POLICY",
    "UNSHARDED",
    "Accuracy",
    "Block",
    "History",
    "Scale",
    "ToyData",
    "ToyModel",
    "config",
    "loader",
    "run",
    "runner_of",
    "strategy",
    "train",
]

POLICY = {"type": "ModuleWrapPolicy", "module_classes": ["Block"]}
UNSHARDED = {"type": "SingleDeviceStrategy"}
_runs = itertools.count()


class Block(nn.Module):
    """Attention-free transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Scale(nn.Module):
    """A scalar parameter, which FSDP2 cannot shard."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@MODELS.register_module(force=True)
class ToyPreprocessor(BaseDataPreprocessor):
    """Normalises with buffers, and returns the batch as a dict, list or tuple."""

    def __init__(self, as_type: str = "dict") -> None:
        super().__init__()
        self.as_type = as_type
        self.register_buffer("std", torch.tensor(2.0), persistent=False)

    def forward(self, data: dict, training: bool = False) -> Any:
        data = self.cast_data(data)
        batch = {"inputs": data["inputs"] / self.std, "labels": data["labels"]}
        if self.as_type == "dict":
            return batch
        return {"list": list, "tuple": tuple, "set": set}[self.as_type](batch.values())


@MODELS.register_module(force=True)
class ToyModel(BaseModel):
    """Patch embedding by convolution, blocks, a head; batch norm or a scalar parameter if asked for."""

    def __init__(
        self, width: int = 16, depth: int = 2, batch_norm: bool = False, scale: bool = False, as_type: str = "dict"
    ) -> None:
        super().__init__(data_preprocessor={"type": "ToyPreprocessor", "as_type": as_type})
        self.drop_rates = [rate.item() for rate in torch.linspace(0, 0.1, depth)]  # as drop path does: reads a tensor
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.norm = nn.BatchNorm1d(width) if batch_norm else nn.Identity()
        self.scale = Scale() if scale else nn.Identity()
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 5)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor, mode: str = "tensor") -> Any:
        x = self.norm(self.patch(inputs).flatten(2).mean(2))
        x = self.scale(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if mode == "loss":
            return {"loss": F.cross_entropy(logits, labels)}
        if mode == "predict":
            return [{"label": label, "pred": logit.argmax()} for label, logit in zip(labels, logits, strict=True)]
        return logits


@DATASETS.register_module(force=True)
class ToyData(Dataset):
    """Images whose class shifts their mean, the same in every process."""

    def __init__(self, length: int = 32) -> None:
        generator = torch.Generator().manual_seed(3)
        self.labels = torch.randint(0, 5, (length,), generator=generator)
        noise = torch.randn(length, 3, 8, 8, generator=generator)
        self.images = noise + self.labels.view(-1, 1, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.images[index], "labels": self.labels[index]}


@METRICS.register_module(force=True)
class Accuracy(BaseMetric):
    """Share of right predictions."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += [float(sample["label"] == sample["pred"]) for sample in data_samples]

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        return {"accuracy": sum(results) / len(results), "count": len(results)}


@HOOKS.register_module(force=True)
class KeepsOwnState(Hook):
    """Saves a state dict of its own, and loads it as plain modules do."""

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["own_state_dict"] = nn.Linear(2, 2).state_dict()

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        nn.Linear(2, 2).load_state_dict(checkpoint["own_state_dict"])


@HOOKS.register_module(force=True)
class History(Hook):
    """Keeps the loss over all ranks and the logged gradient norm of every iteration, and validation metrics."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.metrics: list[dict[str, float]] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        loss = outputs["loss"].detach().clone()
        all_reduce(loss, "mean")
        self.losses.append(loss.item())
        if "train/grad_norm" in runner.message_hub.log_scalars:
            self.norms.append(float(runner.message_hub.get_scalar("train/grad_norm").current()))

    def after_val_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        self.metrics.append(dict(metrics or {}))


def loader(batch_size: int, shuffle: bool) -> dict[str, Any]:
    return {
        "batch_size": batch_size,
        "num_workers": 0,
        "dataset": {"type": "ToyData"},
        "sampler": {"type": "DefaultSampler", "shuffle": shuffle},
        "collate_fn": {"type": "default_collate"},
    }


def config(work_dir: str | Path, world_size: int, **changes: Any) -> dict[str, Any]:
    """FlexibleRunner arguments: global batches of 8, AdamW, clipping, accumulation, a schedule, checkpoints."""
    settings: dict[str, Any] = {
        "model": {"type": "ToyModel"},
        "work_dir": str(work_dir),
        "train_dataloader": loader(8 // world_size, shuffle=True),
        "val_dataloader": loader(8 // world_size, shuffle=False),
        "val_evaluator": {"type": "Accuracy"},
        "val_cfg": {},
        "train_cfg": {"by_epoch": True, "max_epochs": 2, "val_interval": 1},
        "optim_wrapper": {
            "optimizer": {"type": "AdamW", "lr": 0.01, "weight_decay": 0.05},
            "clip_grad": {"max_norm": 0.5},
            "accumulative_counts": 2,
        },
        "param_scheduler": [{"type": "LinearLR", "start_factor": 0.5, "by_epoch": False, "end": 3}],
        "default_hooks": {"checkpoint": {"type": "CheckpointHook", "interval": 1}},
        "custom_hooks": [{"type": "History"}],
        "env_cfg": {"dist_cfg": {"backend": "nccl"}},
        "randomness": {"seed": 5},
        "log_level": "WARNING",
        "strategy": strategy(),
    }
    return copy.deepcopy({**settings, **changes})


def runner_of(settings: dict[str, Any], **given: Any) -> FlexibleRunner:
    """A runner with a name of its own, since MMEngine keeps message hubs and loggers by name."""
    return FlexibleRunner(**settings, **given, experiment_name=f"toy{next(_runs)}")


def run(settings: dict[str, Any]) -> History:
    """Train, and return what was logged."""
    runner = runner_of(settings)
    runner.train()
    return next(hook for hook in runner.hooks if isinstance(hook, History))


def train(rank: int, work_dir: Path, world_size: int, changes: dict[str, Any]) -> dict[str, Any]:
    """Train on a rank, and return what was logged."""
    with torch.serialization.safe_globals(safe_globals()):  # for the stock strategy
        history = run(config(work_dir, world_size, **changes))
    return {"losses": history.losses, "norms": history.norms, "metrics": history.metrics}


def strategy(kind: Any = "full", **wrapper: Any) -> dict[str, Any]:
    """Config of a strategy with units of blocks."""
    return {
        "type": "FSDPStrategy",
        "model_wrapper": {"auto_wrap_policy": POLICY, **wrapper},
        "state_dict_cfg": kind,
    }
