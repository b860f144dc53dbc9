"""Sends the saves of `CheckpointHook` through core's loop: in the background, by minutes, again, and on signals."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmengine.dist import is_main_process

from mmfsdp.collective import new_scope
from mmfsdp.errors import CheckpointError
from mmfsdp.runtime import find_sharded_model
from mmfsdp.saving import LoopSettings, PendingSave, SaveLoop
from mmfsdp_mmengine.checkpoints.strategy_states import CheckpointingStrategy
from mmfsdp_mmengine.hooks.node_saves import NodeSaves
from mmfsdp_mmengine.hooks.output import Output

__all__ = ["LoopedSaves", "Request"]


@dataclass(frozen=True)
class Request:
    """A checkpoint to write."""

    path: str
    """The file or directory; in a store it may become another one."""
    write: Callable[[str], None]
    """Calls ``runner.save_checkpoint`` with the path."""
    replaces: tuple[str, ...] = ()
    """Checkpoints to remove once this one, or a later one, is complete."""


class LoopedSaves:
    """The saves of one training. Making one and all methods but `release` are collective: every rank.

    Args:
        strategy: Writes the checkpoints.
        settings: When to save, and how to stop.
        output: Where checkpoints go; `release` closes it.
        work_dir: Where the file ``last_checkpoint`` is written.
        backend: MMEngine's file backend, which removes checkpoints.
        make_interim: Returns what to write at an iteration that no interval names, and with True on the nodes' disks.
        nodes: The directories on the nodes' own disks, if there are such.
        begun_at: The iterations that were done when training began.
    """

    def __init__(
        self,
        strategy: CheckpointingStrategy,
        settings: LoopSettings,
        output: Output,
        work_dir: Path,
        backend: Any,
        make_interim: Callable[[int, bool], Request],
        nodes: NodeSaves | None,
        begun_at: int,
    ) -> None:
        self._strategy, self._settings, self._output, self._backend = strategy, settings, output, backend
        self._note, self._make_interim, self._nodes = work_dir / "last_checkpoint", make_interim, nodes
        self._request: Request | None = None
        self._under_way: str | None = None
        self._replaced: list[str] = []
        self.newest_complete: str | None = None
        """The newest checkpoint of this training that is complete."""
        self._loop = SaveLoop(settings, new_scope(find_sharded_model(strategy.model).mesh), self, work_dir)
        if begun_at:
            self._loop.ledger.resumed(begun_at, saved=True)

    @property
    def skips(self) -> bool:
        """Whether a save that is due now is left out, as another one is running."""
        return self._loop.skips

    def save(self, done: int, request: Request) -> bool:
        """Write a checkpoint that training can resume from; return whether it is written, or being written.

        Args:
            done: How many iterations are done.
            request: The checkpoint.

        Raises:
            CheckpointError: The save failed, and ``raise_errors`` is set.
        """
        self._request = request
        try:
            return self._loop.save(done, again=True)
        finally:
            self._request = None

    def save_beside(self, done: int, request: Request) -> bool:
        """Write a checkpoint that training cannot resume from; return whether it is complete. Training waits.

        Args:
            done: How many iterations are done.
            request: The checkpoint.

        Raises:
            CheckpointError: The save failed, and ``raise_errors`` is set.
        """
        self._loop.ledger.settle()
        try:
            self._begin(request, background=False)
        except CheckpointError as error:
            self._loop.ledger.failed(done, error)
            return False
        return True

    def step(self, done: int) -> None:
        """Save if it is time to, and leave if a rank was asked to.

        Args:
            done: How many iterations are done.

        Raises:
            SystemExit: A rank was asked to leave, and all have saved.
            CheckpointError: The save failed, and ``raise_errors`` is set.
        """
        self._loop.step(done)

    def leave_if_asked(self, done: int) -> None:
        """Save and leave if a rank was asked to; for the iterations of a validation.

        Raises:
            SystemExit: See `step`.
        """
        self._loop.leave_if_asked(done, again=True)

    def close(self) -> None:
        """Wait for the last save; if it failed, save once more.

        Raises:
            CheckpointError: The second attempt also failed.
        """
        self._loop.close()

    def release(self) -> None:
        """Give signals and directories back, and wait for nothing. Not collective."""
        self._loop.release()
        self._output.close()

    def prepare(self, step: int, metric: Any) -> Callable[[], PendingSave]:
        """Return what begins to write; the loop calls this."""
        request = self._request or self._make_interim(step, False)

        def begin() -> PendingSave:
            self._replaced += request.replaces  # removed by a later save, if this one fails
            pending, self._under_way = self._begin(request, background=self._settings.background)
            return pending

        return begin

    def _begin(self, request: Request, *, background: bool) -> tuple[PendingSave, str]:
        """Begin to write, and return where. Collective: every rank."""
        self._output.check()
        path = request.path
        if self._strategy.writes_directories:
            path = self._output.make_free(path, self.newest_complete or self._strategy.resumed_from)
        return self._strategy.begin_save(lambda: request.write(path), background=background), path

    def write_fast(self, step: int) -> PendingSave:
        """Begin a save to the nodes' own disks; the loop calls this."""
        assert self._nodes is not None
        request = self._make_interim(step, True)
        return self._nodes.save(step, lambda: request.write(request.path))

    def retain(self) -> None:
        """Name the checkpoint that is complete now in ``last_checkpoint``, and remove those that it replaces."""
        assert self._under_way is not None
        path, self._under_way = self._under_way, None
        replaced, self._replaced = self._replaced, []
        self.newest_complete = path
        if is_main_process():
            written = self._note.with_name("last_checkpoint.part")
            written.write_text(path)
            os.replace(written, self._note)
        self._remove(tuple(replaced), path)

    def _remove(self, paths: tuple[str, ...], new: str) -> None:
        for path in {*paths} - {new} if is_main_process() else ():
            if self._backend.isfile(path):
                self._backend.remove(path)
            elif self._backend.isdir(path):
                self._backend.rmtree(path)
