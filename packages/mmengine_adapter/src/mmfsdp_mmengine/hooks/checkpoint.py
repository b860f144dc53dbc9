"""`CheckpointHook`: MMEngine's hook, whose saves of sharded models go through core's loop; for directories, too."""

from __future__ import annotations

import bisect
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import mmengine.hooks
from mmengine.dist import is_main_process

from mmfsdp.collective import scope_of
from mmfsdp.errors import ConfigError
from mmfsdp.saving import LoopSettings
from mmfsdp_mmengine.checkpoints.strategy_states import CheckpointingStrategy
from mmfsdp_mmengine.configs.unknown import refuse_unknown
from mmfsdp_mmengine.hooks.looped_saves import LoopedSaves
from mmfsdp_mmengine.hooks.named_saves import NamedSaves
from mmfsdp_mmengine.hooks.node_saves import NodeSaves
from mmfsdp_mmengine.hooks.output import Output
from mmfsdp_mmengine.optimizers.binding import waiting_gradients
from mmfsdp_mmengine.registry import HOOKS, replace_stock

__all__ = ["CheckpointHook"]


class CheckpointHook(NamedSaves):
    """Saves, removes and publishes checkpoints; takes all arguments of MMEngine's hook, and more for sharded models.

    Checkpoints that ``max_keep_ckpts`` and ``save_best`` replace are removed only after the new one is complete, and
    ``last_checkpoint`` names one only then. A checkpoint that is saved again after validation keeps its epoch.

    With `FSDPStrategy`, a save that fails is logged and tried again, and after SIGTERM or SIGUSR1 all ranks save after
    the same step, and leave. Between two of the regular checkpoints there is at most one more, ``iter_123.pth``; it is
    removed when the next one is complete. ``out_dir`` may be a URL in a store, such as ``s3://bucket/runs``. One job at
    a time may write to ``work_dir`` and ``out_dir``.

    Args:
        every_minutes: Also save once this many minutes have passed since the last save.
        keep_period: Of the checkpoints that ``max_keep_ckpts`` would remove, keep every n-th epoch or iteration.
        background: Write while training continues, which waits only until each rank has copied its part. The copy
            takes as much memory of the host as a rank saves. The best checkpoint is always waited for.
        if_busy: What to do if the save before is still running when the next one is due: ``wait`` or ``skip``.
        fast_directory: A directory on each node's own disk or in its memory, for frequent saves between those to
            ``out_dir``: each rank's file has a copy on the next node. ``resume=True`` takes whichever is newer.
        fast_interval: Save there every n iterations.
        raise_errors: Raise the error of a save that fails. By default it is logged, and the save is tried again after
            1, 2, 4, ... iterations; if no save succeeds by the end of training, that raises an error.
        grace_seconds: How long the process may live after a signal; ``None`` leaves signals alone, and so does a
            hook without ``interval`` and ``every_minutes``.
        exit_code: The exit code of ranks that leave so.

    Raises:
        ConfigError: One of these has a wrong value.
    """

    def __init__(
        self,
        *args: Any,
        every_minutes: float | None = None,
        keep_period: int | None = None,
        background: bool = False,
        if_busy: Literal["wait", "skip"] = "wait",
        fast_directory: str | None = None,
        fast_interval: int | None = None,
        raise_errors: bool = False,
        grace_seconds: float | None = 30.0,
        exit_code: int = 75,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if (fast_directory is None) != (fast_interval is None):
            raise ConfigError("fast_directory and fast_interval belong together: set both, or neither.")
        self._settings = LoopSettings(
            every_minutes=every_minutes,
            background=background,
            if_busy=if_busy,
            is_tiered=fast_directory is not None,
            fast_every_steps=fast_interval,
            raise_errors=raise_errors,
            grace_seconds=grace_seconds if self.interval > 0 or every_minutes else None,
            exit_code=exit_code,
        )
        if keep_period is not None and (keep_period < 1 or self.max_keep_ckpts < 1):
            raise ConfigError(f"keep_period={keep_period!r} must be 1 or more, and needs max_keep_ckpts.")
        self.keep_period = keep_period
        self._output: Output | None = None
        self._fast_directory = fast_directory
        self._nodes: NodeSaves | None = None

    def before_train(self, runner: Any) -> None:
        """Choose the output directory and create it; with a resumed model do a validation that was left.

        Raises:
            ConfigError: The hook was given an argument that neither it nor ``runner.save_checkpoint`` has; or one that
                needs `FSDPStrategy`, or a file system.
            RunDirectoryError: Another job uses ``work_dir`` or ``out_dir``; raised on every rank.
        """
        if self.args:  # MMEngine passes them on, and fails when it saves for the first time
            stock = {**inspect.signature(mmengine.hooks.CheckpointHook).parameters, **_own_arguments()}
            accepted = {*stock, *inspect.signature(runner.save_checkpoint).parameters} - {"args", "kwargs"}
            refuse_unknown("CheckpointHook", self.args, sorted(accepted), "default_hooks.checkpoint")
        strategy = getattr(runner, "strategy", None)
        if not isinstance(strategy, CheckpointingStrategy):
            settings = self._settings
            if settings.background or settings.every_minutes or settings.is_tiered or self.keep_period:
                raise ConfigError(
                    "background, every_minutes, fast_directory and keep_period of CheckpointHook need "
                    "strategy=dict(type='FSDPStrategy').",
                    config="default_hooks.checkpoint",
                )
            self._choose_directory(runner)
            return
        folder, was_in_store = self.directory(runner), self._output is not None and self._output.files is not None
        self._output = output = Output(runner.work_dir, folder, scope_of(None))
        if output.files is None:
            self._choose_directory(runner)
        elif not was_in_store:
            self._choose_store(runner, folder)
        if self._nodes is None and (nodes := self.open_nodes(runner)) is not None:
            nodes.clear()  # the run goes on from elsewhere, or begins
        self._saves = LoopedSaves(
            strategy,
            self._settings,
            output,
            Path(runner.work_dir),
            self.file_backend,
            lambda done, on_nodes: self._interim(runner, done, on_nodes),
            self._nodes,
            runner.iter,
        )
        if strategy.take_validation() and runner.val_loop is not None:
            runner.val_loop.run()

    def open_nodes(self, runner: Any) -> NodeSaves | None:
        """Return the directories on the nodes' own disks, held until `release`. Collective: every rank.

        Raises:
            RunDirectoryError: See `NodeSaves`.
        """
        if self._fast_directory is not None and isinstance(runner.strategy, CheckpointingStrategy):
            self._nodes = NodeSaves(self._fast_directory, runner.strategy, os.path.abspath(runner.work_dir))
        return self._nodes

    def directory(self, runner: Any) -> str:
        """Return where the checkpoints of a runner go: to ``work_dir``, or to a directory below ``out_dir``."""
        own = str(runner.work_dir)
        if self._output is not None and self._output.files is not None:
            return str(self.out_dir)
        if self.out_dir is None or str(self.out_dir) == own:
            return own
        return f"{str(self.out_dir).rstrip('/')}/{os.path.basename(own.rstrip('/'))}"

    def _choose_directory(self, runner: Any) -> None:
        super().before_train(runner)
        if is_main_process() and "://" not in str(self.out_dir):
            Path(self.out_dir).mkdir(parents=True, exist_ok=True)

    def _choose_store(self, runner: Any, folder: str) -> None:
        """Let MMEngine's hook prepare itself, which knows only stores of its own, and use another one then."""
        for name in ("backend_args", "file_client_args", "published_keys"):
            if getattr(self, name, None) is not None:
                raise ConfigError(
                    f"{name} of CheckpointHook has no effect where out_dir is in a store: {folder!r}. Leave it out; "
                    "for the keys of a store see the documentation of its fsspec driver.",
                    config=f"default_hooks.checkpoint.{name}",
                )
        assert self._output is not None
        self.out_dir = None
        super().before_train(runner)
        self.out_dir, self.file_backend = folder, self._output.files
        self.backend_args = {"backend": "local"}  # it joins names, and nothing else
        runner.logger.info(f"Checkpoints will be saved to {folder}.")

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Save if the interval says so, or as much time has passed; leave after a signal."""
        self._validates = _validation_follows(runner, runner.iter + 1)
        super().after_train_iter(runner, batch_idx, data_batch, outputs)
        # Gradients that wait for more iterations are not saved.
        if self._saves is not None and waiting_gradients(runner.optim_wrapper) is None:
            self._saves.step(runner.iter + 1)
        self._validates = False

    def after_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Leave after a signal; the run that resumes begins with this validation."""
        if self._saves is not None:
            self._validates = True
            self._saves.leave_if_asked(runner.iter)
            self._validates = False

    def after_train(self, runner: Any) -> None:
        """Wait for the last save, and publish checkpoints.

        Raises:
            CheckpointError: The last saves failed.
        """
        if self._saves is not None:
            try:
                self._saves.close()
                if self.last_ckpt is not None and self._saves.newest_complete is not None:
                    self.last_ckpt = self._saves.newest_complete
            finally:
                self.release()
        super().after_train(runner)

    def release(self) -> None:
        """Give signals and directories back; training has ended, or an error has ended it. Not collective."""
        saves, self._saves = self._saves, None
        if saves is not None:
            saves.release()
        for held in (self._output, self._nodes):
            if held is not None:
                held.close()
        self._nodes = None


def _own_arguments() -> Mapping[str, inspect.Parameter]:
    return inspect.signature(CheckpointHook).parameters


replace_stock(HOOKS, CheckpointHook)


def _validation_follows(runner: Any, done: int) -> bool:
    """Return whether a loop over iterations validates after this one, as MMEngine's `IterBasedTrainLoop` decides.

    Loops over epochs validate at the end of an epoch, which a run that is resumed within it reaches by itself.

    Args:
        runner: The runner, while it trains.
        done: How many iterations are done.
    """
    loop = runner.train_loop
    if runner.val_loop is None or not all(hasattr(loop, name) for name in ("dataloader_iterator", "val_interval")):
        return False
    milestones, intervals = getattr(loop, "dynamic_milestones", [0]), getattr(loop, "dynamic_intervals", None)
    interval = loop.val_interval if intervals is None else intervals[bisect.bisect(milestones, done + 1) - 1]
    return bool(done >= loop.val_begin and (done % interval == 0 or done == loop.max_iters))
