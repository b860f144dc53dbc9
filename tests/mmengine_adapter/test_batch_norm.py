"""Batch norm when sharded: its statistics broadcast or averaged as under DDP, and the ``sync_bn`` setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from mmengine.model import convert_sync_batchnorm
from mmengine.optim import OptimWrapper
from mmengine.registry import MODEL_WRAPPERS, MODELS
from tests.mmengine_adapter.toy import POLICY, UNSHARDED, ToyModel, config, run, runner_of, strategy, train

from mmfsdp.errors import ConfigError
from mmfsdp.testing import run_ranks
from mmfsdp_mmengine.wrappers.sync_bn import synchronise_batch_norm

BATCH_NORM = {"type": "ToyModel", "batch_norm": True}
WRAPPERS: dict[str, dict[str, Any]] = {
    "ddp": {"type": "MMDistributedDataParallel"},
    "fsdp2": {"type": "MMFullyShardedDataParallel", "auto_wrap_policy": POLICY},
    "replicate": {"type": "MMFullyShardedDataParallel", "sharding_strategy": "NO_SHARD"},
    "fsdp1": {"type": "MMFullyShardedDataParallel", "auto_wrap_policy": POLICY, "engine": "fsdp1"},
}


def statistics(rank: int) -> dict[tuple[str, bool], list[list[float]]]:
    return {(name, broadcast): statistics_of(rank, name, broadcast) for name in WRAPPERS for broadcast in (True, False)}


def statistics_of(rank: int, name: str, broadcast: bool) -> list[list[float]]:
    """Train with accumulation on batches that differ by rank; return the buffers before and after each step."""
    torch.manual_seed(0)
    wrapper = {**WRAPPERS[name], "broadcast_buffers": broadcast}
    model = MODEL_WRAPPERS.build(wrapper, default_args={"module": MODELS.build(BATCH_NORM)})
    optim = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), accumulative_counts=2)
    optim.initialize_count_status(model, 0, 6)
    generator = torch.Generator().manual_seed(rank)
    seen = []
    for step in range(6):
        inputs = torch.randn(4, 3, 8, 8, generator=generator) + rank
        model.train_step({"inputs": inputs, "labels": torch.tensor([0, 1, 2, 3])}, optim)
        if step == 3:  # validation in between
            model.eval()
            with torch.no_grad():
                model.val_step({"inputs": inputs, "labels": torch.tensor([0, 1, 2, 3])})
            model.train()
        seen.append([value for buffer in model.module.norm.buffers() for value in buffer.flatten().tolist()])
    return seen


class TestBroadcastBuffers:
    @pytest.mark.exhaustive
    def test_equals_ddp(self) -> None:
        for found in run_ranks(statistics, 2):
            for (name, broadcast), mine in found.items():
                for step, theirs in zip(mine, found["ddp", broadcast], strict=True):
                    assert step == pytest.approx(theirs, rel=1e-4, abs=1e-6), (name, broadcast)
        assert found["ddp", True] != found["ddp", False], "on the last rank"


def synchronised(rank: int, folder: Path, engine: str) -> tuple[bool, dict[str, Any]]:
    hooks = [{"type": "History"}, {"type": "SyncBuffersHook"}]
    made = {"model": BATCH_NORM, "custom_hooks": hooks, "strategy": strategy(engine=engine)}
    runner = runner_of(config(folder, 2, **made))
    runner.train()
    alike = True
    for buffer in runner.model.buffers():
        first = buffer.clone()
        dist.broadcast(first, 0)
        alike &= torch.equal(first, buffer)
    history = next(hook for hook in runner.hooks if type(hook).__name__ == "History")
    return alike, {"metrics": history.metrics, "losses": history.losses}


class TestSyncBuffersHook:
    @pytest.mark.exhaustive
    def test_averages_the_statistics(self, tmp_path: Path) -> None:
        hooks = [{"type": "History"}, {"type": "SyncBuffersHook"}]
        changes = {"model": BATCH_NORM, "custom_hooks": hooks, "strategy": {"type": "DDPStrategy"}}
        expected = run_ranks(train, 2, tmp_path / "ddp", 2, changes)[0]
        for engine in ("fsdp2", "fsdp1"):
            for alike, found in run_ranks(synchronised, 2, tmp_path / engine, engine):
                assert alike
                assert found["metrics"] == expected["metrics"]
                assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)


@MODELS.register_module(force=True)
class WithSyncBatchNorm(ToyModel):
    """As mmsegmentation's models: ``norm_cfg=dict(type='SyncBN')``."""

    def __init__(self) -> None:
        super().__init__(batch_norm=True)
        self.norm = nn.SyncBatchNorm(16)


def refused(rank: int, folder: Path, sync_bn: str | None, model: str) -> str:
    settings = {**strategy(), "sync_bn": sync_bn}
    try:
        run(config(folder, 2, strategy=settings, model={"type": model, "batch_norm": True} if sync_bn else model))
    except ConfigError as error:
        return str(error)
    return ""


def reverted(rank: int, folder: Path, world_size: int, sync_bn: str | None) -> tuple[str, list[float]]:
    settings = {**strategy(), "sync_bn": sync_bn}
    runner = runner_of(config(folder, world_size, strategy=settings, model={"type": "WithSyncBatchNorm"}))
    runner.train()
    history = next(hook for hook in runner.hooks if type(hook).__name__ == "History")
    return type(runner.model.module.norm).__name__, history.losses


def unsharded(rank: int, folder: Path) -> dict[str, Any]:
    return train(rank, folder, 1, {"strategy": UNSHARDED, "model": {"type": "WithSyncBatchNorm"}})


class TestSyncBatchNorm:
    def test_is_refused_on_the_cpu_by_name(self, tmp_path: Path) -> None:
        for text in run_ranks(refused, 2, tmp_path, "torch", "ToyModel"):
            assert "SyncBatchNorm does not run on the CPU, but norm would need it. Set sync_bn='revert'" in text
        for text in run_ranks(refused, 2, tmp_path, "tourch", "ToyModel"):
            assert (
                "sync_bn must be one of 'torch', 'mmcv', 'revert' or None, got 'tourch'. Did you mean 'torch'?" in text
            )

    @pytest.mark.exhaustive
    def test_is_reverted_when_asked_and_for_one_rank(self, tmp_path: Path) -> None:
        [expected] = run_ranks(unsharded, 1, tmp_path)
        [(kind, losses)] = run_ranks(reverted, 1, tmp_path, 1, None)
        assert kind == "_BatchNormXd"
        assert losses == pytest.approx(expected["losses"], rel=1e-5)
        assert {kind for kind, _ in run_ranks(reverted, 2, tmp_path, 2, "revert")} == {"_BatchNormXd"}

    def test_layers_that_the_model_has_are_refused_too(self) -> None:
        with pytest.raises(ConfigError, match="but norm would need it"):
            synchronise_batch_norm(WithSyncBatchNorm(), None, "cpu", 2)

    def test_converts_for_an_accelerator_as_mmengine_does(self) -> None:
        model = ToyModel(batch_norm=True)
        weight = model.norm.weight
        converted = synchronise_batch_norm(model, "torch", "cuda", 2)
        assert type(converted.norm) is type(convert_sync_batchnorm(ToyModel(batch_norm=True)).norm) is nn.SyncBatchNorm
        assert converted.norm.weight is weight
        assert type(synchronise_batch_norm(converted, "revert", "cuda", 2).norm).__name__ == "_BatchNormXd"

    def test_mmcv_that_is_not_there(self) -> None:
        with pytest.raises(ConfigError, match="sync_bn='mmcv' needs mmcv, which cannot be imported"):
            synchronise_batch_norm(ToyModel(batch_norm=True), "mmcv", "cuda", 2)


def buffers_resumed(rank: int, folder: Path, engine: str, kind: str) -> list[list[float]]:
    """Train at once, and again in two runs; return the statistics of this rank at both ends."""
    found = []
    for name, stops in (("whole", [4]), ("resumed", [2, 4])):
        for stop in stops:
            changes = {
                "model": BATCH_NORM,
                "strategy": strategy(kind, engine=engine),
                "train_cfg": {"type": "IterBasedTrainLoop", "max_iters": stop},
                "default_hooks": {"checkpoint": {"type": "CheckpointHook", "interval": 2, "by_epoch": False}},
                "resume": True,
            }
            runner = runner_of(config(folder / name, 2, **changes))
            runner.train()
        found.append([value for buffer in runner.model.buffers() for value in buffer.flatten().tolist()])
    return found


@pytest.mark.parametrize(("engine", "kind"), [("fsdp2", "sharded"), ("fsdp1", "local"), ("fsdp2", "full")])
def test_statistics_of_each_rank_go_on_after_a_resume(engine: str, kind: str, tmp_path: Path) -> None:
    (first, again), (second, after) = run_ranks(buffers_resumed, 2, tmp_path, engine, kind)
    assert first != second, "ranks see other samples"
    assert (again, after) == (first, second)
