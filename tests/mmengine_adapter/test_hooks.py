"""MMEngine's hooks, all at once, on a sharded model; and test-time augmentation."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from mmengine.hooks import Hook
from mmengine.hooks.test_time_aug_hook import PrepareTTAHook, build_runner_with_tta
from mmengine.model import BaseModel, BaseTTAModel
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import DATASETS, MODELS, TRANSFORMS, VISUALIZERS
from mmengine.registry import HOOKS as HOOKS_REGISTRY
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement
from mmengine.visualization import Visualizer
from tests.distributed.rehearsal.test_out_of_memory import FullDevice
from tests.mmengine_adapter.toy import (
    POLICY,
    UNSHARDED,
    History,
    ToyData,
    ToyModel,
    config,
    loader,
    runner_of,
    strategy,
)

import mmfsdp
from mmfsdp.basics import human_bytes
from mmfsdp.testing import run_ranks
from mmfsdp_mmengine import WatchHook

HOOKS = [
    {"type": "History"},
    {"type": "EMAHook", "momentum": 0.1, "priority": "ABOVE_NORMAL"},
    {"type": "SyncBuffersHook"},
    {"type": "EarlyStoppingHook", "monitor": "accuracy", "patience": 1, "min_delta": 2.0},
    {"type": "ProfilerHook", "by_epoch": False, "profile_times": 2},
    {"type": "EmptyCacheHook", "after_epoch": True},
]


class FreezeHook(Hook):
    """Freezes a block in each epoch but the first, which a validation follows, and trains it again in the last."""

    def before_train_epoch(self, runner: Any) -> None:
        model = getattr(runner.model, "module", runner.model)
        model.blocks[0].requires_grad_(runner.epoch != 1)
        model.patch.requires_grad_(runner.epoch == 0)


def frozen(rank: int, folder: Path, world_size: int, makes: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """The weights after three epochs, with each strategy."""
    found = []
    for made in makes:
        changes = {"strategy": made, "train_cfg": {"by_epoch": True, "max_epochs": 3, "val_interval": 1}}
        runner = runner_of(config(folder, world_size, **changes, default_hooks={}))
        runner.register_hook(FreezeHook())
        runner.train()
        if world_size == 1:
            found.append(runner.model.state_dict())
        else:
            found.append(mmfsdp.model_state_dict(runner.model))
    return found


@pytest.mark.exhaustive
def test_a_hook_that_freezes_after_a_validation_trains_as_the_plain_runner(tmp_path: Path) -> None:
    [[plain]] = run_ranks(frozen, 1, tmp_path, 1, [UNSHARDED])
    settings = [{}, {"sharding_strategy": "SHARD_GRAD_OP"}, {"sharding_strategy": "NO_SHARD"}]
    weights = run_ranks(frozen, 2, tmp_path, 2, [strategy(**wrapper) for wrapper in settings])[0]
    for wrapper, got in zip(settings, weights, strict=True):
        for name, value in plain.items():
            torch.testing.assert_close(got[name], value, msg=lambda text: f"{name}, {wrapper}: {text}")  # noqa: B023


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


@pytest.mark.exhaustive
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


@HOOKS_REGISTRY.register_module(force=True)
class Peeking(Hook):
    """Calls the model once more in each iteration, as a visualizer may."""

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        with torch.no_grad():
            runner.model(**data_batch, mode="tensor")


def rehearsing(rank: int, folder: Path) -> list[tuple[list[float], str]]:
    """Return losses and logs: without the hook, with it, where it knows no config, and with more forwards."""
    found = []
    hook = {"type": "RehearsalHook", "device": "cpu", "steps": 1}
    for place, hooks in enumerate(([], [hook], [hook], [{**hook, "every": 2}, {"type": "Peeking"}])):
        settings = config(folder / str(place), 2, custom_hooks=[{"type": "History"}, *hooks], log_level="INFO")
        runner = runner_of(settings) if place == 2 else runner_of(settings, cfg=Config(settings))
        runner.train()
        history = next(hook for hook in runner.hooks if isinstance(hook, History))
        log = Path(runner.logger.handlers[-1].baseFilename).read_text() if rank == 0 else ""
        lines = re.findall(".*(?:INFO - Rehearsal of|WARNING - (?:RehearsalHook|Step .*all_gather)).*", log)
        found.append((history.losses, "\n".join(lines)))
    return found


@pytest.mark.exhaustive
def test_the_first_steps_beside_their_rehearsal(tmp_path: Path) -> None:
    first, second = run_ranks(rehearsing, 2, tmp_path)
    assert first[0][0] == first[1][0] == first[2][0] == first[3][0]  # training is the same
    assert [log for _, log in second] == ["", "", "", ""]
    plain, line, warning, more = [log for _, log in first]
    assert plain == ""
    model, batch = ToyModel(), {"inputs": torch.empty(4, 3, 8, 8), "labels": torch.zeros(4, dtype=torch.long)}
    step = mmfsdp.rehearse(
        {"wrap": {"kind": "module_class", "classes": "Block"}}, model, batch, mesh=2, max_norm=0.5, accumulate=2,
        loss=lambda model, batch: model(**model.data_preprocessor(batch, True), mode="loss")["loss"], device_type="cpu",
    )  # fmt: skip
    assert re.search(
        r"Rehearsal of rank 0 of 2 ranks: step [\d.]+ .?s predicted, [\d.]+ .?s measured \([+-][\d.,]+%\); "
        rf"peak {re.escape(human_bytes(step.peak.nbytes))} predicted$",
        line,
    ), line
    assert "RehearsalHook: the step cannot be rehearsed: ConfigError: The config has no model." in warning
    assert "\n" not in line + warning
    assert re.search(
        r"WARNING - Step \d+: all_gather of .*: 6 in a step, 4 in the forecast, which is .* more\.", more
    ), more


@HOOKS_REGISTRY.register_module(force=True)
class FillingUp(Hook):
    """Leaves no room on the device from the second iteration on."""

    device = FullDevice("aten.gelu.default", 1)

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if batch_idx:
            self.device.__enter__()


def full(rank: int, folder: Path) -> str:
    """Return the note of the error that ends a training on a full device."""
    hooks = [{"type": "RehearsalHook"}, {"type": "FillingUp"}]
    settings = config(folder, 1, custom_hooks=hooks)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        runner_of(settings, cfg=Config(settings)).train()
    FillingUp.device.__exit__(None, None, None)
    (note,) = caught.value.__notes__
    return note


def test_a_full_device_says_where_it_was_and_what_was_expected(tmp_path: Path) -> None:
    (note,) = run_ranks(full, 1, tmp_path)
    lines = note.splitlines()
    assert lines[0].startswith("Rank 0 of 1 rank ran out of memory in forward of blocks.0"), note
    assert lines[1].startswith("The forecast holds ")
    assert "Held there, as forecast:" in lines


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
    @pytest.mark.exhaustive
    def test_equals_the_unsharded_model_s(self, tmp_path: Path) -> None:
        [expected] = run_ranks(augmented, 1, tmp_path, 1, {"type": "SingleDeviceStrategy"})
        for engine in ("fsdp2", "fsdp1"):
            for found in run_ranks(augmented, 2, tmp_path / engine, 2, strategy(engine=engine)):
                assert found == pytest.approx(expected)
        assert expected["count"] == 32

    def test_runner_built_with_it(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        torch.save(ToyModel().state_dict(), tmp_path / "weights.pth")
        [expected] = run_ranks(piped, 1, tmp_path, 1, {"launcher": "none"})
        assert expected["count"] == 32
        wrapper = {"type": "MMFullyShardedDataParallel", "auto_wrap_policy": POLICY}
        plain = {"launcher": "pytorch", "model_wrapper_cfg": wrapper}
        for made in (plain, {"runner_type": "FlexibleRunner", "strategy": strategy()}):
            for found in run_ranks(piped, 2, tmp_path, 2, made):
                assert found == pytest.approx(expected)


@TRANSFORMS.register_module(force=True)
class Twice:
    """A sample as it is, and flipped."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        image, label = sample["inputs"], sample["labels"]
        return {"inputs": [image, image.flip(-1)], "labels": [label, label]}


@DATASETS.register_module(force=True)
class Piped(ToyData):
    """Passes its samples through transforms."""

    def __init__(self, pipeline: Any = ()) -> None:
        super().__init__()
        self.pipeline = Compose(pipeline)

    def __getitem__(self, index: int) -> Any:
        return self.pipeline(super().__getitem__(index))


def piped(rank: int, folder: Path, world_size: int, made: dict[str, Any]) -> dict[str, float]:
    tests = {**loader(8 // world_size, shuffle=False), "dataset": {"type": "Piped"}, "collate_fn": {"type": stacked}}
    changes = {"test_dataloader": tests, "test_evaluator": {"type": "Accuracy"}, "test_cfg": {}}
    settings = config(folder, world_size, **changes, load_from=str(folder / "weights.pth"))
    del settings["strategy"]
    settings |= {"tta_model": {"type": "Voting"}, "tta_pipeline": [{"type": "Twice"}], **made}
    name = f"piped {world_size} {made.get('runner_type')}"
    return build_runner_with_tta(Config({**settings, "experiment_name": name})).test()


@MODELS.register_module(force=True)
class ListModel(BaseModel):
    """Takes a list of samples, as the hook that draws does."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(3, 5)

    def forward(self, *samples: Any, mode: str = "tensor") -> Any:
        logits = self.head(torch.stack([sample["inputs"].mean((0, 2, 3)) for sample in samples]))
        labels = torch.stack([sample["label"] for sample in samples])
        if mode == "loss":
            return {"loss": torch.nn.functional.cross_entropy(logits, labels)}
        return [{"label": label, "pred": pred} for label, pred in zip(labels, logits.argmax(1), strict=True)]


@DATASETS.register_module(force=True)
class Drawable(ToyData):
    """Samples that the hook can draw."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        about = {"ori_width": 16, "ori_height": 16, "img_path": f"images/{index}.png"}
        sample = BaseDataElement(metainfo=about)
        return {"inputs": self.images[index][None], "label": self.labels[index], "data_sample": sample}


@VISUALIZERS.register_module(force=True)
class Drawn(Visualizer):
    """Keeps what it is to draw."""

    seen: dict[str, tuple[Any, int]]

    def add_datasample(self, name: str, image: Any, *args: Any, **kwargs: Any) -> None:
        self.seen[name] = image.shape, int(args[1]["pred"])


def drawn(rank: int, folder: Path, world_size: int, made: dict[str, Any]) -> dict[str, tuple[Any, int]]:
    batches = {**loader(8 // world_size, shuffle=False), "dataset": {"type": "Drawable"}, "collate_fn": {"type": list}}
    settings = config(
        folder, world_size, model={"type": "ListModel"}, train_dataloader=batches, test_dataloader=batches
    )
    for name in ("param_scheduler", "val_dataloader", "val_evaluator", "val_cfg", "default_hooks"):
        settings[name] = None
    del settings["strategy"]
    settings |= {"test_evaluator": {"type": "Accuracy"}, "test_cfg": {}, "load_from": str(folder / "list.pth"), **made}
    settings |= {"train_cfg": {"by_epoch": False, "max_iters": 2}, "custom_hooks": [{"type": "NaiveVisualizationHook"}]}
    settings["visualizer"] = {"type": "Drawn", "vis_backends": [{"type": "LocalVisBackend"}]}
    if "strategy" in made:
        runner: Any = runner_of(settings)
    else:
        runner = Runner.from_cfg(Config({**settings, "experiment_name": f"drawn {world_size}"}))
    runner.train()
    runner.visualizer.seen = {}
    runner.test()
    return runner.visualizer.seen


class TestVisualization:
    def test_draws_what_the_unsharded_model_predicts(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        torch.save(ListModel().state_dict(), tmp_path / "list.pth")
        [expected] = run_ranks(drawn, 1, tmp_path, 1, {"launcher": "none"})
        assert len(expected) == 32
        assert {shape for shape, _ in expected.values()} == {(16, 16, 3)}
        assert len({pred for _, pred in expected.values()}) > 1
        plain = {"launcher": "pytorch", "model_wrapper_cfg": {"type": "MMFullyShardedDataParallel"}}
        for made in (plain, {"strategy": {"type": "FSDPStrategy"}}):
            first, second = run_ranks(drawn, 2, tmp_path, 2, made)
            assert len(first) == len(second) == 16
            assert {**first, **second} == expected


@HOOKS_REGISTRY.register_module(force=True)
class Spoil(Hook):
    """Multiplies the images of one iteration."""

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == 12:
            data_batch["inputs"].mul_(1e6)


def watched(rank: int, folder: Path, engine: str) -> None:
    hooks = [{"type": "Spoil"}, {"type": "WatchHook", "every": 2, "keep": 2}]
    sgd = {"type": "SGD", "lr": 1e-3, "momentum": 0.9}  # torch saves a stateless one by taking a step of its own
    wrapper = {"type": "OptimWrapper", "optimizer": sgd, "clip_grad": {"max_norm": 0.5}}
    changes = {"custom_hooks": hooks, "optim_wrapper": wrapper, "strategy": strategy(engine=engine)}
    changes["train_cfg"] = {"by_epoch": True, "max_epochs": 5, "val_interval": 5}
    runner_of(config(folder, 2, **changes)).train()


@pytest.mark.sample("fsdp2")
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_a_watch_names_where_the_norm_jumped(tmp_path: Path, engine: str) -> None:
    run_ranks(watched, 2, tmp_path, engine)
    [record] = (tmp_path / "watch").iterdir()
    assert record.name == "step_000012"
    assert len(list(record.iterdir())) == 2
    steps = sorted({item.key.step for item in mmfsdp.compare(record, record).compared})
    assert steps == [10, 12, 13, 14]


def test_a_watch_of_several_optimizers(tmp_path: Path) -> None:
    """Each has its usual norm, also if one steps every second time."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    wrappers = OptimWrapperDict(
        small=OptimWrapper(torch.optim.SGD(model[0].parameters(), 1e-4), clip_grad={"max_norm": 1.0}),
        large=OptimWrapper(torch.optim.SGD(model[1].parameters(), 1e-4), 2, clip_grad={"max_norm": 1.0}),
    )
    hook = WatchHook(every=1, keep=2)
    hook.before_train(SimpleNamespace(optim_wrapper=wrappers, work_dir=tmp_path, iter=0, model=model))
    for step in range(24):
        loss = model(torch.randn(8, 4)).square().mean()
        wrappers["small"].update_params(loss * (1e3 if step == 20 else 1.0))
        hidden = model[0](torch.randn(8, 4)).detach()
        wrappers["large"].update_params(model[1](hidden).square().mean() * 1e3)
    hook.after_train(SimpleNamespace())
    [record] = (tmp_path / "watch").iterdir()
    assert record.name == "step_000010"  # the last one steps every second time
