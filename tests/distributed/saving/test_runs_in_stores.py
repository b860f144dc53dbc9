"""A run whose checkpoints lie in a store: complete by the manifest, kept, removed, resumed on any number of ranks."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.shelf import Shelf, url_of
from tests.distributed.store_runs import trained
from torch import nn

import mmfsdp
from mmfsdp import errors
from mmfsdp.checkpoint.files.atomic import TargetExistsError
from mmfsdp.checkpoint.files.disk import checkpoint_path
from mmfsdp.saving.directory.run import RunDirectory
from mmfsdp.testing import RankError, run_ranks

STEPS = 7


def train(rank: int, url: str | None, stop: int, kind: str, dies_at: int | None = None) -> Any:
    """Train from the newest checkpoint on; rank 1 dies as it sends a file of a step, rank 0 before it tidies up."""
    if dies_at is not None:
        send = Shelf.put_file

        def die(*_: Any, **__: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def send_or_die(self: Any, source: str, target: str, **given: Any) -> None:
            if rank == 1 and f"step_{dies_at}" in target:
                while not self.exists(target.replace("rank1", "rank0")):
                    time.sleep(0.05)  # until the other one has sent its file
                die()
            send(self, source, target, **given)

        Shelf.put_file, Shelf.rm = send_or_die, die  # type: ignore[method-assign]
    model, optimizer = trained(url, stop, max_to_keep=2, keep_period=6, kind=kind)
    return mmfsdp.model_state_dict(model, rank0_only=False), mmfsdp.optim_state_dict(model, optimizer, rank0_only=False)


def names(folder: Path) -> list[str]:
    """The checkpoints that have files; a store has no directories."""
    return sorted({path.relative_to(folder).parts[0] for path in folder.rglob("*") if path.is_file()})


@pytest.mark.sample("local")
@pytest.mark.parametrize("kind", ["sharded", "local", "full"])
def test_a_run_goes_on_from_a_store(kind: str, tmp_path: Path) -> None:
    whole = run_ranks(train, 2, None, STEPS, kind)
    run_ranks(train, 2, url_of(tmp_path), 5, kind)
    resumed = run_ranks(train, 2, url_of(tmp_path), STEPS, kind)
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
    end = ".pth" if kind == "full" else ""
    assert names(tmp_path) == ["holder.json", "run.json", f"step_4{end}", f"step_6{end}"]


def test_what_a_killed_save_left_is_removed_later(tmp_path: Path) -> None:
    whole = run_ranks(train, 2, None, STEPS, "local")
    with pytest.raises(RankError):
        run_ranks(train, 2, url_of(tmp_path), STEPS, "local", 4)
    left = {path.name for path in (tmp_path / "step_4").iterdir()}
    assert left == {"rank0.pth"}  # there is no manifest, so it does not count as a checkpoint
    resumed = run_ranks(train, 1, url_of(tmp_path), STEPS, "local")  # on other ranks, which write other files
    torch.testing.assert_close(resumed[0], whole[0], rtol=1e-5, atol=1e-6)
    assert names(tmp_path) == ["holder.json", "run.json", "step_4", "step_6"]
    assert {path.name for path in (tmp_path / "step_4").iterdir()} == {"rank0.pth", "manifest.json"}


def test_a_damaged_checkpoint_is_moved_away(tmp_path: Path) -> None:
    run_ranks(train, 2, url_of(tmp_path), 5, "local")
    path = tmp_path / "step_4" / "rank1.pth"
    path.write_bytes(path.read_bytes()[:-100])
    run_ranks(train, 2, url_of(tmp_path), 4, "local")
    assert names(tmp_path) == ["holder.json", "run.json", "step_2", "step_4", "step_4.damaged"]


def save_twice(rank: int, url: str) -> list[str]:
    """Two jobs open one directory: the second one holds it."""
    model, said = mmfsdp.shard(nn.Linear(4, 4)), []
    first = mmfsdp.CheckpointManager(url, model)
    second = mmfsdp.CheckpointManager(url, model)
    for job in (first, second):
        try:
            job.save(1)
            job.wait()
            said.append("saved")
        except errors.RunDirectoryError as error:
            said.append(str(error))
    with pytest.raises(TargetExistsError, match="cannot be replaced in one step"):
        mmfsdp.save_checkpoint(f"{url}/step_1", model, overwrite=True)
    with pytest.raises(errors.ConfigError, match="kind='hf' needs a file system"):
        mmfsdp.save_checkpoint(f"{url}/a", model, kind="hf", like="b")
    return said


def test_a_second_job_takes_the_directory_and_nothing_is_overwritten(tmp_path: Path) -> None:
    for first, second in run_ranks(save_twice, 2, url_of(tmp_path)):
        assert "has opened the directory of this run. This job saves nothing more" in first
        assert second == "saved"


def test_a_store_of_another_run_or_of_the_web_is_refused(tmp_path: Path) -> None:
    RunDirectory(checkpoint_path(url_of(tmp_path)), run="first", model="one").announce(1, 0.5)
    with pytest.raises(errors.RunDirectoryError, match="belongs to run 'first', not to 'second'"):
        RunDirectory(checkpoint_path(url_of(tmp_path)), run="second", model="one")
    with pytest.raises(errors.RunDirectoryError, match="checkpoints of another model"):
        RunDirectory(checkpoint_path(url_of(tmp_path)), run=None, model="two")
    with pytest.raises(errors.ConfigError, match="cannot be saved to 'https://host/run'"):
        RunDirectory(checkpoint_path("https://host/run"), run=None, model="one")


def fail(rank: int, url: str) -> tuple[int, bool]:
    """The store refuses two saves of rank 1; the third one goes through."""
    model, send, left = mmfsdp.shard(nn.Linear(4, 4)), Shelf.put_file, [2]
    logging.getLogger("mmfsdp.saving").setLevel(logging.CRITICAL)

    def refuse(self: Any, *args: Any, **given: Any) -> None:
        if rank == 1 and left[0]:
            left[0] -= 1
            raise OSError("503 Slow Down")
        send(self, *args, **given)

    Shelf.put_file = refuse  # type: ignore[method-assign]
    with mmfsdp.CheckpointManager(url, model, every_steps=1, background=False, kind="local") as manager:
        for step in range(1, 5):
            manager.step(step)
    return manager.failed_saves, threading.active_count() > 0


def test_a_store_that_fails_does_not_end_training(tmp_path: Path) -> None:
    assert run_ranks(fail, 2, url_of(tmp_path)) == [(2, True)] * 2
    assert names(tmp_path) == ["holder.json", "run.json", "step_3", "step_4"]
