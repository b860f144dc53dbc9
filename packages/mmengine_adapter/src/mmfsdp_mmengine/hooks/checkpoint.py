"""`CheckpointHook`: MMEngine's hook, whose saves of sharded models go through core's loop; for directories, too."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import mmengine.hooks
from mmengine.dist import is_main_process
from mmengine.logging import print_log

from mmfsdp.errors import ConfigError
from mmfsdp.saving import LoopSettings
from mmfsdp_mmengine.checkpoints.hashed_files import publish
from mmfsdp_mmengine.checkpoints.strategy_states import CheckpointingStrategy
from mmfsdp_mmengine.configs.unknown import refuse_unknown
from mmfsdp_mmengine.hooks.best_saves import BestBefore, SavesElsewhere, bare_runner
from mmfsdp_mmengine.hooks.ema import EMAHook
from mmfsdp_mmengine.hooks.late_removals import RemovesLater
from mmfsdp_mmengine.hooks.looped_saves import LoopedSaves, Request
from mmfsdp_mmengine.hooks.validation_due import validation_follows
from mmfsdp_mmengine.optimizers.binding import waiting_gradients
from mmfsdp_mmengine.registry import HOOKS, replace_stock

__all__ = ["CheckpointHook"]


class CheckpointHook(mmengine.hooks.CheckpointHook):
    """Saves, removes and publishes checkpoints; takes all arguments of MMEngine's hook, and more for sharded models.

    Checkpoints that ``max_keep_ckpts`` and ``save_best`` replace are removed only after the new one is complete, and
    ``last_checkpoint`` names one only then. A checkpoint that is saved again after validation keeps its epoch.

    With `FSDPStrategy`, a save that fails is logged and tried again, and after SIGTERM or SIGUSR1 all ranks save after
    the same step, and leave. Between two of the regular checkpoints there is at most one more, ``iter_123.pth``; it is
    removed when the next one is complete.

    Args:
        every_minutes: Also save once this many minutes have passed since the last save.
        keep_period: Of the checkpoints that ``max_keep_ckpts`` would remove, keep every n-th epoch or iteration.
        background: Write while training continues, which waits only until each rank has copied its part. The copy
            takes as much memory of the host as a rank saves. The best checkpoint is always waited for.
        if_busy: What to do if the save before is still running when the next one is due: ``wait`` or ``skip``.
        raise_errors: Raise the error of a save that fails. By default it is logged, and the save is tried again after
            1, 2, 4, ... iterations; if no save succeeds by the end of training, that raises an error.
        grace_seconds: How long the process may live after a signal; ``None`` leaves signals alone, and so does a
            hook without ``interval`` and ``every_minutes``.
        exit_code: The exit code of ranks that leave so.

    Raises:
        ConfigError: One of these has a wrong value.
    """

    file_backend: Any
    out_dir: Any
    last_ckpt: str | None

    def __init__(
        self,
        *args: Any,
        every_minutes: float | None = None,
        keep_period: int | None = None,
        background: bool = False,
        if_busy: Literal["wait", "skip"] = "wait",
        raise_errors: bool = False,
        grace_seconds: float | None = 30.0,
        exit_code: int = 75,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._settings = LoopSettings(
            every_minutes=every_minutes,
            background=background,
            if_busy=if_busy,
            raise_errors=raise_errors,
            grace_seconds=grace_seconds if self.interval > 0 or every_minutes else None,
            exit_code=exit_code,
        )
        if keep_period is not None and (keep_period < 1 or self.max_keep_ckpts < 1):
            raise ConfigError(f"keep_period={keep_period!r} must be 1 or more, and needs max_keep_ckpts.")
        self.keep_period = keep_period
        self._meta: dict[str, Any] | None = None
        self._saves: LoopedSaves | None = None
        self._regular: int | None = None  # the iterations that were done at the newest regular save
        self._validates = False  # what is saved now shall be validated before training goes on

    def before_train(self, runner: Any) -> None:
        """Choose the output directory and create it; with a resumed model do a validation that was left.

        Raises:
            ConfigError: The hook was given an argument that neither it nor ``runner.save_checkpoint`` has; or one that
                needs `FSDPStrategy`.
        """
        if self.args:  # MMEngine passes them on, and fails when it saves for the first time
            stock = {**inspect.signature(mmengine.hooks.CheckpointHook).parameters, **_own_arguments()}
            accepted = {*stock, *inspect.signature(runner.save_checkpoint).parameters} - {"args", "kwargs"}
            refuse_unknown("CheckpointHook", self.args, sorted(accepted), "default_hooks.checkpoint")
        strategy = getattr(runner, "strategy", None)
        if not isinstance(strategy, CheckpointingStrategy) and (
            self._settings.background or self._settings.every_minutes or self.keep_period
        ):
            raise ConfigError(
                "background, every_minutes and keep_period of CheckpointHook need strategy=dict(type='FSDPStrategy').",
                config="default_hooks.checkpoint",
            )
        super().before_train(runner)
        if is_main_process() and "://" not in str(self.out_dir):
            Path(self.out_dir).mkdir(parents=True, exist_ok=True)
        if not isinstance(strategy, CheckpointingStrategy):
            return
        self._saves = LoopedSaves(
            strategy,
            self._settings,
            Path(runner.work_dir),
            self.file_backend,
            lambda done: self._interim(runner, done),
            runner.iter,
        )
        if strategy.take_validation() and runner.val_loop is not None:
            runner.val_loop.run()

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Save if the interval says so, or as much time has passed; leave after a signal."""
        self._validates = validation_follows(runner, runner.iter + 1)
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
        """Give signals back; training has ended, or an error has ended it. Not collective."""
        saves, self._saves = self._saves, None
        if saves is not None:
            saves.release()

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Correct the epoch and iteration, because FlexibleRunner increments the dict that it is given."""
        if self._meta is not None:
            checkpoint["meta"] |= self._meta
            if self._validates and "progress" in checkpoint:
                checkpoint["progress"]["validates"] = True

    def _save_checkpoint_with_step(self, runner: Any, step: int, meta: dict[str, Any]) -> None:
        if self._saves is None:
            with self._saving(meta):
                super()._save_checkpoint_with_step(runner, step, meta)
            return
        runner = bare_runner(runner)
        is_again = self.max_keep_ckpts > 0 and [*self.keep_ckpt_ids][-1:] == [step]
        if self._saves.skips and not is_again:
            return
        replaces = [] if is_again else self._make_room(runner, step)
        name, hub = self.filename_tmpl.format(step), runner.message_hub
        replaces += [hub.get_info("interim_ckpt")] if "interim_ckpt" in hub.runtime_info else []
        self.last_ckpt = self.file_backend.join_path(self.out_dir, name)
        hub.update_info("last_ckpt", self.last_ckpt)
        self._regular = meta["iter"]
        settings = {"save_optimizer": self.save_optimizer, "save_param_scheduler": self.save_param_scheduler}
        request = self._request(runner, name, meta, replaces, by_epoch=self.by_epoch, **settings, **self.args)
        self._saves.save(meta["iter"], request)

    def _make_room(self, runner: Any, step: int) -> list[str]:
        """Add a step to those that are kept, and return the checkpoints that are to be removed for it."""
        if self.max_keep_ckpts <= 0:
            return []
        full = len(self.keep_ckpt_ids) == self.max_keep_ckpts
        oldest = [self.keep_ckpt_ids.popleft()] if full else []
        self.keep_ckpt_ids.append(step)
        runner.message_hub.update_info("keep_ckpt_ids", [*self.keep_ckpt_ids])
        names = [self.filename_tmpl.format(old) for old in oldest if not self.keep_period or old % self.keep_period]
        return [self.file_backend.join_path(self.out_dir, name) for name in names]

    def _interim(self, runner: Any, done: int) -> Request:
        """Return what to write at an iteration that the interval does not name: all that resuming needs."""
        name, hub = f"iter_{done}.pth", runner.message_hub
        replaces = [hub.get_info("interim_ckpt")] if "interim_ckpt" in hub.runtime_info else []
        if self._validates:  # the model may have the averages
            for hook in runner.hooks:
                if isinstance(hook, EMAHook):
                    hook.give_back_weights()
        if self.by_epoch or self._regular != done:  # else it is a regular one that failed
            hub.update_info("interim_ckpt", self.file_backend.join_path(self.out_dir, name))
        return self._request(runner, name, {"epoch": runner.epoch, "iter": done}, replaces, by_epoch=False)

    def _request(self, runner: Any, name: str, meta: dict[str, Any], replaces: list[str], **settings: Any) -> Request:
        def write() -> None:
            with self._saving(meta):
                runner.save_checkpoint(
                    self.out_dir, name, self.file_client_args, meta=meta, backend_args=self.backend_args, **settings
                )

        return Request(self.file_backend.join_path(self.out_dir, name), write, tuple(replaces))

    def _save_best_checkpoint(self, runner: Any, metrics: Mapping[str, Any]) -> None:
        if not self.save_best or not hasattr(self, "file_backend"):
            return  # validation without training: there is nothing to save
        before, saves = BestBefore(self, runner.message_hub), self._saves

        def save(out_dir: str, filename: str, **settings: Any) -> None:
            path = self.file_backend.join_path(out_dir, filename)
            request = Request(path, lambda: runner.save_checkpoint(out_dir, filename, **settings))
            if saves is not None and not saves.save_beside(runner.iter, request):
                before.restore(filename)

        with self._saving({"epoch": runner.epoch, "iter": runner.iter}):
            super()._save_best_checkpoint(runner if saves is None else SavesElsewhere(runner, save), metrics)

    @contextmanager
    def _saving(self, meta: Mapping[str, Any]) -> Iterator[None]:
        backend, outer = self.file_backend, self._meta
        later = backend if isinstance(backend, RemovesLater) else RemovesLater(backend)
        self.file_backend = later
        if outer is None:  # saving the best one saves the last one again, with a dict that has changed meanwhile
            self._meta = {name: meta[name] for name in ("epoch", "iter")}
        try:
            yield
        finally:
            self.file_backend, self._meta = backend, outer
        if later is not backend:
            best = [getattr(self, "best_ckpt_path", None), *getattr(self, "best_ckpt_path_dict", {}).values()]
            later.remove_now(keep={str(path) for path in (*best, self.last_ckpt)})

    def _publish_model(self, runner: Any, ckpt_path: str) -> None:
        if not is_main_process():
            return
        if not Path(ckpt_path).exists():  # it may be a URL
            super()._publish_model(runner, ckpt_path)
            return
        written = publish(Path(ckpt_path), self.published_keys or [])
        print_log(f"{ckpt_path} is published as {written}.", logger="current")


def _own_arguments() -> Mapping[str, inspect.Parameter]:
    return inspect.signature(CheckpointHook).parameters


replace_stock(HOOKS, CheckpointHook)
