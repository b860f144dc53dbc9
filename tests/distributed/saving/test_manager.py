"""CheckpointManager: a run that stops and resumes ends as one that did not, and nothing is lost or overwritten."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import signal
import subprocess
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.distributed.store_runs import continue_to
from tests.forked_scripts import environ_alone, python
from torch import nn

import mmfsdp
from mmfsdp import errors
from mmfsdp.checkpoint import open_layout
from mmfsdp.checkpoint.files.siblings import Kind, Lease, new_token, sibling
from mmfsdp.saving.directory.run import Retention, RunDirectory
from mmfsdp.saving.loop import ledger as save_ledger
from mmfsdp.saving.loop import step_messages
from mmfsdp.saving.writing import save as save_module
from mmfsdp.testing import run_ranks, single_rank

BATCH = 12
STEPS = 9


class Counter:
    """An object of a user, equal on every rank unless told otherwise."""

    def __init__(self) -> None:
        self.seen: Any = 0
        self.inexact: str | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "history": torch.arange(3.0)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


def build(width: int = 9) -> nn.Module:
    torch.manual_seed(0)
    return mmfsdp.shard(nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3)))


def train(rank: int, folder: str | None, begin: int, end: int, noise: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Train from the newest checkpoint up to a step, or without a manager, and return all that the run is made of."""
    model, averaged, counter = build(), build(), Counter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    torch.manual_seed(rank)
    random.seed(rank)
    manager, first = None, 0
    if folder is not None:
        manager = mmfsdp.CheckpointManager(
            folder, model, optimizer, schedulers=scheduler, averaged=averaged, state={"counter": counter}, **options
        )
        first = manager.resume()
        assert first == begin
    for step in range(first, end):
        rows = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(step))[rank :: dist.get_world_size()]
        if noise:
            rows = F.dropout(rows) + random.random()
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        with torch.no_grad():
            for ours, theirs in zip(averaged.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)
        counter.seen += BATCH
        if manager is not None:
            metric = torch.tensor(abs(step - 3.2), requires_grad=True)  # as a loss
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                manager.step(step + 1, metric=metric)
    if manager is not None:
        manager.close()
        assert manager.failed_saves == 0
    return {
        "weights": mmfsdp.model_state_dict(model, rank0_only=False),
        "optimizer": mmfsdp.optim_state_dict(model, optimizer, rank0_only=False),
        "averaged": mmfsdp.model_state_dict(averaged, rank0_only=False),
        "rate": scheduler.get_last_lr(),
        "seen": counter.seen,
        "draws": (torch.rand(3), random.random()) if noise else None,
    }


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


@pytest.mark.sample("local")
@pytest.mark.parametrize("kind", ["sharded", "local", "full"])
def test_a_resumed_run_ends_as_one_that_never_stopped(kind: str, tmp_path: Path) -> None:
    whole = run_ranks(train, 2, None, 0, STEPS, True, {})
    options = {"every_steps": 2, "max_to_keep": 1, "kind": kind}
    run_ranks(train, 2, str(tmp_path / "run"), 0, 5, True, options)
    resumed = run_ranks(train, 2, str(tmp_path / "run"), 4, STEPS, True, options)
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
    assert kept(tmp_path / "run") == ["run.json", "step_8.pth" if kind == "full" else "step_8"]


@pytest.mark.sample("1")
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_resumes_on_other_ranks(ranks: int, tmp_path: Path) -> None:
    whole = run_ranks(train, 2, None, 0, STEPS, False, {})[0]
    run_ranks(train, 2, str(tmp_path), 0, 4, False, {"every_steps": 2})
    resumed = run_ranks(train, ranks, str(tmp_path), 4, STEPS, False, {"every_steps": 2})[0]
    torch.testing.assert_close(resumed, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
def test_the_best_the_newest_and_periodic_ones_stay(tmp_path: Path) -> None:
    options = {"every_steps": 1, "max_to_keep": 2, "keep_period": 4, "keep_best": 1}
    run_ranks(train, 2, str(tmp_path), 0, 7, False, options)
    # Step 4 (step 3 counted from 0) has the smallest metric, and is the fourth.
    assert kept(tmp_path) == ["run.json", "step_4", "step_6", "step_7"]
    run_ranks(train, 2, str(tmp_path), 7, STEPS, False, {**options, "keep_period": None})
    assert kept(tmp_path) == ["run.json", "step_4", "step_8", "step_9"]


@pytest.mark.parametrize(
    ("retention", "removed"),
    [
        (Retention(), []),
        (Retention(1), [1, 2, 3, 4]),
        (Retention(1, keep_period=2), [1, 3]),
        (Retention(2, keep_best=1), [1, 2]),
        (Retention(2, keep_best=2), [2]),
        (Retention(2, keep_best=1, best_mode="max"), [1, 3]),
        (Retention(9), []),
    ],
)
def test_what_is_removed(retention: Retention, removed: list[int]) -> None:
    metrics = {1: 0.2, 2: 0.9, 3: 0.1, 4: float("nan")}
    assert retention.to_remove([5, 3, 1, 2, 4], metrics) == removed


def flip_bit(path: Path) -> None:
    """Change one bit of a weight in a checkpoint."""
    chunk = open_layout(path).tensors["state_dict/2.weight"].chunks()[-1]
    with chunk.file.open("r+b") as file:
        file.seek(chunk.offset)
        [byte] = file.read(1)
        file.seek(chunk.offset)
        file.write(bytes([byte ^ 4]))


def test_damaged_and_incomplete_checkpoints_are_skipped(tmp_path: Path) -> None:
    whole = run_ranks(train, 2, None, 0, STEPS, True, {})
    run_ranks(train, 2, str(tmp_path), 0, 6, True, {"every_steps": 2})
    flip_bit(tmp_path / "step_4")
    next((tmp_path / "step_6").glob("__1_*")).unlink()
    resumed = run_ranks(train, 2, str(tmp_path), 2, STEPS, True, {"every_steps": 2})
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
    names = ["run.json", "step_2", "step_4", "step_4.damaged", "step_6", "step_6.damaged", "step_8"]
    assert kept(tmp_path) == names


def refusal(rank: int, folder: str, options: dict[str, Any], resume: bool) -> str:
    model = build(options.pop("width", 9))
    optimizer = torch.optim.AdamW(model.parameters())
    manager = None
    try:
        manager = mmfsdp.CheckpointManager(folder, model, optimizer, every_steps=1, **options)
        if resume:
            manager.resume()
        manager.step(1)
    except errors.MmfsdpError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if manager is not None:
            manager.__exit__(RuntimeError, None, None)
    return "accepted"


def test_foreign_directories_are_refused_on_every_rank(tmp_path: Path) -> None:
    state = {"every_steps": 2, "run": "first"}
    run_ranks(train, 2, str(tmp_path), 0, 2, False, state)
    before = kept(tmp_path)
    for options, resume, part in (
        ({"run": "second"}, True, "belongs to run 'first', not to 'second'"),
        ({"width": 8}, True, "checkpoints of another model"),
        ({}, False, "Call resume() before the first step"),
        ({}, True, "holds the state of 'averaged', 'counter', 'scheduler 0', and this run has none"),
    ):
        told = run_ranks(refusal, 2, str(tmp_path), options, resume)
        assert all("RunDirectoryError" in text and part in text for text in told), told
    assert kept(tmp_path) == before


def test_no_checkpoint_that_loads_is_an_error(tmp_path: Path) -> None:
    run_ranks(train, 2, str(tmp_path), 0, 2, False, {"every_steps": 2})
    (tmp_path / "step_2" / ".metadata").unlink()
    told = run_ranks(refusal, 2, str(tmp_path), {}, True)
    assert all("None of the 1 checkpoints in the directory can be loaded" in text for text in told), told
    assert (tmp_path / "step_2").is_dir()


def other_objects(rank: int, folder: str, averaged_width: int | None) -> tuple[str, bool]:
    """Resume with objects that do not fit, and return the error and whether weights and counter are untouched."""
    model, counter = build(), Counter()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    before = mmfsdp.model_state_dict(model, rank0_only=False)
    manager = mmfsdp.CheckpointManager(
        folder,
        model,
        optimizer,
        schedulers=scheduler,
        state={"counter": counter},
        averaged=None if averaged_width is None else build(averaged_width),
    )
    with pytest.raises(errors.MmfsdpError) as caught:
        manager.resume()
    manager.__exit__(RuntimeError, None, None)
    after = mmfsdp.model_state_dict(model, rank0_only=False)
    untouched = all(torch.equal(after[name], value) for name, value in before.items())
    return str(caught.value), untouched and counter.seen == 0 and not optimizer.state


def test_nothing_is_loaded_if_an_object_does_not_fit(tmp_path: Path) -> None:
    run_ranks(train, 2, str(tmp_path), 0, 2, False, {"every_steps": 2})
    for width, part in ((None, "and this run has 'counter', 'scheduler 0'"), (8, "do not fit the averaged model")):
        told = run_ranks(other_objects, 2, str(tmp_path), width)
        assert all(part in text and untouched for text, untouched in told), told


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "Adam": {},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "RMSprop": {},
    "Adagrad": {},
    "NAdam": {},
}


def load_each_into_each(rank: int, folder: str) -> dict[str, str]:
    """Resume from, and load, the state of each class of optimizer with each other one; return what was not refused."""
    found = {}
    for saved, settings in OPTIMIZERS.items():
        model = build()
        optimizer = getattr(torch.optim, saved)(model.parameters(), **settings)
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        with mmfsdp.CheckpointManager(f"{folder}/{saved}", model, optimizer) as manager:
            manager.save(1)
        mmfsdp.save_checkpoint(f"{folder}/{saved}.pth", model, optimizer, kind="full")
        by_name = mmfsdp.optim_state_dict(model, optimizer, "sharded", by_name=True)
        for own, others in OPTIMIZERS.items():
            model = build()
            optimizer = getattr(torch.optim, own)(model.parameters(), **others)
            weights = mmfsdp.model_state_dict(model, rank0_only=False)
            before = len(optimizer.state), dict(optimizer.param_groups[0])
            manager = mmfsdp.CheckpointManager(f"{folder}/{saved}", model, optimizer)
            ways = {
                "resume": manager.resume,
                "load": partial(mmfsdp.load_checkpoint, f"{folder}/{saved}.pth", model, optimizer),
                "by name": partial(mmfsdp.load_optim_state_dict, model, optimizer, by_name),
            }
            for way, load in ways.items():
                try:
                    load()
                    found[f"{saved} {own} {way}"] = "loaded"
                    mmfsdp.load_model_state_dict(model, weights)
                except (errors.RunDirectoryError, errors.StateDictError) as error:
                    found[f"{saved} {own} {way}"] = str(error)
                    after = mmfsdp.model_state_dict(model, rank0_only=False)
                    assert all(torch.equal(after[name], value) for name, value in weights.items())
                    assert (len(optimizer.state), optimizer.param_groups[0]) == before, (saved, own, way)
            manager.__exit__(RuntimeError, None, None)
    return found


@pytest.mark.exhaustive
def test_the_state_of_another_class_of_optimizer_is_refused(tmp_path: Path) -> None:
    found, other = run_ranks(load_each_into_each, 2, str(tmp_path))
    loaded = {name for name, outcome in found.items() if outcome == "loaded"}
    assert loaded == {name for name, outcome in other.items() if outcome == "loaded"}
    same = {f"{name} {name} {way}" for name in OPTIMIZERS for way in ("resume", "load", "by name")}
    # In a file of torch nothing tells AdamW from Adam with decoupled weight decay, which it is.
    assert loaded == same | {f"AdamW Adam {way}" for way in ("load", "by name")}
    for name, outcome in found.items():
        saved, _, way = name.split(maxsplit=2)
        expected = f"the state of optimizer {saved}, and" if way == "resume" else "was saved by another optimizer than"
        assert name in loaded or expected in outcome, outcome


def resume_with(rank: int, folder: str, lr: float, schedule: str) -> tuple[int | str, list[str]]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    rates = torch.optim.lr_scheduler
    scheduler: Any = {
        "step": lambda: rates.StepLR(optimizer, 2, 0.7),
        "cosine": lambda: rates.CosineAnnealingLR(optimizer, 10),
        "constant, then cosine": lambda: rates.SequentialLR(
            optimizer, [rates.ConstantLR(optimizer), rates.CosineAnnealingLR(optimizer, 10)], [2]
        ),
        "linear, then cosine": lambda: rates.SequentialLR(
            optimizer, [rates.LinearLR(optimizer), rates.CosineAnnealingLR(optimizer, 10)], [2]
        ),
    }[schedule]()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mmfsdp.state").addHandler(handler)
    manager = mmfsdp.CheckpointManager(folder, model, optimizer, schedulers=scheduler)
    try:
        step: int | str = manager.resume()
    except errors.RunDirectoryError as error:
        manager.__exit__(RuntimeError, None, None)
        return str(error), said
    for _ in range(3):
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        scheduler.step()
    manager.save(int(step) + 3)
    manager.close()
    return step, said


@pytest.mark.exhaustive
def test_what_a_checkpoint_says_of_another_run_is_refused_or_reported(tmp_path: Path) -> None:
    def resume(folder: str, lr: float, schedule: str) -> tuple[int | str, list[str]]:
        return run_ranks(resume_with, 1, str(tmp_path / folder), lr, schedule)[0]

    assert resume("a", 0.01, "step") == (0, [])
    assert resume("a", 0.01, "step") == (3, [])  # though the rate is another one by now
    step, said = resume("a", 0.02, "step")
    assert step == 6
    assert "replaces settings of AdamW: initial_lr=0.02 by 0.01 in param group 0." in said[0]
    assert "of scheduler 0 StepLR, and this run has CosineAnnealingLR" in str(resume("a", 0.01, "cosine")[0])
    assert resume("b", 0.01, "linear, then cosine")[0] == 0
    assert "has SequentialLR(ConstantLR, CosineAnn" in str(resume("b", 0.01, "constant, then cosine")[0])
    shutil.copytree(tmp_path / "a" / "step_6", tmp_path / "a" / "step_12")
    assert "By its name the checkpoint has done 12 steps, but it holds step 6" in str(resume("a", 0.01, "step")[0])
    shutil.rmtree(tmp_path / "a" / "step_12")
    assert resume("a", 0.01, "step")[0] == 9


def scale(rank: int, folder: str | None, end: int) -> tuple[float, dict[str, Any], dict[str, Any]]:
    """Train with a gradient scaler whose scale grows every third step, and shrinks where a loss is infinite."""
    model, scaler = build(), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = None if folder is None else mmfsdp.CheckpointManager(folder, model, optimizer, scaler=scaler)
    for step in range(0 if manager is None else manager.resume(), end):
        rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(rows).square().mean()
        scaler.scale(loss * (float("inf") if step == 1 and rank == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    if manager is not None:
        manager.save(end)
        manager.close()
    return scaler.get_scale(), scaler.state_dict(), mmfsdp.model_state_dict(model, rank0_only=False)


@pytest.mark.exhaustive
def test_a_gradient_scaler_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = run_ranks(scale, 2, None, 8)
    assert whole[0][0] == 16.0  # halved in the second step, doubled in the fifth and eighth
    run_ranks(scale, 2, str(tmp_path), 4)
    assert torch.equal(torch.tensor(run_ranks(scale, 2, str(tmp_path), 4)[0][0]), torch.tensor(4.0))
    resumed = run_ranks(scale, 2, str(tmp_path), 8)
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


HOLDER = """
import os, sys, time
from pathlib import Path
from mmfsdp.saving.directory.run import RunDirectory
held = RunDirectory(Path(sys.argv[1]), run=None, model="any")
print("held", os.getpid(), flush=True)
time.sleep(100)
"""


def test_one_job_at_a_time_and_a_dead_one_does_not_count(tmp_path: Path) -> None:
    command = [python(), "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ_alone()) as job:
        assert job.stdout is not None
        held, pid = job.stdout.readline().split()
        assert held == "held"
        with pytest.raises(errors.RunDirectoryError, match=f"Process {pid} on host '{os.uname().nodename}' is"):
            RunDirectory(tmp_path, run=None, model="any")
        os.kill(int(pid), signal.SIGKILL)
    (tmp_path / ".run.json.mmfsdp-claim").touch()  # of a process that died right after it had written the file
    RunDirectory(tmp_path, run=None, model="any").close()
    assert list(tmp_path.iterdir()) == []


HEIR = """
import ctypes, os, signal, sys
from pathlib import Path
from mmfsdp.checkpoint.files.siblings import sibling, Kind, Lease
from mmfsdp.saving.directory.run import RunDirectory
held = RunDirectory(Path(sys.argv[1]), run=None, model="any")
claim = Lease.take(Path(sys.argv[1], ".step_1.mmfsdp-claim"))
child = os.fork() if sys.argv[2] == "python" else ctypes.CDLL(None).fork()
if child == 0:
    signal.pause()  # as a logger, profiler or uploader, which a job that is killed leaves behind
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("forked_by", ["python", "a library"])
def test_a_process_forked_from_a_dead_job_does_not_hold_its_directory(forked_by: str, tmp_path: Path) -> None:
    command = [python(), "-c", HEIR, str(tmp_path), forked_by]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ_alone()) as job:
        assert job.stdout is not None
        heir = int(job.stdout.readline())
    try:
        RunDirectory(tmp_path, run=None, model="any").close()
        claim = Lease.take(tmp_path / ".step_1.mmfsdp-claim")
        assert claim is not None
        claim.release()
        assert list(tmp_path.iterdir()) == []
    finally:
        os.kill(heir, signal.SIGKILL)


def test_what_a_killed_save_left_is_removed_though_its_step_is_not_saved_again(tmp_path: Path) -> None:
    target, token = tmp_path / "step_7", new_token()
    left = sibling(target, token, Kind.PARTIAL)
    left.mkdir()
    (left / "rank0.pth").write_bytes(b"half")
    dead = Lease.take(sibling(target, token, Kind.LEASE))
    assert dead is not None
    dead.abandon()  # as a process that died
    RunDirectory(tmp_path, run=None, model="any").close()
    assert list(tmp_path.iterdir()) == []


def lose_the_directory(rank: int, folder: str, background: bool) -> tuple[int, int, bool]:
    """Train while the directory is gone for a few steps."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    path, away = Path(folder, "run"), Path(folder, "away")
    manager = mmfsdp.CheckpointManager(path, model, optimizer, every_steps=2, background=background)
    failed = -1
    for step in range(1, 8):
        dist.barrier()
        if rank == 0 and step == 3:
            path.rename(away)
            path.write_text("")
        elif rank == 0 and step == 6:
            path.unlink()
            away.rename(path)
        dist.barrier()
        manager.step(step)
        if step == 2:
            manager.wait()
        if step == 5:
            failed = manager.failed_saves
    manager.close()
    # The failures were logged and counted; the first step that could be saved was.
    return failed, manager.failed_saves, Path(path, "step_6").is_dir()


def fail_at_the_end(rank: int, folder: str, returns: bool) -> tuple[int, str]:
    """Lose the directory before the last save, and perhaps find it again before the manager is closed."""
    model = build()
    path, away = Path(folder, "run"), Path(folder, "away")
    manager = mmfsdp.CheckpointManager(path, model, every_steps=2, background=False)
    manager.step(1)
    dist.barrier()
    if rank == 0:
        path.rename(away)
        path.write_text("")
    dist.barrier()
    manager.step(2)
    manager.step(3)
    dist.barrier()
    if rank == 0 and returns:
        path.unlink()
        away.rename(path)
    dist.barrier()
    try:
        manager.close()
    except errors.CheckpointError as error:
        return manager.failed_saves, str(error)
    return manager.failed_saves, ""


def test_closing_tries_the_last_failed_save_once_more(tmp_path: Path) -> None:
    assert run_ranks(fail_at_the_end, 2, str(tmp_path / "one"), True) == [(2, "")] * 2
    assert kept(tmp_path / "one" / "run") == ["run.json", "step_3"]
    for failed, text in run_ranks(fail_at_the_end, 2, str(tmp_path / "two"), False):
        assert failed == 3
        assert "The last 3 saves of this run failed" in text


def test_saves_to_the_nodes_do_not_hide_that_durable_ones_fail(tmp_path: Path) -> None:
    with single_rank():
        fast = {"fast_directory": tmp_path / "fast", "fast_every_steps": 1}
        manager = mmfsdp.CheckpointManager(tmp_path / "run", build(), every_steps=2, background=False, **fast)
        manager.step(1)
        (tmp_path / "run").rename(tmp_path / "away")
        (tmp_path / "run").write_text("")
        for step in range(2, 6):
            manager.step(step)  # the last one is saved to the nodes alone
        with pytest.raises(errors.CheckpointError, match="The last 4 saves of this run failed"):
            manager.close()


@pytest.mark.parametrize("background", [False, True])
def test_a_failed_save_is_counted_and_tried_again(background: bool, tmp_path: Path) -> None:
    [(before, after, saved), other] = run_ranks(lose_the_directory, 2, str(tmp_path), background)
    assert (before, after, saved) == other
    assert before == after == 2  # at step 4, and again at step 5
    assert saved


def save_slowly(rank: int, folder: str, if_busy: str) -> list[bool]:
    """Save each step while rank 1 needs the time of three steps to write the first."""
    model, may_go_on = build(), threading.Event()
    write = save_module.write_rank_file

    def slowly(*args: Any, **given: Any) -> Any:
        assert may_go_on.wait(120)
        return write(*args, **given)

    save_module.write_rank_file = slowly  # type: ignore[assignment]
    with mmfsdp.CheckpointManager(folder, model, every_steps=1, kind="local", if_busy=if_busy) as manager:
        saved = []
        for step in range(1, 7):
            if step == 3 or if_busy == "wait" or rank == 0:
                may_go_on.set()
            saved.append(manager.step(step))
            if step == 3:
                manager.wait()
    save_module.write_rank_file = write
    return saved


@pytest.mark.exhaustive
def test_a_save_that_is_due_waits_or_is_skipped(tmp_path: Path) -> None:
    assert run_ranks(save_slowly, 2, str(tmp_path / "wait"), "wait") == [[True] * 6] * 2
    one, two = run_ranks(save_slowly, 2, str(tmp_path / "skip"), "skip")
    assert one == two
    assert one[:4] == [True, False, False, True]
    assert kept(tmp_path / "skip") == ["run.json", *(f"step_{at + 1}" for at, saved in enumerate(one) if saved)]


def fail_if_asked(rank: int, folder: str) -> int:
    model = build()
    path = Path(folder, "run")
    manager = mmfsdp.CheckpointManager(path, model, every_steps=1, raise_errors=True)
    dist.barrier()
    if rank == 0:
        path.rename(Path(folder, "away"))
        path.write_text("")
    dist.barrier()
    with pytest.raises(errors.CheckpointError):
        manager.step(1)
    manager.__exit__(RuntimeError, None, None)
    return manager.failed_saves


def test_a_failed_save_raises_if_asked(tmp_path: Path) -> None:
    assert run_ranks(fail_if_asked, 2, str(tmp_path)) == [1, 1]


class _Clock:
    """A clock that goes on by so many seconds whenever it is read."""

    def __init__(self, pace: float, now: float = 0.0) -> None:
        self.pace, self.now = pace, now

    def monotonic(self) -> float:
        self.now += self.pace
        return self.now


def save_by_minutes(rank: int, folder: str) -> list[int]:
    model = build()
    real = save_ledger.time  # type: ignore[attr-defined]
    save_ledger.time = _Clock(0.0, 1e6) if rank else _Clock(6.0)  # type: ignore[attr-defined, assignment]
    step_messages.time = _Clock(0.3)  # type: ignore[attr-defined, assignment] # steps that send a message each
    try:
        manager = mmfsdp.CheckpointManager(folder, model, every_minutes=0.4, background=False)
        saved = [step for step in range(1, 16) if manager.step(step)]
        manager.close()
    finally:
        save_ledger.time = step_messages.time = real  # type: ignore[attr-defined]
    return saved


def test_the_first_rank_decides_on_minutes(tmp_path: Path) -> None:
    one, two = run_ranks(save_by_minutes, 2, str(tmp_path))
    assert one == two
    assert one == [5, 9, 13]  # every 24 seconds of 6 per step, and a step for the message


class _Lines(logging.Handler):
    """The warnings of a rank."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def states_that_differ(rank: int, folder: str, seen: Any) -> tuple[str, list[str]]:
    log, handler = logging.getLogger("mmfsdp.saving"), _Lines()
    log.addHandler(handler)
    try:
        return save_and_close(rank, folder, seen), handler.lines
    finally:
        log.removeHandler(handler)


def save_and_close(rank: int, folder: str, seen: Any) -> str:
    model, counter = build(), Counter()
    counter.seen = rank if seen == "rank" else _Foreign() if seen == "foreign" else 0
    counter.inexact = "It begins anew." if seen == "rank" else None
    manager = mmfsdp.CheckpointManager(folder, model, state={"counter": counter})
    try:
        manager.resume()
        manager.save(1)
        manager.close()
    except errors.MmfsdpError as error:
        manager.__exit__(RuntimeError, None, None)
        return f"{type(error).__name__}: {error}"
    return str(counter.seen)


class _Foreign:
    pass


def test_what_cannot_be_resumed_is_reported_at_the_first_save(tmp_path: Path) -> None:
    told = run_ranks(states_that_differ, 2, str(tmp_path / "foreign"), "foreign")
    assert all("UnsafePickleError" in text and "_Foreign" in text for text, _ in told), told
    assert kept(tmp_path / "foreign") == []
    [(first, lines), (second, others)] = run_ranks(states_that_differ, 2, str(tmp_path / "run"), "rank")
    warning = "Each rank has its own state of 'counter'. The run can only be resumed on 2 ranks."
    assert (first, second, lines, others) == ("0", "1", [warning, "'counter': It begins anew."], [])
    [(text, _)] = run_ranks(states_that_differ, 1, str(tmp_path / "run"), "none")
    assert "had its own state of 'counter', so it cannot be restored on 1 ranks" in text


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"every_steps": 0}, "every_steps=0 is not a whole number"),
        ({"every_minutes": -1}, "every_minutes=-1 is not a positive number"),
        ({"keep_best": 1}, "without it every checkpoint is kept"),
        ({"best_mode": "low"}, "best_mode must be 'min' or 'max'"),
        ({"kind": "hf"}, "kind must be 'full', 'local' or 'sharded'"),
        ({"if_busy": "drop"}, "if_busy must be 'wait' or 'skip', got 'drop'"),
        ({"state": {"rate": 0.1}}, "'rate' is a float, which lacks state_dict"),
    ],
)
def test_wrong_settings_are_named(setting: dict[str, Any], message: str, tmp_path: Path) -> None:
    with single_rank(), pytest.raises(errors.ConfigError, match=message.replace("(", r"\(")):
        mmfsdp.CheckpointManager(tmp_path, build(), **setting)


def test_an_error_in_the_loop_frees_the_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mmfsdp.saving")
    with single_rank():
        model = build()
        with contextlib.suppress(KeyError), mmfsdp.CheckpointManager(tmp_path, model, every_steps=1) as manager:
            assert manager.step(1)
            manager.wait()
            raise KeyError
        begun = time.monotonic()
        with mmfsdp.CheckpointManager(tmp_path, model) as manager:
            assert manager.resume() == 1
        assert time.monotonic() - begun < 30
    assert "which has done 1 steps" in caplog.text


class Normed(nn.Module):
    """Batch norm, a buffer that is not saved, and an output that depends on the running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 3)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.inner(x))
        return self.head(hidden + self.norm.running_mean + self.norm.running_var)


def train_normed(
    rank: int, folder: str | None, end: int, config: dict[str, Any], options: dict[str, Any]
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = mmfsdp.shard(Normed(), config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = None if folder is None else mmfsdp.CheckpointManager(folder, model, optimizer, every_steps=2, **options)

    def loss_of(step: int) -> torch.Tensor:
        torch.manual_seed(100 * step + rank)
        return F.mse_loss(model(torch.randn(4, 6) + rank), torch.ones(4, 3))

    continue_to(end, manager, optimizer, loss_of)
    return {**mmfsdp.model_state_dict(model, rank0_only=False), "mine": model.norm.running_mean.clone()}


@pytest.mark.exhaustive
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_buffers_that_differ_between_ranks_continue_on_each(engine: str, tmp_path: Path) -> None:
    """A checkpoint holds the first rank's buffers; the others would go on with them."""
    near = {"fast_directory": str(tmp_path / "near"), "fast_every_steps": 1}
    cases: list[tuple[dict[str, Any], bool]] = [
        ({"kind": "sharded", "background": False}, False),
        ({"kind": "full"}, False),
        ({"kind": "sharded"}, True),
        ({"kind": "sharded", **near}, False),
    ]
    for number, (options, broadcast) in enumerate(cases):
        config = {"engine": engine, "sharding": {"broadcast_buffers": broadcast}}
        whole = run_ranks(train_normed, 2, None, 5, config, options)
        assert torch.equal(whole[0]["mine"], whole[1]["mine"]) is False  # after the forward
        for end in (3, 5):
            resumed = run_ranks(train_normed, 2, str(tmp_path / str(number)), end, config, options)
        for ours, wanted in zip(resumed, whole, strict=True):
            assert [name for name in wanted if not torch.equal(ours[name], wanted[name])] == [], (options, broadcast)
