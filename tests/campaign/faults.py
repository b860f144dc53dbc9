"""Faults that a campaign injects into a run from outside, by name."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FAULTS", "Job"]


@dataclass
class Job:
    """A run under way."""

    folder: Path
    """Its folder; checkpoints are in ``run``."""
    launcher: subprocess.Popen[bytes]
    """torchrun."""
    chance: random.Random
    """Where random choices come from."""
    ranks: int
    """How many ranks it has."""

    def pids(self) -> list[int]:
        """The processes of the ranks that are alive."""
        return [pid for file in sorted((self.folder / "ranks").glob("?")) if (pid := _alive(file))]

    def any_rank(self) -> list[int]:
        """One of them, or none if there is none."""
        pids = self.pids()
        return [self.chance.choice(pids)] if pids else []

    def signal_ranks(self, pids: list[int], number: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _alive(file: Path) -> int:
    """The process that a file names, or 0 if it has ended, whatever has its number now."""
    with contextlib.suppress(OSError, ValueError):
        pid, began = file.read_text().split()
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if stat[19] == began and stat[0] != "Z":
            return int(pid)
    return 0


def _signal(number: int, *, everywhere: bool = False) -> Callable[[Job], None]:
    return lambda job: job.signal_ranks(job.pids() if everywhere else job.any_rank(), number)


def _signal_job(number: int) -> Callable[[Job], None]:
    return lambda job: job.launcher.send_signal(number)


def _kill_job(job: Job) -> None:
    pids = job.pids()
    job.launcher.kill()
    job.signal_ranks(pids, signal.SIGKILL)


def _pause(job: Job) -> None:
    chosen = job.any_rank()
    job.signal_ranks(chosen, signal.SIGSTOP)
    time.sleep(1.0)
    job.signal_ranks(chosen, signal.SIGCONT)


def _stop(job: Job) -> None:
    """Stop a rank for good. Who waits for it ends by itself; torchrun would end the stopped one 30 s later."""
    chosen = job.any_rank()
    job.signal_ranks(chosen, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while len(job.pids()) > 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    job.signal_ranks(chosen, signal.SIGKILL)


def _limit(kind: int, most: int, seconds: float | None) -> Callable[[Job], None]:
    def act(job: Job) -> None:
        chosen = job.any_rank()
        for pid in chosen:
            with contextlib.suppress(OSError):
                before = resource.prlimit(pid, kind)
                resource.prlimit(pid, kind, (most, before[1]))
                if seconds is not None:
                    time.sleep(seconds)
                    resource.prlimit(pid, kind, before)

    return act


def _order(name: str) -> Callable[[Job], None]:
    def act(job: Job) -> None:
        (job.folder / "ordered").mkdir(exist_ok=True)
        (job.folder / "ordered" / name).touch()

    return act


def _kill_loader(job: Job) -> None:
    for pid in job.any_rank():
        children = [task.read_text().split() for task in Path(f"/proc/{pid}/task").glob("*/children")]
        job.signal_ranks([int(child) for group in children for child in group], signal.SIGKILL)


def _newest(job: Job) -> list[Path]:
    """The files of the newest checkpoint."""
    found = sorted((job.folder / "run").glob("step_*"), key=lambda path: int(path.name.split("_")[1].split(".")[0]))
    found = [path for path in found if path.suffix == ""]
    return sorted(path for path in found[-1].iterdir() if path.stat().st_size) if found else []


def _damage(how: str) -> Callable[[Job], None]:
    """Damage a file of the newest checkpoint, and kill a rank, so that it is read."""

    def act(job: Job) -> None:
        with contextlib.suppress(OSError, IndexError):
            file = job.chance.choice(_newest(job))
            size = file.stat().st_size
            if how == "remove":
                file.unlink()
            elif how == "truncate":
                os.truncate(file, job.chance.randrange(size))
            else:
                with file.open("r+b") as opened:
                    place = job.chance.randrange(size)
                    opened.seek(place)
                    [byte] = opened.read(1)
                    opened.seek(place)
                    opened.write(bytes([byte ^ 1 << job.chance.randrange(8)]))
        job.signal_ranks(job.any_rank(), signal.SIGKILL)

    return act


def _lose_directory(job: Job) -> None:
    shutil.rmtree(job.folder / "run", ignore_errors=True)


def _fill_disk(job: Job) -> None:
    """Fill the file system of the run, if it has one of its own, for a second."""
    ballast = job.folder / "run" / "ballast"
    if not os.path.ismount(job.folder / "run"):
        return
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    time.sleep(1.0)
    ballast.unlink(missing_ok=True)


FAULTS: dict[str, Callable[[Job], None]] = {
    "kill a rank": _signal(signal.SIGKILL),
    "kill all ranks": _signal(signal.SIGKILL, everywhere=True),
    "kill the job": _kill_job,
    "SIGTERM to a rank": _signal(signal.SIGTERM),
    "SIGTERM to all ranks": _signal(signal.SIGTERM, everywhere=True),
    "SIGUSR1 to a rank": _signal(signal.SIGUSR1),
    "SIGUSR1 to all ranks": _signal(signal.SIGUSR1, everywhere=True),
    "SIGABRT to a rank": _signal(signal.SIGABRT),
    "SIGTERM to the job": _signal_job(signal.SIGTERM),
    "SIGINT to the job": _signal_job(signal.SIGINT),
    "pause a rank": _pause,
    "stop a rank": _stop,
    "out of memory": _limit(resource.RLIMIT_AS, 1 << 20, None),
    "no file may grow": _limit(resource.RLIMIT_FSIZE, 0, 1.0),
    "no file may be opened": _limit(resource.RLIMIT_NOFILE, 3, 1.0),
    "full disk": _fill_disk,
    "lost directory": _lose_directory,
    "flipped bit": _damage("flip"),
    "truncated file": _damage("truncate"),
    "lost file": _damage("remove"),
    "a loader's worker raises": _order("loader raises"),
    "a loader's worker is killed": _kill_loader,
    "a step raises": _order("step raises"),
    "a rank exits with 0": _order("rank exits"),
}
