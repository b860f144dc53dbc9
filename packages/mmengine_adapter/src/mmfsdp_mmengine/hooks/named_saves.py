"""Saves MMEngine's checkpoints under their names: regular ones, one between them, the best; removes old ones."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mmengine.hooks
from mmengine.dist import is_main_process
from mmengine.logging import print_log

from mmfsdp.checkpoint import convert
from mmfsdp.errors import ConfigError
from mmfsdp.saving import write_archive
from mmfsdp_mmengine.checkpoints.live_content import read_content
from mmfsdp_mmengine.hooks.ema import EMAHook
from mmfsdp_mmengine.hooks.looped_saves import LoopedSaves, Request

__all__ = ["NamedSaves"]

_INFOS = ("best_score", "best_ckpt")


class NamedSaves(mmengine.hooks.CheckpointHook):
    """MMEngine's hook, whose saves of sharded models go through core's loop.

    Takes the arguments of MMEngine's hook.
    """

    file_backend: Any
    out_dir: Any
    last_ckpt: str | None
    keep_period: int | None = None
    """Keeps the checkpoint of every n-th epoch or iteration, which ``max_keep_ckpts`` would remove."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._meta: dict[str, Any] | None = None
        self._saves: LoopedSaves | None = None
        self._regular: int | None = None  # the iterations that were done at the newest regular save
        self._validates = False  # whether this save is validated before training goes on

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
        runner = _bare_runner(runner)
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

    def _interim(self, runner: Any, done: int, on_nodes: bool) -> Request:
        """Return what to write at an iteration that the interval does not name: all that resuming needs."""
        name, hub = f"iter_{done}.pth", runner.message_hub
        if on_nodes:
            return self._request(runner, name, {"epoch": runner.epoch, "iter": done}, [], by_epoch=False)
        replaces = [hub.get_info("interim_ckpt")] if "interim_ckpt" in hub.runtime_info else []
        if self._validates:  # the model may have the averages
            for hook in runner.hooks:
                if isinstance(hook, EMAHook):
                    hook.give_back_weights()
        if self.by_epoch or self._regular != done:  # else it is a regular one that failed
            hub.update_info("interim_ckpt", self.file_backend.join_path(self.out_dir, name))
        return self._request(runner, name, {"epoch": runner.epoch, "iter": done}, replaces, by_epoch=False)

    def _request(self, runner: Any, name: str, meta: dict[str, Any], replaces: list[str], **settings: Any) -> Request:
        path = self.file_backend.join_path(self.out_dir, name)

        def write(target: str) -> None:
            if target != path:  # the next one replaces it
                runner.message_hub.update_info("interim_ckpt", target)
            with self._saving(meta):
                client, backend = self.file_client_args, self.backend_args
                runner.save_checkpoint(
                    self.out_dir, _name_of(target), client, meta=meta, backend_args=backend, **settings
                )

        return Request(path, write, tuple(replaces))

    def _save_best_checkpoint(self, runner: Any, metrics: Mapping[str, Any]) -> None:
        if not self.save_best or not hasattr(self, "file_backend"):
            return  # validation without training: there is nothing to save
        before, saves = _BestBefore(self, runner.message_hub), self._saves

        def save(out_dir: str, filename: str, **settings: Any) -> None:
            path = self.file_backend.join_path(out_dir, filename)
            request = Request(path, lambda target: runner.save_checkpoint(out_dir, _name_of(target), **settings))
            if saves is not None and not saves.save_beside(runner.iter, request):
                before.restore(filename)

        with self._saving({"epoch": runner.epoch, "iter": runner.iter}):
            super()._save_best_checkpoint(runner if saves is None else _SavesElsewhere(runner, save), metrics)

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
        written = _publish(Path(ckpt_path), self.published_keys or [])
        print_log(f"{ckpt_path} is published as {written}.", logger="current")


def _name_of(path: str) -> str:
    return path.rpartition("/")[2]


class _SavesElsewhere:
    """A runner whose ``save_checkpoint`` is another function.

    Args:
        runner: The runner.
        save: The function, with the same arguments.
    """

    def __init__(self, runner: Any, save: Callable[..., None]) -> None:
        self.bare, self.save_checkpoint = runner, save

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bare, name)


def _bare_runner(runner: Any) -> Any:
    """Return the runner that a `_SavesElsewhere` stands for; any other as it is."""
    return runner.bare if isinstance(runner, _SavesElsewhere) else runner


class _BestBefore:
    """What a hook knows of the best checkpoints, to go back to.

    Args:
        hook: MMEngine's hook.
        hub: The runner's message hub.
    """

    def __init__(self, hook: Any, hub: Any) -> None:
        self._hook, self._hub = hook, hub
        self._infos = {name: value for name, value in hub.runtime_info.items() if name.startswith("best_")}
        self._path = getattr(hook, "best_ckpt_path", None)
        self._paths = dict(getattr(hook, "best_ckpt_path_dict", {}))

    def restore(self, filename: str) -> None:
        """Forget the best checkpoint of this name, which is not there."""
        now: Mapping[str, str | None] = getattr(self._hook, "best_ckpt_path_dict", {})
        several = [key for key, path in now.items() if path is not None and path.endswith(filename)]
        for key in several:
            self._hook.best_ckpt_path_dict[key] = self._paths.get(key)
        if not now:
            self._hook.best_ckpt_path = self._path
        for info in [f"{kind}_{key}" for key in several for kind in _INFOS] if now else _INFOS:
            self._hub.runtime_info.pop(info, None)
            if info in self._infos:
                self._hub.update_info(info, self._infos[info])


class _RemovesLater:
    """Another file backend, whose removals are postponed until `remove_now`.

    Args:
        backend: MMEngine's file backend.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._removals: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def remove(self, path: str) -> None:
        """Postpone the removal of a file."""
        self._removals.append(("remove", str(path)))

    def rmtree(self, path: str) -> None:
        """Postpone the removal of a directory."""
        self._removals.append(("rmtree", str(path)))

    def remove_now(self, keep: set[str]) -> None:
        """Do what was postponed, except for some paths."""
        for action, path in self._removals:
            if path not in keep:
                getattr(self._backend, action)(path)


def _publish(path: Path, keys: Sequence[str]) -> Path:
    """Write some keys of a checkpoint to one file beside it. Not collective.

    Args:
        path: A ``.pth`` file or a checkpoint directory.
        keys: Top-level keys, such as ``'meta'`` and ``'state_dict'``. These two are copied in constant memory.

    Returns:
        The file that was written.

    Raises:
        CheckpointError: The checkpoint cannot be read or written.
        ConfigError: The checkpoint has none of these keys.
    """
    target = path.with_suffix(".pth")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".publishing-") as folder:
        if {*keys} == {"meta", "state_dict"}:
            named = Path(convert(path, Path(folder) / target.name, publish=True, trust=True).path)
            return named.rename(path.with_name(named.name))
        source = path
        if path.is_dir():
            source = Path(folder) / "whole.pth"
            convert(path, source, keep="all", trust=True)
        content = {key: value for key, value in read_content(source).items() if key in keys}
        if not content:
            raise ConfigError(f"{path.name} has none of the published_keys {list(keys)}.", config="published_keys")
        written = Path(folder) / "published.pth"
        write_archive(content, written)
        with written.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        final = target.with_name(f"{target.stem}-{digest[:8]}.pth")
        return written.rename(final)
