"""Training a family with MMEngine's FlexibleRunner, and what is compared of it."""

from __future__ import annotations

import copy
import hashlib
import itertools
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from mmengine.dist import all_reduce
from mmengine.hooks import Hook
from mmengine.optim import DefaultOptimWrapperConstructor
from mmengine.registry import HOOKS, OPTIM_WRAPPER_CONSTRUCTORS
from mmengine.runner import FlexibleRunner
from tests.models import data, zoo
from tests.models.families import FAMILIES

import mmfsdp_mmengine  # noqa: F401  # registers its classes
from mmfsdp import model_state_dict

__all__ = ["LayerDecay", "Outcome", "train"]

GLOBAL_BATCH = 8
NUM_STEPS = 10
STOP = 5
_runs = itertools.count()
_registered = (data, zoo)


@dataclass
class Outcome:
    """What a run did, the same on every rank."""

    losses: list[float] = field(default_factory=list)
    """Of each step, mean over ranks."""
    norms: list[float] = field(default_factory=list)
    """Global gradient norm of each step, before clipping."""
    metrics: list[dict[str, float]] = field(default_factory=list)
    """Of each validation."""
    groups: list[tuple[list[str], float, float, float]] = field(default_factory=list)
    """Of the optimizer: names, learning rate at the start and at the end, weight decay."""
    units: tuple[str, ...] = ()
    """Shard units of the plan."""
    digest: str = ""
    """Of the weights at the end; on the first rank."""


@HOOKS.register_module(force=True)
class Record(Hook):
    """Fills an `Outcome`."""

    priority = "VERY_LOW"

    def __init__(self) -> None:
        self.outcome = Outcome()

    def before_train(self, runner: Any) -> None:
        names = {id(param): name.removeprefix("module.") for name, param in runner.model.named_parameters()}
        self.groups = [
            ([names[id(param)] for param in group["params"]], group["lr"], group["weight_decay"])
            for group in runner.optim_wrapper.optimizer.param_groups
        ]

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        loss = outputs["loss"].detach().clone()
        all_reduce(loss, "mean")
        self.outcome.losses.append(loss.item())
        self.outcome.norms.append(float(runner.message_hub.get_scalar("train/grad_norm").current()))

    def after_val_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        self.outcome.metrics.append(dict(metrics or {}))

    def after_train(self, runner: Any) -> None:
        groups = runner.optim_wrapper.optimizer.param_groups
        self.outcome.groups = [
            (names, lr, group["lr"], decay) for (names, lr, decay), group in zip(self.groups, groups, strict=True)
        ]


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
class LayerDecay(DefaultOptimWrapperConstructor):
    """Layer-wise learning rates; what has one dimension is not decayed. Looks at names and shapes, as real ones do."""

    def add_params(self, params: list[dict[str, Any]], module: nn.Module, **_: Any) -> None:
        rate, depth = self.paramwise_cfg["layer_decay_rate"], self.paramwise_cfg["num_layers"]
        for name, param in module.named_parameters():
            if not param.requires_grad:
                continue
            found = re.search(r"layers?\.(\d+)\.", name)
            layer = int(found[1]) + 1 if found else 0 if "embeddings" in name else depth + 1
            decay = 0.0 if param.ndim == 1 or name.endswith(("cls_token", "position_embeddings")) else self.base_wd
            params.append({"params": [param], "lr": self.base_lr * rate ** (depth + 1 - layer), "weight_decay": decay})


def train(
    rank: int, work_dir: Path, world_size: int, family: str, strategy: dict[str, Any], changes: dict[str, Any]
) -> Outcome:
    """Train on a rank. Collective: every rank.

    Args:
        rank: This one.
        work_dir: Where checkpoints of step 5 and 10 go.
        world_size: Number of ranks that share a global batch.
        family: Name of one of `FAMILIES`.
        strategy: Config of the strategy.
        changes: Further arguments of the runner that differ.
    """
    warnings.simplefilter("ignore")
    settings = FAMILIES[family].runner_settings(GLOBAL_BATCH // world_size, NUM_STEPS, STOP)
    settings |= {"work_dir": str(work_dir), "strategy": strategy, **changes}
    settings["custom_hooks"] = [*settings.get("custom_hooks", ()), {"type": "Record"}]
    runner = FlexibleRunner(**copy.deepcopy(settings), experiment_name=f"{family}{next(_runs)}")
    runner.train()
    outcome: Outcome = next(hook.outcome for hook in runner.hooks if isinstance(hook, Record))
    if hasattr(runner.model, "plan"):
        outcome.units = tuple(fqn for unit in runner.model.plan.units for fqn in unit.fqns)
        weights = model_state_dict(runner.model, "full")
    else:
        weights = runner.model.state_dict()
    outcome.digest = _digest(weights) if rank == 0 else ""
    return outcome


def _digest(weights: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].detach().contiguous().numpy().tobytes())
    return digest.hexdigest()
