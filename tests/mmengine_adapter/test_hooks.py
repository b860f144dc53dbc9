"""MMEngine's hooks, all at once, on a sharded model; and test-time augmentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.dataset import pseudo_collate
from mmengine.hooks.test_time_aug_hook import PrepareTTAHook
from mmengine.model import BaseTTAModel
from mmengine.registry import DATASETS, MODELS
from tests.mmengine_adapter.toy import ToyData, config, loader, runner_of, strategy

from mmfsdp.testing import run_ranks

HOOKS = [
    {"type": "History"},
    {"type": "EMAHook", "momentum": 0.1, "priority": "ABOVE_NORMAL"},
    {"type": "SyncBuffersHook"},
    {"type": "EarlyStoppingHook", "monitor": "accuracy", "patience": 1, "min_delta": 2.0},
    {"type": "ProfilerHook", "by_epoch": False, "profile_times": 2},
    {"type": "EmptyCacheHook", "after_epoch": True},
]


def hooked(rank: int, folder: Path) -> dict[str, Any]:
    changes = {
        "model": {"type": "ToyModel", "batch_norm": True},
        "custom_hooks": [
            {**hook, "json_trace_path": str(folder / f"trace{rank}.json")} if "profile_times" in hook else hook
            for hook in HOOKS
        ],
        "default_hooks": {
            "logger": {"type": "LoggerHook", "interval": 1},
            "checkpoint": {"type": "CheckpointHook", "interval": 1, "save_best": "accuracy"},
        },
        "train_cfg": {"by_epoch": True, "max_epochs": 5, "val_interval": 1},
        "log_level": "INFO",
        "visualizer": {"type": "Visualizer", "vis_backends": [{"type": "LocalVisBackend"}]},
        "strategy": strategy("local"),
    }
    runner = runner_of(config(folder, 2, **changes))
    runner.train()
    hub = runner.message_hub
    return {
        "epochs": runner.epoch,
        "norms": len(hub.get_scalar("train/grad_norm").data[0]),
        "lr": hub.get_scalar("train/lr").current(),
        "loss": len(hub.get_scalar("train/loss").data[0]),
        "iter": hub.get_info("iter"),
        "best": [name for name in hub.runtime_info if "best" in name],
        "log": Path(runner.logger.handlers[-1].baseFilename).read_text() if rank == 0 else "",
    }


def test_all_at_once(tmp_path: Path) -> None:
    first, second = run_ranks(hooked, 2, tmp_path)
    log = first.pop("log")
    second.pop("log")
    assert first == second
    # Nothing improves by 2, so that the epoch after the first is the last.
    assert first["epochs"] == 2
    assert first["loss"] == first["iter"] + 1 == 8
    assert first["norms"] == 4, "every second iteration steps"
    assert first["best"]
    for word in ("grad_norm:", "loss:", "lr:", "accuracy:"):
        assert word.lower() in log.lower(), word
    assert all((tmp_path / f"trace{rank}.json").stat().st_size > 10_000 for rank in range(2))
    assert {"epoch_1.pth", "epoch_2.pth"} <= {path.name for path in tmp_path.iterdir()}
    assert [path for path in tmp_path.iterdir() if path.name.startswith("best_accuracy")]


@DATASETS.register_module(force=True)
class Augmented(ToyData):
    """Every image twice: as it is, and flipped."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label = self.images[index], self.labels[index]
        return {"inputs": [image, image.flip(-1)], "labels": [label, label]}


@MODELS.register_module(force=True)
class Voting(BaseTTAModel):
    """Takes the larger of the predicted classes."""

    def merge_preds(self, data_samples_list: Any) -> list[dict[str, Any]]:
        return [
            {"label": samples[0]["label"], "pred": torch.stack([sample["pred"] for sample in samples]).max()}
            for samples in data_samples_list
        ]


def stacked(batch: list[dict[str, Any]]) -> dict[str, Any]:
    """As test-time augmentation wants it: per key a list over augmentations, of whole batches."""
    together = pseudo_collate(batch)
    return {key: [torch.stack(list(samples)) for samples in value] for key, value in together.items()}


def augmented(rank: int, folder: Path, world_size: int, made: dict[str, Any]) -> dict[str, float]:
    tests = {**loader(8 // world_size, shuffle=False), "dataset": {"type": "Augmented"}}
    tests["collate_fn"] = {"type": stacked}
    changes = {"test_dataloader": tests, "test_evaluator": {"type": "Accuracy"}, "test_cfg": {}, "strategy": made}
    runner = runner_of(config(folder, world_size, **changes))
    runner.train()
    runner.register_hook(PrepareTTAHook(tta_cfg={"type": "Voting"}))
    return runner.test()


class TestTimeAugmentation:
    def test_equals_the_unsharded_model_s(self, tmp_path: Path) -> None:
        [expected] = run_ranks(augmented, 1, tmp_path, 1, {"type": "SingleDeviceStrategy"})
        for engine in ("fsdp2", "fsdp1"):
            for found in run_ranks(augmented, 2, tmp_path / engine, 2, strategy(engine=engine)):
                assert found == pytest.approx(expected)
        assert expected["count"] == 32
