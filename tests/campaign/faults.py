"""Faults that a campaign injects into a run from outside, by name, and which kinds of runs each can meet."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.campaign.board import wait_until
from tests.campaign.job import TWO_HOSTS, UNDER_MMENGINE, Job

__all__ = ["FAULTS", "Fault"]


@dataclass(frozen=True)
class Fault:
    """Something that can go wrong."""

    act: Callable[[Job], bool]
    """Does it, and tells whether there was anything to do it to."""
    restarts: bool = True
    """Whether ranks have to start again."""
    kinds: tuple[str, ...] = ("same", "elastic", "store", "hosts", "torchrun", "mmengine", "mmengine_hosts")
    """The kinds of runs that it makes sense in."""


def _signal(number: int, *, everywhere: bool = False) -> Callable[[Job], bool]:
    return lambda job: job.signal_ranks(job.ranks() if everywhere else job.any_rank(), number)


def _preempt(job: Job) -> bool:
    """Ask all ranks to leave and start them again, as a scheduler that wants the machine for a moment."""
    job.restart()
    return True


def _pause(job: Job) -> bool:
    chosen = job.any_rank()
    job.signal_ranks(chosen, signal.SIGSTOP)
    time.sleep(1.0)
    return job.signal_ranks(chosen, signal.SIGCONT)


def _stop(job: Job) -> bool:
    """Stop a rank for good. Who waits for it ends by itself; torchrun would end the stopped one 30 s later."""
    chosen, others = job.any_rank(), len(job.ranks())
    job.signal_ranks(chosen, signal.SIGSTOP)
    if others > 1:
        wait_until(lambda: len(job.ranks()) < 2, 90)
    return job.signal_ranks(chosen, signal.SIGKILL)


def _kill_largest(job: Job) -> bool:
    """Do what the kernel does when memory is short: kill the process that has most of it."""
    pids = job.ranks()

    def held(pid: int) -> int:
        with contextlib.suppress(OSError):
            return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return 0

    return job.signal_ranks(sorted(pids, key=held)[-1:], signal.SIGKILL)


def _limit(kind: int, most: int, seconds: float | None) -> Callable[[Job], bool]:
    def act(job: Job) -> bool:
        for pid in (chosen := job.any_rank()):
            with contextlib.suppress(OSError):
                before = resource.prlimit(pid, kind)
                resource.prlimit(pid, kind, (most, before[1]))
                if seconds is not None:
                    time.sleep(seconds)
                    resource.prlimit(pid, kind, before)
        return bool(chosen)

    return act


def _order(name: str) -> Callable[[Job], bool]:
    """Let the program do it itself, at the next opportunity."""

    def act(job: Job) -> bool:
        (job.folder / "ordered").mkdir(exist_ok=True)
        (job.folder / "ordered" / name).touch()
        return True

    return act


def _kill_loader(job: Job) -> bool:
    children = []
    for pid in job.any_rank():
        with contextlib.suppress(OSError):
            tasks = [task.read_text().split() for task in Path(f"/proc/{pid}/task").glob("*/children")]
            children += [int(child) for group in tasks for child in group]
    return job.signal_ranks(children, signal.SIGKILL)


def _newest(job: Job) -> list[Path]:
    """Return the files of the newest checkpoint, which is a directory or a file, if there is an older one as well.

    A run whose only checkpoint is damaged does not begin again by itself.
    """
    name = "iter_*" if job.settings["kind"] in UNDER_MMENGINE else "step_*"
    found = [path for path in (job.folder / "run").glob(name) if path.suffix in ("", ".pth")]
    found.sort(key=lambda path: int(path.stem.split("_")[1]))
    if len(found) < 2:
        return []
    files = found[-1].iterdir() if found[-1].is_dir() else found[-1:]
    return sorted(path for path in files if path.stat().st_size)


def _damage(how: str) -> Callable[[Job], bool]:
    """Damage a file of the newest checkpoint, and kill a rank, so that it is read."""

    def act(job: Job) -> bool:
        files: list[Path] = []
        with contextlib.suppress(OSError):
            files = _newest(job)
        if not files:
            return False
        with contextlib.suppress(OSError):
            file = job.chance.choice(files)
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
        return True

    return act


def _lose_directory(job: Job) -> bool:
    shutil.rmtree(job.folder / "run", ignore_errors=True)
    return True


def _fill_disk(job: Job) -> bool:
    """Fill the file system of the run, if it has one of its own, for a second."""
    ballast = job.folder / "run" / "ballast"
    if not os.path.ismount(job.folder / "run"):
        return False
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)) == 1 << 16:
            pass
    time.sleep(1.0)
    ballast.unlink(missing_ok=True)
    return True


def _lock_disk(job: Job) -> bool:
    """Let nothing be written to the file system of the run for a second, as after an error of the disk."""
    place, locked = job.folder / "run", job.folder / "locked"
    if not os.path.ismount(place):
        return False
    locked.mkdir(exist_ok=True)
    # A mount that has a file open for writing, as that of the lock is, cannot become read-only: one that covers it can.
    _mount("--bind", place, locked)
    _mount("-o", "remount,bind,ro", locked)
    _mount("--bind", locked, place)
    time.sleep(1.0)
    for mounted in (place, locked):
        subprocess.run(["umount", "--lazy", mounted], check=True)
    return True


def _mount(*words: str | Path) -> None:
    subprocess.run(["mount", *words], check=True)


def _cut_network(job: Job) -> bool:
    """Take one host off the network until the ranks of both have ended, at most for a minute."""
    ranks = {*job.ranks()}
    job.hosts[1].unplug()
    wait_until(lambda: not ranks & {*job.ranks()}, 60)
    job.hosts[1].plug_in()
    return bool(ranks)


def _lose_node(job: Job) -> bool:
    """Take one host off the network, end all that runs there, lose its disk; bring it back, empty."""
    host = job.hosts[1]
    host.unplug()
    job.signal_ranks(job.ranks(1), signal.SIGKILL)
    host.start(["sh", "-c", f"rm -rf {job.folder}/disk/*"]).communicate()
    host.plug_in()
    return True


def _leave(number: int) -> Callable[[Job], bool]:
    """End the ranks of the second node; the others go on without them."""

    def act(job: Job) -> bool:
        if len(job.nodes) < 2:
            return False
        job.nodes.pop()
        return job.signal_ranks(job.ranks(1), number)

    return act


def _join(job: Job) -> bool:
    """Let a second node come, with one rank or two."""
    if len(job.nodes) > 1:
        return False
    job.nodes.append(job.chance.choice([1, 2]))
    job.restart()
    return True


_FILES = (
    "same",
    "elastic",
    "hosts",
    "torchrun",
    "mmengine",
    "mmengine_hosts",
)  # in a store, checkpoints are other files
_MOUNTED = ("same", "mmengine")

FAULTS: dict[str, Fault] = {
    "kill a rank": Fault(_signal(signal.SIGKILL)),
    "kill all ranks": Fault(_signal(signal.SIGKILL, everywhere=True)),
    "SIGTERM to a rank": Fault(_signal(signal.SIGTERM)),
    "SIGTERM to all ranks": Fault(_signal(signal.SIGTERM, everywhere=True)),
    "SIGUSR1 to a rank": Fault(_signal(signal.SIGUSR1)),
    "SIGUSR1 to all ranks": Fault(_signal(signal.SIGUSR1, everywhere=True)),
    "SIGABRT to a rank": Fault(_signal(signal.SIGABRT)),
    "SIGSEGV to a rank": Fault(_signal(signal.SIGSEGV)),
    "SIGINT to all ranks": Fault(_signal(signal.SIGINT, everywhere=True)),
    "preemption": Fault(_preempt),
    "SIGSTOP and SIGCONT": Fault(_pause, restarts=False),
    "SIGSTOP": Fault(_stop),
    "out of memory: allocations fail": Fault(_limit(resource.RLIMIT_AS, 1 << 20, None), restarts=False),
    "out of memory: the largest rank is killed": Fault(_kill_largest),
    "no file may grow": Fault(_limit(resource.RLIMIT_FSIZE, 0, 1.0), restarts=False),
    "no file may be opened": Fault(_limit(resource.RLIMIT_NOFILE, 3, 1.0), restarts=False),
    "full disk": Fault(_fill_disk, restarts=False, kinds=_MOUNTED),
    "read-only disk": Fault(_lock_disk, restarts=False, kinds=_MOUNTED),
    "lost directory": Fault(_lose_directory, restarts=False),
    "flipped bit": Fault(_damage("flip"), kinds=_FILES),
    "truncated file": Fault(_damage("truncate"), kinds=_FILES),
    "lost file": Fault(_damage("remove"), kinds=_FILES),
    "a loader's worker raises": Fault(_order("loader raises"), restarts=False),
    "a loader's worker is killed": Fault(_kill_loader, restarts=False),
    "a step raises": Fault(_order("step raises"), restarts=False),
    "a rank exits with 0": Fault(_order("rank exits"), restarts=False),
    "half an upload, and death": Fault(_order("half an upload"), restarts=False, kinds=("store",)),
    "half an upload, and an error": Fault(_order("upload fails"), restarts=False, kinds=("store",)),
    "cut network": Fault(_cut_network, kinds=TWO_HOSTS),
    "lost node and disk": Fault(_lose_node, kinds=TWO_HOSTS),
    "a node is killed": Fault(_leave(signal.SIGKILL), kinds=("elastic",)),
    "a node leaves": Fault(_leave(signal.SIGTERM), kinds=("elastic",)),
    "a node joins": Fault(_join, kinds=("elastic",)),
}
