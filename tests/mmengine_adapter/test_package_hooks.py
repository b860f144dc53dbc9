"""Hooks of OpenMMLab's packages that reach into the model behind the wrapper: they train sharded as under DDP."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS, MODELS
from mmengine.runner import Runner
from tests.mmengine_adapter.test_plain_runner import settings_of
from tests.mmengine_adapter.toy import POLICY, History, ToyModel

from mmfsdp.testing import run_ranks
from mmfsdp_mmengine.checkpoints.live_content import safe_globals

SHARDED = {"type": "MMFullyShardedDataParallel", "auto_wrap_policy": POLICY, "broadcast_buffers": False}
WRAPPERS: dict[str, dict[str, Any]] = {
    "ddp": {"type": "MMDistributedDataParallel", "broadcast_buffers": False},
    "fsdp2": SHARDED,
    "kept": {**SHARDED, "sharding_strategy": "SHARD_GRAD_OP"},
    "replicate": {**SHARDED, "sharding_strategy": "NO_SHARD"},
    "fsdp1": {**SHARDED, "engine": "fsdp1"},
}
# Adam makes steps of noise where batch norm takes the gradient of a bias to zero.
OPTIM = {"optimizer": {"type": "SGD", "lr": 0.01, "momentum": 0.9}}


def behind(model: nn.Module) -> nn.Module:
    return model.module if is_model_wrapper(model) else model


@MODELS.register_module(force=True)
class Pair(ToyModel):
    """A student learns from labels and from a frozen teacher, as mmdet's detectors that are half supervised do."""

    def __init__(self) -> None:
        super().__init__()
        del self.patch, self.norm, self.scale, self.blocks, self.head
        self.student = ToyModel(batch_norm=True)
        self.teacher = ToyModel(batch_norm=True)
        self.teacher.requires_grad_(False)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor, mode: str = "tensor") -> Any:
        if mode != "loss":
            return self.teacher(inputs, labels, mode)
        self.teacher.eval()
        with torch.no_grad():
            wanted = self.teacher(inputs, labels).softmax(1)
        logits = self.student(inputs, labels)
        return {"loss": F.cross_entropy(logits, labels), "loss_teacher": F.cross_entropy(logits, wanted)}


@HOOKS.register_module(force=True)
class MeanTeacher(Hook):
    """Averages the student's weights in the teacher's: by parameter, or by entry of the state dict."""

    def __init__(self, entries: bool) -> None:
        self.entries = entries

    def before_train(self, runner: Any) -> None:
        self.average(behind(runner.model), 1)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.average(behind(runner.model), 0.25)

    def average(self, model: nn.Module, momentum: float) -> None:
        given, kept = (
            [*part.state_dict().values()] if self.entries else [*part.parameters()]
            for part in (model.student, model.teacher)
        )
        for source, target in zip(given, kept, strict=True):
            if target.dtype.is_floating_point:
                target.data.mul_(1 - momentum).add_(source.data, alpha=momentum)


@HOOKS.register_module(force=True)
class PreciseBN(Hook):
    """Recomputes statistics of batch norm over batches, with the model behind the wrapper, as mmpretrain's does."""

    @torch.no_grad()
    def after_train_epoch(self, runner: Any) -> None:
        model = behind(runner.model)
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]
        sums = [torch.zeros(2, norm.num_features) for norm in norms]
        before = [norm.momentum for norm in norms]
        for norm in norms:
            norm.momentum = 1.0
        for data in itertools.islice(runner.train_loop.dataloader, 2):
            model(**model.data_preprocessor(data, False))
            for norm, total in zip(norms, sums, strict=True):
                total += torch.stack((norm.running_mean, norm.running_var)) / 2
        for norm, total, momentum in zip(norms, sums, before, strict=True):
            dist.all_reduce(total)
            norm.running_mean, norm.running_var = total / dist.get_world_size()
            norm.momentum = momentum


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mean teacher, parameters": ({"type": "Pair"}, {"type": "MeanTeacher", "entries": False}),
    "mean teacher, entries": ({"type": "Pair"}, {"type": "MeanTeacher", "entries": True}),
    "precise batch norm": ({"type": "ToyModel", "batch_norm": True}, {"type": "PreciseBN"}),
}


def train(rank: int, folder: Path, wrapper: str) -> dict[str, Any]:
    found = {}
    for case, (model, hook) in CASES.items():
        if model["type"] == "Pair" and wrapper == "fsdp1":
            continue  # the shards of equal modules differ in flat parameters
        place = folder / wrapper / case.replace(" ", "_")
        changes = {"model": model, "custom_hooks": [{"type": "History"}, hook], "optim_wrapper": OPTIM}
        with torch.serialization.safe_globals(safe_globals()):  # for the stock wrapper
            runner = Runner.from_cfg(settings_of(place, 2, WRAPPERS[wrapper], **changes))
            runner.train()
        history = next(hook for hook in runner.hooks if isinstance(hook, History))
        found[case] = {"losses": history.losses, "metrics": history.metrics}
        dist.barrier()
        saved = torch.load(place / "epoch_2.pth", weights_only=False) if rank == 0 else {"state_dict": {}}
        found[case]["weights"] = saved["state_dict"]
    return found


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_as_under_ddp(tmp_path: Path) -> None:
    results = {wrapper: run_ranks(train, 2, tmp_path, wrapper)[0] for wrapper in WRAPPERS}
    for case in CASES:
        expected = results["ddp"][case]
        assert len(expected["losses"]) == 8
        assert expected["losses"][-1] < expected["losses"][0]
        for wrapper in WRAPPERS:
            if case not in results[wrapper]:
                continue
            found = results[wrapper][case]
            assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5), (wrapper, case)
            assert found["metrics"] == expected["metrics"], (wrapper, case)
            torch.testing.assert_close(found["weights"], expected["weights"], rtol=1e-4, atol=1e-5)
