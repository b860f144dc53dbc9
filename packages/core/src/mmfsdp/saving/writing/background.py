"""Saves that run in a background thread, on a process group of their own, while training continues."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# The public way here, `DefaultStager`, empties itself after each use in torch 2.11 and 2.12: its second use raises
# KeyError. This is the part of it that copies, the same in all releases.
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.device_mesh import DeviceMesh

from mmfsdp.collective.channels import GlooChannel
from mmfsdp.collective.scopes import Scope, World, new_scope
from mmfsdp.collective.steps import on_all_ranks
from mmfsdp.saving.directory.errors import as_checkpoint_error
from mmfsdp.saving.writing.failures import failures, log_failure

__all__ = ["PendingSave", "Saver", "Stager", "own_copy", "saver_of", "settle_saves"]

_NICE = 10  # a thread of this priority has a tenth of the weight of one of training


class PendingSave:
    """A save that may still be running, or the outcome of one that has ended.

    Args:
        future: The future of the thread that saves.
    """

    def __init__(self, future: Future[None]) -> None:
        self._future = future
        self._told = False

    @property
    def told(self) -> bool:
        """Whether `result` has raised the error of the save."""
        return self._told

    @classmethod
    def over(cls) -> PendingSave:
        """Return a save that is complete."""
        future: Future[None] = Future()
        future.set_result(None)
        return cls(future)

    def done(self) -> bool:
        """Return whether the save has ended on this rank, with or without an error. Not collective, does not wait."""
        return self._future.done()

    def succeeded(self) -> bool:
        """Return whether the checkpoint is complete on disk. Not collective, does not wait."""
        return self._future.done() and self._future.exception() is None

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is on disk, complete, at its final path. Not collective.

        Args:
            timeout: Seconds to wait at most.

        Raises:
            CheckpointError: The checkpoint could not be written; what was at the path is untouched.
            TimeoutError: The save is still running; it continues.
        """
        try:
            self._future.result(timeout)
        except BaseException as error:
            # A timeout or an interrupt ends only the wait.
            self._told = self._future.done() and self._future.exception() is error
            raise

    def settle(self) -> None:
        """Wait until the save has ended, and raise its error unless `result` has raised it."""
        if not self._told:
            self.result()


class Saver:
    """Runs the saves of one mesh's ranks, one at a time. Making one is collective: every rank of the mesh.

    Args:
        mesh: The ranks.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        # Training uses the mesh's own groups; collectives of a save must not mix with those.
        self.scope: Scope = new_scope(mesh)
        self._pending: PendingSave | None = None
        self._stager = Stager(pinned=mesh.device_type == "cuda")

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group that saves use."""
        assert isinstance(self.scope.channel, GlooChannel)
        return self.scope.channel.group

    @property
    def rank(self) -> int:
        """This rank's index in the mesh."""
        return self.scope.rank

    def settle(self) -> None:
        """Wait for the running save. Collective: every rank.

        Raises:
            CheckpointError: The save failed on some rank, and `PendingSave.result` has not raised the error there.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            on_all_ranks(pending.settle, self.scope)

    def stage(self, content: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of nested content in CPU memory, for `start` to save. Not collective; no save may be running.

        The memory is kept for the next save: as many bytes as this rank saves. Getting it anew takes longer than the
        copy, and much longer for the page-locked memory that a GPU is copied into at the speed of the bus.
        """
        return self._stager.stage(content)

    def start(self, step: Callable[[], None], target: Path) -> PendingSave:
        """Run ``step`` in a thread. No other save may be running.

        Args:
            step: What saves.
            target: Where the checkpoint will be, for messages.
        """
        watching = failures()
        executor = ThreadPoolExecutor(1, thread_name_prefix="mmfsdp-save", initializer=_yield_to_training)
        future = executor.submit(step)
        self._pending = pending = PendingSave(future)
        executor.shutdown(wait=False)  # ends the thread once the step is done
        watching.watch(target, future, lambda: pending.told)

        def report(ended: Future[None]) -> None:
            error = ended.exception()
            if error is not None:
                log_failure(target, error, self.rank)

        future.add_done_callback(report)
        return pending


class Stager:
    """Copies tensors into memory of its own, which the next copy of the same storages uses again.

    Args:
        pinned: Whether the memory is page-locked, and copied to without waiting for each tensor.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._stager = StateDictStager(pin_memory=pinned, share_memory=False)

    def stage(self, content: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of nested content, whose tensors are in CPU memory, when it is complete. Not collective."""
        copy: Any = self._stager.stage(content, non_blocking=self._pinned)
        if self._pinned:
            torch.accelerator.synchronize()
        return dict(copy)


def own_copy(content: dict[str, Any], saver: Saver, target: Path) -> dict[str, Any]:
    """Copy this rank's part into the memory that is kept for saves in the background. Collective: every rank.

    Args:
        content: See `Saver.stage`.
        saver: The mesh's saver, with no save running.
        target: What is saved, for messages.

    Raises:
        CheckpointError: A rank has not enough memory; raised on every rank.
    """

    def stage() -> dict[str, Any]:
        with as_checkpoint_error(target):
            return saver.stage(content)

    return on_all_ranks(stage, saver.scope)


def _yield_to_training() -> None:
    """Let this thread run where training leaves a processor idle, and a tenth of the time where it leaves none."""
    if sys.platform == "linux":  # elsewhere this would be the priority of the whole process
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICE)


_savers: dict[tuple[int, ...], tuple[World, Saver]] = {}


def saver_of(mesh: DeviceMesh) -> Saver:
    """Return the saver of a mesh's ranks, which is made on first use. Collective: every rank of the mesh."""
    saver = _known_saver(mesh)
    if saver is None:
        saver = Saver(mesh)
        _savers[_ranks(mesh)] = World(), saver
    return saver


def settle_saves(mesh: DeviceMesh) -> None:
    """Wait for the save that a mesh's ranks are running, if any. Collective: every rank of the mesh.

    Raises:
        CheckpointError: The save failed on some rank, and `PendingSave.result` has not raised the error there.
    """
    saver = _known_saver(mesh)
    if saver is not None:
        saver.settle()


def _known_saver(mesh: DeviceMesh) -> Saver | None:
    world, saver = _savers.get(_ranks(mesh), (None, None))
    return saver if world is not None and world.is_current() else None


def _ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(int(rank) for rank in mesh.mesh.flatten())
