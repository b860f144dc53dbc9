"""Writes the checkpoints of a run into its directory, and resumes from the newest one that can be loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from mmfsdp.collective.steps import on_all_ranks
from mmfsdp.errors import IncompleteCheckpointError
from mmfsdp.saving.directory.held import HeldRun
from mmfsdp.saving.directory.run import Retention
from mmfsdp.saving.loop.newest import resume_newest
from mmfsdp.saving.loop.run_state import RunState
from mmfsdp.saving.nodes.tier import NodeTier
from mmfsdp.saving.reading.load import load_with_rest
from mmfsdp.saving.writing.background import PendingSave
from mmfsdp.saving.writing.save import save_checkpoint
from mmfsdp.state.model import load_model_state_dict, model_state_dict
from mmfsdp.state.optimizers.plain import optim_state_dict, prepare_optim_load

__all__ = ["ManagedRun"]

_log = logging.getLogger("mmfsdp.saving")


@dataclass
class ManagedRun:
    """All that is saved of a run, and where. Each method is collective."""

    state: RunState
    """The model, its optimizer and everything else, and the ranks."""
    files: HeldRun
    """The directory of the checkpoints."""
    kind: Literal["full", "local", "sharded"]
    """See `mmfsdp.save_checkpoint`."""
    blocking: bool
    """Whether training waits until a checkpoint is complete."""
    retention: Retention
    """What to keep."""
    fast: NodeTier | None = None
    """The directories on the nodes' own disks."""

    def prepare(self, step: int, metric: float | torch.Tensor | None) -> Callable[[], PendingSave]:
        """Collect the content of this step's checkpoint; the result, called on all ranks, begins to write it.

        Raises:
            UnsafePickleError: At the first save: some state holds an object that could not be loaded.
        """
        value = None if metric is None else float(metric.detach() if isinstance(metric, torch.Tensor) else metric)
        state, kind, blocking = self.state, self.kind, self.blocking
        path = self.files.path / (f"step_{step}.pth" if kind == "full" else f"step_{step}")
        extra = state.content(step, whole=kind == "full" and blocking)

        def begin() -> PendingSave:
            self.files.announce(step, value, path)
            return save_checkpoint(path, state.model, state.optimizer, kind=kind, extra=extra, blocking=blocking)

        return begin

    def write_fast(self, step: int) -> PendingSave:
        """Begin a save to the nodes' own disks."""
        assert self.fast is not None
        model, optimizer = self.state.model, self.state.optimizer
        content = {"state_dict": model_state_dict(model, "sharded"), **self.state.content(step, whole=False)}
        if optimizer is not None:
            content["optimizer"] = optim_state_dict(model, optimizer, "sharded", param_names=True)
        return self.fast.save(step, content)

    def retain(self) -> None:
        """Remove the checkpoints that need not be kept."""
        self.files.retain(self.retention)

    def resume_newest(self) -> tuple[int, bool] | None:
        """Load the newest checkpoint that is complete and undamaged.

        Returns:
            The number of steps that it has done, and whether it is in the directory of the run, not on the nodes' own
            disks; ``None`` if there is none.

        Raises:
            IncompleteCheckpointError: There are checkpoints in the directory, and none of them can be loaded.
            RunDirectoryError: See `mmfsdp.CheckpointManager.resume`. As the next one, raised before anything is loaded.
            StateDictError: Names or shapes do not fit the model or optimizer.
        """
        durable = self.files.complete()
        candidates = [(f"the checkpoint {str(path)!r}", partial(self._load, step, path)) for step, path in durable]
        fast = None if self.fast is None else self.fast.newest(after=durable[0][0] if durable else 0)
        if fast is not None:
            candidates.insert(0, ("what the nodes have on their own disks", partial(self._load_fast, fast)))
        found = resume_newest(candidates, partial(self._tell, logging.WARNING))
        if found is None and self.files.num_unread:
            raise IncompleteCheckpointError(
                f"None of the {self.files.num_unread} checkpoints in the directory can be loaded; the log names what "
                "is wrong with each. Restore one of them, or start again in another directory.",
                file=str(self.files.path),
            )
        return found

    def _load(self, step: int, path: Path) -> tuple[int, bool]:
        state = self.state
        rest, _, source = load_with_rest(
            path,
            state.model,
            state.optimizer,
            safe_globals=state.safe_globals,
            lazy=("run", "averaged"),
            prepare=partial(state.examined, step=step),
        )
        state.restore(rest)
        on_all_ranks(source.check_unchanged, state.scope)
        self.files.resumed(step, path)
        self._tell(logging.INFO, f"Resumed from {str(path)!r}, which has done {step} steps.")
        return step, True

    def _load_fast(self, step: int) -> tuple[int, bool]:
        assert self.fast is not None
        model, optimizer, change = self.state.model, self.state.optimizer, partial(self.state.examined, step=step)
        content = self.fast.read(model, self.state.safe_globals, rows="run/", change=change)
        finish = None if optimizer is None else prepare_optim_load(model, optimizer, content["optimizer"])
        load_model_state_dict(model, content["state_dict"])
        if finish is not None:
            finish()
        self.state.restore(content)
        self.files.resumed(step, self.files.path)
        self._tell(logging.INFO, f"Resumed from the nodes' own disks, which have done {step} steps.")
        return step, False

    def _tell(self, level: int, text: str) -> None:
        if self.state.scope.is_first:
            _log.log(level, "%s", text)

    def close(self) -> None:
        """Let other jobs use the directories. Not collective."""
        self.files.close()
        if self.fast is not None:
            self.fast.close()
