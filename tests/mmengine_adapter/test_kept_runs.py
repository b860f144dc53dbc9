"""A run under MMEngine that is killed, asked to leave, or cannot save ends like one that was left alone."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.registry import DATASETS, HOOKS
from tests.mmengine_adapter.test_resuming import state_of
from tests.mmengine_adapter.toy import History, ToyData, config, loader, runner_of, strategy

from mmfsdp import errors, model_state_dict
from mmfsdp.saving import PendingSave
from mmfsdp.saving.loop import step_messages
from mmfsdp.testing import close_ranks, run_ranks, single_rank
from mmfsdp_mmengine.checkpoints import strategy_states

KINDS = {"epoch": ("full", True), "iter": ("local", False)}  # of checkpoints, and whether in the background
LOOPS: dict[str, dict[str, Any]] = {
    "epoch": {"by_epoch": True, "max_epochs": 2, "val_interval": 1},
    "iter": {"type": "IterBasedTrainLoop", "max_iters": 8, "val_interval": 3},
}


@pytest.fixture(autouse=True, scope="module")
def fresh_ranks() -> Iterator[None]:
    """End the ranks that are about to leave as soon as their time is over."""
    yield
    close_ranks()


@DATASETS.register_module(force=True)
class SlowData(ToyData):
    """Takes long to load a sample, once."""

    pause: ClassVar[float] = 0.0

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        pause, SlowData.pause = self.pause, 0.0
        time.sleep(pause)
        return super().__getitem__(index)


@HOOKS.register_module(force=True)
class Signals(Hook):
    """Sends a rank a signal at some moment of the sixth iteration, or of the validation after the fourth."""

    priority = "VERY_HIGH"

    def __init__(self, moment: str, to: int = 1) -> None:
        self.moment, self.to = moment, to

    def come(self, runner: Any, moment: str) -> None:
        # What is saved in one file, the first rank gathers, which alone calls hooks.
        if moment == self.moment and runner.rank == (0 if moment == "saving" else self.to):
            # torchrun sends it to the process group of a rank, to the workers of data loaders too.
            for child in multiprocessing.active_children():
                subprocess.run(["kill", "-TERM", str(child.pid)], check=True)
            os.kill(os.getpid(), signal.SIGUSR1 if moment == "step" else signal.SIGTERM)

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter in (0, 5):
            self.come(runner, "step" if runner.iter else "start-up")

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if runner.iter == 4 and self.moment == "loading" and runner.rank == self.to:
            SlowData.pause = 0.3
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()

    def after_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if runner.iter in (3, 4) and batch_idx == 1:
            self.come(runner, "validation")

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        if runner.iter in (3, 4):
            self.come(runner, "saving")


def settings_of(folder: Path, ranks: int, loop: str, moment: str = "", **hook: Any) -> dict[str, Any]:
    sampler = "InfiniteSampler" if loop == "iter" else "DefaultSampler"
    data = {**loader(8 // ranks, shuffle=True), "sampler": {"type": sampler, "shuffle": True}}
    data["dataset"] = {"type": "SlowData"}
    by_epoch, (kind, background) = loop == "epoch", KINDS[loop]
    checkpoint = {"type": "CheckpointHook", "interval": 1 if by_epoch else 4, "by_epoch": by_epoch}
    checkpoint |= {"background": background, **hook}
    changes: dict[str, Any] = {
        "train_dataloader": data,
        "train_cfg": LOOPS[loop],
        "strategy": strategy(kind),
        "default_hooks": {"checkpoint": {"save_best": "accuracy", "max_keep_ckpts": 1, **checkpoint}},
        "custom_hooks": [
            {"type": "History"},
            {"type": "EMAHook", "momentum": 0.1},
            {"type": "Signals", "moment": moment},
        ],
        "resume": True,
    }
    settings = config(folder, ranks, **changes)
    settings["optim_wrapper"]["accumulative_counts"] = 1
    return settings


def end_of(runner: Any) -> Any:
    history = next(hook for hook in runner.hooks if isinstance(hook, History))
    return history.losses, history.metrics, state_of(runner)


def leave_and_resume(rank: int, folder: Path, loop: str, moments: list[str], ranks: int, then: int) -> dict[str, Any]:
    """Run to the end; and for each moment until the ranks leave, then to the end if there are as many ranks."""
    step_messages._OFTEN = 0.0  # a message per step, however fast
    found: dict[str, Any] = {}
    runner = runner_of(settings_of(folder / "whole", ranks, loop))
    runner.train()
    found["whole"] = end_of(runner)
    for moment in moments:
        runner = runner_of(settings_of(folder / moment, ranks, loop, moment, exit_code=76, grace_seconds=600))
        with pytest.raises(SystemExit, match="76"):
            runner.train()
        losses, metrics, _ = end_of(runner)
        found[moment] = runner.iter, losses, metrics, finish(rank, folder / moment, loop, ranks) if then else None
    return found


def finish(rank: int, folder: Path, loop: str, ranks: int) -> Any:
    runner = runner_of(settings_of(folder, ranks, loop))
    runner.train()
    return end_of(runner)


def names(folder: Path) -> list[str]:
    return sorted(place.name for place in folder.glob("[!.]*.pth*"))


MOMENTS = ["start-up", "loading", "step", "saving", "validation"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("loop", LOOPS)
def test_whenever_a_signal_comes_ranks_save_leave_and_resume_exactly(tmp_path: Path, loop: str) -> None:
    moments = MOMENTS if loop == "epoch" else MOMENTS[2:]  # the others are the same in every loop
    found = run_ranks(leave_and_resume, 2, tmp_path, loop, moments, 2, 1)
    kept = names(tmp_path / "whole")
    for own, other in zip(found, reversed(found), strict=True):
        losses, metrics, state = own["whole"]
        for moment in moments:
            left, before, validated, (after, more, end) = own[moment]
            assert left == other[moment][0], moment
            assert before + after == losses, moment
            assert validated + more == metrics, moment
            assert end == state, moment
            # The checkpoint that was saved on leaving is gone.
            assert names(tmp_path / moment) == kept, moment
    assert len(found[0]["validation"][1]) == (4 if loop == "epoch" else 3)


@pytest.mark.exhaustive
def test_on_one_rank_a_run_of_two_goes_on_with_the_same_samples(tmp_path: Path) -> None:
    found = run_ranks(leave_and_resume, 2, tmp_path, "epoch", ["step"], 2, 0)[0]
    losses, metrics, _ = found["whole"]
    left, before, _, _ = found["step"]
    [(after, more, _)] = run_ranks(finish, 1, tmp_path / "step", "epoch", 1)
    assert left == 6  # within the second epoch
    assert before + after == pytest.approx(losses, rel=1e-5)
    assert more == metrics[1:]


def alone(folder: Path, **hook: Any) -> dict[str, Any]:
    """Settings for ten iterations on one rank, without validation."""
    checkpoint = {"type": "CheckpointHook", "interval": 1, "by_epoch": False, **hook}
    changes = {"train_cfg": {"by_epoch": False, "max_iters": 10}, "default_hooks": {"checkpoint": checkpoint}}
    settings = config(folder, 1, strategy=strategy("sharded"), param_scheduler=None, **changes)
    settings["optim_wrapper"]["accumulative_counts"] = 1
    return {**settings, "val_dataloader": None, "val_evaluator": None, "val_cfg": None, "resume": True}


def leave_while_accumulating(rank: int, folder: Path) -> int:
    step_messages._OFTEN = 0.0
    settings = alone(folder, interval=100, exit_code=3, grace_seconds=600)
    settings["optim_wrapper"]["accumulative_counts"] = 3
    settings["custom_hooks"] += [{"type": "Signals", "moment": "start-up", "to": 0}]
    # The ranks of tests are daemons, which may not start the workers of a data loader.
    vars(multiprocessing.current_process())["_config"]["daemon"] = False
    settings["train_dataloader"]["num_workers"] = 1
    with pytest.raises(SystemExit, match="3"):
        runner_of(settings).train()
    runner = runner_of(alone(folder, interval=100, grace_seconds=None))
    runner.train()
    return len(end_of(runner)[0])


@pytest.mark.exhaustive
def test_ranks_leave_after_whole_steps_only(tmp_path: Path) -> None:
    assert run_ranks(leave_while_accumulating, 1, tmp_path) == [4]  # after the sixth of ten iterations


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process."""
    with single_rank():
        yield


@pytest.mark.usefixtures("one_rank")
class TestAlone:
    @pytest.mark.exhaustive
    def test_by_minutes_and_in_the_background(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(step_messages, "_OFTEN", 0.0)
        whole = runner_of(alone(tmp_path / "whole", interval=-1))
        whole.train()
        runner = runner_of(alone(tmp_path / "run", interval=4, every_minutes=1e-9, background=True, max_keep_ckpts=1))
        seen: list[list[str]] = []
        runner.register_hook(Notes(seen, tmp_path / "run"), "LOWEST")
        runner.train()
        assert end_of(runner)[0] == end_of(whole)[0]
        # At most the newest regular one, the newest other one, and the next of either, which may be half written.
        assert max(map(len, seen)) <= 4
        assert any(name in ("iter_3.pth", "iter_5.pth") for names in seen for name in names)
        assert names(tmp_path / "run") == ["iter_10.pth"]
        assert (tmp_path / "run" / "last_checkpoint").read_text() == str(tmp_path / "run" / "iter_10.pth")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    @pytest.mark.exhaustive
    def test_every_nth_stays(self, tmp_path: Path) -> None:
        runner_of(alone(tmp_path, max_keep_ckpts=2, keep_period=4)).train()
        assert names(tmp_path) == ["iter_10.pth", "iter_4.pth", "iter_8.pth", "iter_9.pth"]

    @pytest.mark.sample("False")
    @pytest.mark.parametrize("background", [False, True])
    def test_a_save_that_fails_is_tried_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(step_messages, "_OFTEN", 0.0)
        monkeypatch.setattr(step_messages, "_SLOW", float("inf"))  # a busy machine's steps are not waited for either
        write, fails = strategy_states.write_checkpoint, iter([False, True, True, False, False])

        def writing(*args: Any, **kwargs: Any) -> Any:
            if not next(fails):
                return write(*args, **kwargs)
            if not background:
                raise errors.CheckpointError("The disk is full.")
            failed: Future[None] = Future()
            failed.set_exception(errors.CheckpointError("The disk is full."))
            return PendingSave(failed)

        monkeypatch.setattr(strategy_states, "write_checkpoint", writing)
        runner = runner_of(alone(tmp_path, interval=3, max_keep_ckpts=1, background=background, save_last=False))
        with caplog.at_level(logging.ERROR, "mmfsdp.saving"):
            runner.train()
        # Step 3 is saved, 6 and the one after it are not, a later one is. In the background that comes a step later.
        assert [record.message.partition(";")[0] for record in caplog.records] == [
            "Step 6 was not saved",
            f"Step {8 if background else 7} was not saved",
        ]
        assert names(tmp_path) == ["iter_9.pth"]

    @pytest.mark.exhaustive
    def test_if_no_save_succeeds_the_end_is_an_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def failing(*args: Any, **kwargs: Any) -> Any:
            raise errors.CheckpointError("The disk is full.")

        monkeypatch.setattr(strategy_states, "write_checkpoint", failing)
        with pytest.raises(errors.CheckpointError, match="saves of this run failed"):
            runner_of(alone(tmp_path, interval=5)).train()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        with pytest.raises(errors.CheckpointError, match=r"The disk is full\."):
            runner_of(alone(tmp_path, interval=5, raise_errors=True)).train()
        assert not (tmp_path / "last_checkpoint").exists()

    @pytest.mark.exhaustive
    def test_damaged_ones_are_renamed(self, tmp_path: Path) -> None:
        whole = runner_of(alone(tmp_path, interval=4))
        whole.train()
        weights = model_state_dict(whole.model)["head.weight"].numpy().tobytes()
        [data] = (tmp_path / "iter_10.pth").glob("*.distcp")
        assert weights in data.read_bytes()
        data.write_bytes(data.read_bytes().replace(weights, bytes([weights[0] ^ 1]) + weights[1:]))
        for file in (tmp_path / "iter_8.pth").glob("*.distcp"):
            file.write_bytes(file.read_bytes()[:-9])
        runner = runner_of(alone(tmp_path, interval=-1, save_last=False))
        runner.train()
        assert end_of(runner)[0] == end_of(whole)[0][4:]
        assert names(tmp_path) == ["iter_10.pth.damaged", "iter_4.pth", "iter_8.pth.damaged"]
        for file in (tmp_path / "iter_4.pth").glob("*.distcp"):
            file.write_bytes(file.read_bytes()[:-9])
        with pytest.raises(errors.IncompleteCheckpointError, match="set resume=False to train from the beginning"):
            runner_of(alone(tmp_path)).train()

    def test_more_settings_need_the_strategy(self, tmp_path: Path) -> None:
        settings = {**alone(tmp_path, every_minutes=5.0), "strategy": {"type": "SingleDeviceStrategy"}}
        with pytest.raises(errors.ConfigError, match="fast_directory and keep_period of CheckpointHook need"):
            runner_of(settings).train()
        with pytest.raises(errors.ConfigError, match="keep_period=2 must be 1 or more, and needs max_keep_ckpts"):
            runner_of(alone(tmp_path, keep_period=2))


class Notes(Hook):
    """Notes the checkpoints that there are after each iteration."""

    def __init__(self, seen: list[list[str]], folder: Path) -> None:
        self.seen, self.folder = seen, folder

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.seen.append(names(self.folder))
