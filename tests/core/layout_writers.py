"""Distributed checkpoints as other projects lay them out, made by torch's own functions."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

__all__ = ["like_composer", "like_the_tutorial", "like_torchtitan"]


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.wo(self.wq(x).relu())


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = Attention(), torch.nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.attention(x))


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.add_module("tok_embeddings", torch.nn.Embedding(11, 8))
    model.add_module("layers", torch.nn.Sequential(*(Layer() for _ in range(12))))
    model.add_module("output", torch.nn.Linear(8, 11))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        model(torch.arange(11)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model, optimizer, scheduler


def saved(content: dict[str, Any], directory: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is one process
        dcp.save(content, checkpoint_id=directory, no_dist=True)
    return directory


def like_torchtitan(directory: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Save as torchtitan's CheckpointManager: the weights flat, the rest beside them, the optimizer flattened."""
    model, optimizer, scheduler = trained()
    weights = get_model_state_dict(model)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    content = {
        **weights,
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        "lr_scheduler": scheduler.state_dict(),
        "dataloader": {"dp_rank_0": b"\x80\x04state", "world_size": 1},
        "train_state": {"step": torch.tensor(3), "ntokens_seen": torch.tensor(99)},
    }
    return saved(content, directory), weights


def like_the_tutorial(directory: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Save as torch's recipe for distributed checkpoints: one Stateful that holds both."""
    model, optimizer, _ = trained()
    weights = get_model_state_dict(model)
    return saved({"app": {"model": weights, "optim": get_optimizer_state_dict(model, optimizer)}}, directory), weights


def like_composer(directory: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Save as Composer 0.32 saves in shards: its state, with optimizers by class, beside random number generators."""
    model, optimizer, scheduler = trained()
    weights = get_model_state_dict(model)
    state = {
        "model": weights,
        "optimizers": {"AdamW": get_optimizer_state_dict(model, optimizer)},
        "schedulers": {"StepLR": scheduler.state_dict()},
        "timestamp": {"Timestamp": {"epoch": 1, "batch": 3}},
        "run_name": "run",
        "metadata": {"composer_env_info": {"composer_version": "0.32.1"}},
    }
    rng = [{"python": random.getstate(), "torch": torch.get_rng_state()}]
    return saved({"state": state, "rng": rng}, directory), weights
