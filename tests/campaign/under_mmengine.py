"""The digits example under MMEngine's runner, as a run that must survive anything; see training.py."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, HOOKS, METRICS, MODELS
from mmengine.runner import FlexibleRunner
from tests.campaign.board import Board
from tests.campaign.training import (
    EVALUATE_EVERY,
    GLOBAL_BATCH,
    SAVE_EVERY,
    STALL,
    WAIT,
    Digits,
    VisionTransformer,
    strike,
)

import mmfsdp
import mmfsdp_mmengine  # noqa: F401 - registers the strategy and the hook

__all__ = ["main"]

VALIDATED = 96  # samples


@MODELS.register_module(force=True)
class NoisyDigits(BaseModel):
    """Sees images with noise, which tells whether random numbers go on as they were."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = VisionTransformer(width=16, depth=1, heads=2)

    def forward(self, images: torch.Tensor, labels: torch.Tensor, indices: torch.Tensor, mode: str = "tensor") -> Any:
        if mode == "loss":
            return {"loss": F.cross_entropy(self.vit(images + 0.1 * torch.randn(images.shape)), labels)}
        return [{"right": right} for right in self.vit(images).argmax(1) == labels]


@DATASETS.register_module(force=True)
class CampaignDigits(Digits):
    """The first of the samples, or all."""

    def __init__(self, folder: str, count: int | None = None) -> None:
        super().__init__(Path(folder))
        self.labels = self.labels[:count]


@METRICS.register_module(force=True)
class ShareRight(BaseMetric):
    """The share of samples with the right answer."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += [float(sample["right"]) for sample in data_samples]

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        return {"right": sum(results) / len(results)}


@HOOKS.register_module(force=True)
class Shows(Hook):
    """Shows the phase on the board, commits faults that are ordered, and writes down the samples of every step."""

    priority = "HIGH"  # before anything is saved

    def __init__(self, folder: str, pace: float) -> None:
        self._folder, self._pace, self._begun = Path(folder), pace, 0.0
        self._board = Board(self._folder, int(os.environ["RANK"]))
        self._stack = ExitStack()

    def before_run(self, runner: Any) -> None:
        self._board.enter("load")

    def before_train(self, runner: Any) -> None:
        self._stack.enter_context(mmfsdp.watch_ranks(runner.model, STALL))
        self._board.enter("data loading", runner.iter)

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self._board.enter("step")
        self._begun = time.monotonic()
        is_chosen = runner.rank == runner.iter % runner.world_size
        if is_chosen and strike(self._folder, "step raises"):
            raise KeyError("a fault in a step")
        if is_chosen and strike(self._folder, "rank exits"):
            os._exit(0)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        step = runner.iter + 1
        with (self._folder / f"order-{runner.rank}").open("a") as file:
            file.write(f"{step} {runner.world_size} {' '.join(map(str, data_batch[2].tolist()))}\n")
        time.sleep(max(0.0, self._pace - (time.monotonic() - self._begun)))
        self._board.enter("data loading" if step % SAVE_EVERY else "save", step)

    def before_val_epoch(self, runner: Any) -> None:
        self._board.enter("evaluation", runner.iter)

    def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
        self._board.enter("data loading", runner.iter)

    def after_train(self, runner: Any) -> None:
        self._board.enter("exit", runner.iter)
        self._stack.close()


def main(folder: Path, settings: dict[str, Any]) -> None:
    """Be a rank: train to the end, from the newest checkpoint on."""
    faulthandler.register(signal.SIGUSR2)
    mmfsdp.init_process_group(timeout=WAIT, join_timeout=WAIT)
    runner = FlexibleRunner(**config(folder, settings), experiment_name=f"campaign-{os.getpid()}")
    runner.train()
    model, optimizer = runner.model, runner.optim_wrapper.optimizer
    weights = mmfsdp.model_state_dict(model, rank0_only=False)
    state = mmfsdp.optim_state_dict(model, optimizer, rank0_only=False)
    rates = [group["lr"] for group in optimizer.param_groups]
    torch.save((weights, state, rates, torch.rand(4)), folder / f"end-{dist.get_rank()}")
    dist.destroy_process_group()


def config(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the runner."""

    def loader(workers: int, sampler: dict[str, Any], **dataset: Any) -> dict[str, Any]:
        return {
            "batch_size": GLOBAL_BATCH // dist.get_world_size(),
            "num_workers": workers,
            "dataset": {"type": "CampaignDigits", "folder": str(folder), **dataset},
            "sampler": sampler,
            "collate_fn": {"type": "default_collate"},
        }

    checkpoints: dict[str, Any] = {
        "type": "CheckpointHook",
        "interval": SAVE_EVERY,
        "by_epoch": False,
        "max_keep_ckpts": 3,
    }
    if settings["kind"] == "mmengine_hosts":  # the disk is each host's own
        checkpoints |= {"fast_directory": str(folder / "disk" / "fast"), "fast_interval": 2}
    return {
        "model": {"type": "NoisyDigits"},
        "work_dir": str(folder / "run"),
        "train_dataloader": loader(1, {"type": "InfiniteSampler", "shuffle": True}),
        "train_cfg": {"type": "IterBasedTrainLoop", "max_iters": settings["steps"], "val_interval": EVALUATE_EVERY},
        "val_dataloader": loader(0, {"type": "DefaultSampler", "shuffle": False}, count=VALIDATED),
        "val_cfg": {},
        "val_evaluator": {"type": "ShareRight"},
        "optim_wrapper": {"optimizer": {"type": "AdamW", "lr": 1e-3}, "clip_grad": {"max_norm": 1.0}},
        "param_scheduler": [{"type": "CosineAnnealingLR", "T_max": settings["steps"], "by_epoch": False}],
        "default_hooks": {"checkpoint": {**checkpoints, "background": settings["background"]}},
        "custom_hooks": [{"type": "Shows", "folder": str(folder), "pace": settings["pace"]}],
        "randomness": {"seed": 5, "diff_rank_seed": True},
        "strategy": {
            "type": "FSDPStrategy",
            "model_wrapper": {"auto_wrap_policy": {"type": "ModuleWrapPolicy", "module_classes": ["Block"]}},
            "state_dict_cfg": settings["save"],
        },
        "log_level": "WARNING",
        "resume": True,
    }
