"""Saves between the checkpoints of a run on the nodes' own disks, and resumes from what the nodes have together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmengine.logging import print_log

from mmfsdp.collective import new_scope
from mmfsdp.errors import CorruptCheckpointError, IncompleteCheckpointError
from mmfsdp.runtime import find_sharded_model
from mmfsdp.saving import NodeTier, PendingSave
from mmfsdp_mmengine.checkpoints.live_content import safe_globals
from mmfsdp_mmengine.checkpoints.strategy_states import CheckpointingStrategy

__all__ = ["NodeSaves"]

_ROWS = "progress/"


class NodeSaves:
    """The saves of a run on the nodes' own disks. Making one and all methods but `close` are collective: every rank.

    Args:
        directory: A directory on each node, the same path everywhere.
        strategy: Gathers what is saved; its model is sharded.
        run: The name of the run: with ``resume=True`` in every config, a new run must not go on from another one.

    Raises:
        RunDirectoryError: A directory holds another run or model, or another job uses it; raised on every rank.
    """

    def __init__(self, directory: str, strategy: CheckpointingStrategy, run: str) -> None:
        self._directory, self._strategy = directory, strategy
        scope = new_scope(find_sharded_model(strategy.model).mesh)
        self._tier = NodeTier(Path(directory), strategy.model, scope, run=run)

    def resume(self, least: int, resume: Callable[[str], Any]) -> bool:
        """Resume from the newest step that the nodes have together; return whether there is one.

        Args:
            least: Only if it has done more iterations than these.
            resume: Resumes from a checkpoint.
        """
        step = self._tier.newest()
        if step is None or step <= least:
            return False
        name = f"iteration {step} in {self._directory}"
        try:
            content = self._tier.read(self._strategy.model, safe_globals(), rows=_ROWS, change=dict)
            self._strategy.offer(name, content)
            resume(name)
        except (CorruptCheckpointError, IncompleteCheckpointError) as error:
            text = f"Skipped what the nodes have in {self._directory}: {error}"
            print_log(text, logger="current", level=logging.WARNING)
            return False
        return True

    def save(self, done: int, write: Callable[[], None]) -> PendingSave:
        """Save in the background.

        Args:
            done: How many iterations are done.
            write: Calls the runner's ``save_checkpoint``.

        Raises:
            CheckpointError: The save before failed, or the content cannot be copied.
        """
        return self._strategy.begin_save(write, background=True, into=lambda content: self._tier.save(done, content))

    def clear(self) -> None:
        """Remove what runs before have left.

        Raises:
            CheckpointError: Something cannot be removed; raised on every rank.
        """
        self._tier.clear()

    def close(self) -> None:
        """Let other jobs use the directory. Not collective."""
        self._tier.close()
