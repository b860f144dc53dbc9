"""`CheckpointHook`: MMEngine's hook, which also handles directories and never leaves a run without a checkpoint."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mmengine.hooks
from mmengine.dist import is_main_process
from mmengine.logging import print_log

from mmfsdp_mmengine.checkpoints.hashed_files import publish
from mmfsdp_mmengine.configs.unknown import refuse_unknown
from mmfsdp_mmengine.registry import HOOKS, replace_stock

__all__ = ["CheckpointHook"]


class CheckpointHook(mmengine.hooks.CheckpointHook):
    """Saves, removes and publishes checkpoints; takes all arguments of MMEngine's hook.

    Checkpoints that ``max_keep_ckpts`` and ``save_best`` replace are removed only after the new one is complete. A
    checkpoint that is saved again after validation keeps its epoch.
    """

    file_backend: Any
    out_dir: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._meta: dict[str, Any] | None = None

    def before_train(self, runner: Any) -> None:
        """Choose the output directory and create it.

        Raises:
            ConfigError: The hook was given an argument that neither it nor ``runner.save_checkpoint`` has.
        """
        if self.args:  # MMEngine passes them on, and fails when it saves for the first time
            stock = inspect.signature(mmengine.hooks.CheckpointHook).parameters
            accepted = {*stock, *inspect.signature(runner.save_checkpoint).parameters} - {"kwargs"}
            refuse_unknown("CheckpointHook", self.args, sorted(accepted), "default_hooks.checkpoint")
        super().before_train(runner)
        if is_main_process() and "://" not in str(self.out_dir):
            Path(self.out_dir).mkdir(parents=True, exist_ok=True)

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Correct the epoch and iteration, because FlexibleRunner increments the dict that it is given."""
        if self._meta is not None:
            checkpoint["meta"] |= self._meta

    def _save_checkpoint_with_step(self, runner: Any, step: int, meta: dict[str, Any]) -> None:
        with self._saving(meta):
            super()._save_checkpoint_with_step(runner, step, meta)

    def _save_best_checkpoint(self, runner: Any, metrics: Mapping[str, Any]) -> None:
        if not self.save_best or not hasattr(self, "file_backend"):
            return  # validation without training: there is nothing to save
        with self._saving({"epoch": runner.epoch, "iter": runner.iter}):
            super()._save_best_checkpoint(runner, metrics)

    @contextmanager
    def _saving(self, meta: Mapping[str, Any]) -> Iterator[None]:
        backend, outer = self.file_backend, self._meta
        later = backend if isinstance(backend, _RemovesLater) else _RemovesLater(backend)
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


class _RemovesLater:
    """A file backend that postpones removals until `remove_now`."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._removals: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def remove(self, path: str) -> None:
        self._removals.append(("remove", str(path)))

    def rmtree(self, path: str) -> None:
        self._removals.append(("rmtree", str(path)))

    def remove_now(self, keep: set[str]) -> None:
        for action, path in self._removals:
            if path not in keep:
                getattr(self._backend, action)(path)


replace_stock(HOOKS, CheckpointHook)
