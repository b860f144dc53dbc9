"""A project as users have it: a model, data and a hook that keeps the losses. Any release of MMEngine can import it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from mmengine.dist import all_reduce, get_rank
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, HOOKS, MODELS
from torch import nn
from torch.utils.data import Dataset


@MODELS.register_module()
class TinyModel(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.fc = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, inputs, labels, mode="tensor"):
        self.norm.eval()  # statistics of a batch would depend on the number of ranks
        scores = self.fc(self.norm(inputs))
        return {"loss": nn.functional.cross_entropy(scores, labels)} if mode == "loss" else scores


@DATASETS.register_module()
class TinyData(Dataset):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(16, 6, generator=generator)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index):
        return {"inputs": self.inputs[index], "labels": index % 3}


@HOOKS.register_module()
class KeepLosses(Hook):
    """Writes the loss over all ranks of every iteration to losses.json."""

    def __init__(self) -> None:
        self.losses = {}

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        loss = outputs["loss"].detach().clone()
        all_reduce(loss, "mean")
        self.losses[runner.iter] = loss.item()

    def after_train(self, runner) -> None:
        if get_rank() == 0:
            Path(runner.work_dir, "losses.json").write_text(json.dumps(self.losses))
