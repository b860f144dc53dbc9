"""Saves more often than a run's checkpoints, on the nodes' own disks, and resumes from the files of all nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mmfsdp.collective import new_scope
from mmfsdp.runtime import find_sharded_model
from mmfsdp.saving import NodeTier, PendingSave
from mmfsdp_mmengine.checkpoints.live_content import safe_globals
from mmfsdp_mmengine.checkpoints.strategy_states import CheckpointingStrategy

__all__ = ["NodeSaves"]


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

    def newest(self, after: int) -> str | None:
        """Return the name by which the strategy resumes from the newest step of the nodes; None if there is none.

        Args:
            after: Only if more iterations than these are done.
        """
        if (step := self._tier.newest(after)) is None:
            return None
        name, model = f"iteration {step} in {self._directory}", self._strategy.model
        self._strategy.offer(name, lambda: self._tier.read(model, safe_globals(), rows="progress/", change=dict))
        return name

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
