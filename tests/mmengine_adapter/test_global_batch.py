"""A global batch that stays the same on any number of ranks: the same samples in each step, in parts if need be."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import HOOKS, MODELS
from mmengine.runner import Runner
from tests.mmengine_adapter.toy import POLICY, History, ToyModel, config, loader, runner_of, strategy

from mmfsdp import errors
from mmfsdp.testing import run_ranks, single_rank
from mmfsdp_mmengine.configs.global_batch import Parts, collate_in_parts


@HOOKS.register_module(force=True)
class NotesSamples(Hook):
    """Notes a number of each sample that this rank sees in an iteration, and the sizes of parts."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []
        self.sizes: set[int] = set()

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        parts = data_batch if isinstance(data_batch, Parts) else [data_batch]
        self.sizes |= {len(part["labels"]) for part in parts}
        self.seen.append([image.sum().item() for part in parts for image in part["inputs"]])


@MODELS.register_module(force=True)
class StepsByItself(ToyModel):
    """Steps without the optimizer wrapper's ``update_params``."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, torch.Tensor]:
        losses = self(**self.data_preprocessor(data, True), mode="loss")
        losses["loss"].backward()
        optim_wrapper.step()
        optim_wrapper.zero_grad()
        return losses


def settings_of(folder: Path, ranks: int, **changes: Any) -> dict[str, Any]:
    """The same on any number of ranks: two samples at once, eight per iteration, and a step every two iterations."""
    checkpoint = {"type": "CheckpointHook", "interval": 2, "by_epoch": False}
    settings = config(
        folder,
        ranks,
        train_dataloader=loader(2, shuffle=True),
        strategy={**strategy("local"), "global_batch_size": 8},
        default_hooks={"checkpoint": checkpoint},
        custom_hooks=[{"type": "History"}, {"type": "NotesSamples"}],
        **changes,
    )
    return {**settings, "val_dataloader": None, "val_evaluator": None, "val_cfg": None}


def train(rank: int, folder: Path, ranks: int, changes: dict[str, Any], plain: bool = False) -> Any:
    settings = settings_of(folder, ranks, **changes)
    if plain:
        wrapper = {"type": "MMFullyShardedDataParallel", "auto_wrap_policy": POLICY}
        settings |= {"model_wrapper_cfg": wrapper, "launcher": "pytorch", "global_batch_size": 8}
        del settings["strategy"]
        runner: Any = Runner.from_cfg(Config({**settings, "experiment_name": str(folder)}))
    else:
        runner = runner_of(settings)
    runner.train()
    [history] = [hook for hook in runner.hooks if isinstance(hook, History)]
    [notes] = [hook for hook in runner.hooks if isinstance(hook, NotesSamples)]
    return history.losses, history.norms, notes.seen, notes.sizes


def together(results: list[Any]) -> list[list[float]]:
    """The samples of all ranks, by iteration."""
    return [sorted(itertools.chain(*seen)) for seen in zip(*[result[2] for result in results], strict=True)]


@pytest.mark.exhaustive
def test_four_ranks_two_and_one_take_the_same_steps(tmp_path: Path) -> None:
    whole = run_ranks(train, 4, tmp_path / "four", 4, {})
    losses, norms, _, sizes = whole[0]
    assert sizes == {2}
    assert len(losses) == 8
    saved = {"load_from": str(tmp_path / "four" / "iter_6.pth"), "resume": True}  # within the second epoch
    two = run_ranks(train, 2, tmp_path / "two", 2, saved)
    [one] = run_ranks(train, 1, tmp_path / "one", 1, {}, True)
    assert two[0][3] == one[3] == {2}
    assert together(two) == together(whole)[6:]
    assert together([one]) == together(whole)
    assert two[0][0] == pytest.approx(losses[6:], rel=1e-5)
    assert two[0][1] == pytest.approx(norms[-2:], rel=1e-4)
    assert one[0] == pytest.approx(losses, rel=1e-5)
    assert one[1] == pytest.approx(norms, rel=1e-4)


def other_batches(rank: int, folder: Path, ranks: int, loop: str, batch: int, resumes: bool) -> list[list[float]]:
    """Train with batches of some size on each rank, without ``global_batch_size``; return the samples by iteration."""
    data = loader(batch, shuffle=True)
    cfg: dict[str, Any] = {"by_epoch": True, "max_epochs": 2, "val_interval": 9}
    if loop == "iter":
        data["sampler"] = {"type": "InfiniteSampler", "shuffle": True}
        cfg = {"type": "IterBasedTrainLoop", "max_iters": 9}
    settings = settings_of(folder, ranks, train_cfg=cfg, param_scheduler=None)
    settings |= {"train_dataloader": data, "strategy": strategy("local"), "resume": resumes, "log_level": "WARNING"}
    runner = runner_of(settings)
    runner.train()
    [notes] = [hook for hook in runner.hooks if isinstance(hook, NotesSamples)]
    return notes.seen


@pytest.mark.sample("iter")
@pytest.mark.parametrize("loop", ["epoch", "iter"])
def test_batches_of_another_size_go_on_with_the_next_sample(tmp_path: Path, loop: str) -> None:
    with single_rank():
        whole = [*itertools.chain(*other_batches(0, tmp_path, 1, loop, 8, False))]
    for place in tmp_path.glob("iter_[!2].pth"):  # two iterations are done: 16 of 32 samples
        shutil.rmtree(place)
    found = run_ranks(other_batches, 2, tmp_path, 2, loop, 3, True)
    rest = [sorted(itertools.chain(*step)) for step in zip(*found, strict=True)]
    if loop == "iter":
        assert rest == [sorted(whole[16 + 6 * at :][:6]) for at in range(7)]
    else:
        assert [len(step) for step in rest] == [6, 6, 4, 6, 6, 6, 6, 6, 2]
        order = [*whole[16:32], *whole[32:]]
        assert rest[:3] == [sorted(order[at : at + size]) for at, size in ((0, 6), (6, 6), (12, 4))]
        assert sorted(itertools.chain(*rest[3:])) == sorted(whole[32:])
    [log] = [file for file in tmp_path.glob("*/*.log") if "Set global_batch_size=8" in file.read_text()]
    assert "take 6 samples per iteration, and took 8" in log.read_text()
    if loop == "iter":  # what is saved now has counted batches of both sizes
        shutil.rmtree(tmp_path / "iter_9.pth")
        with single_rank():
            [again] = other_batches(0, tmp_path, 1, loop, 4, True)
        assert again == whole[52:56]


def not_divided(rank: int, folder: Path) -> str:
    with pytest.raises(errors.ConfigError) as found:
        runner_of(settings_of(folder, 3))
    return str(found.value)


def test_what_cannot_be_divided_says_what_can(tmp_path: Path) -> None:
    [said, *_] = run_ranks(not_divided, 3, tmp_path)
    assert "A global batch of 8 cannot be shared by 3 ranks evenly. Run on 2 ranks" in said


def test_what_cannot_accumulate_is_named(tmp_path: Path) -> None:
    with single_rank():
        with pytest.raises(errors.ConfigError, match=r"needs a step that calls update_params\(\) of each OptimWrapper"):
            runner_of(settings_of(tmp_path, 1, model={"type": "StepsByItself"})).train()
        settings = settings_of(tmp_path, 1)
        del settings["train_dataloader"]["batch_size"]
        with pytest.raises(errors.ConfigError, match=r"needs train_dataloader=dict\(batch_size="):
            runner_of(settings)


def test_parts_of_a_last_batch_differ_by_one_at_most() -> None:
    sizes = [[len(part) for part in collate_in_parts([*range(count)], 3, list, {})] for count in (9, 8, 7, 2)]
    assert sizes == [[3, 3, 3], [2, 3, 3], [2, 2, 3], [1, 1]]
