"""Saves MMEngine's best checkpoints such that one that cannot be written leaves the best one before in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["BestBefore", "SavesElsewhere", "bare_runner"]


class SavesElsewhere:
    """A runner whose ``save_checkpoint`` is another function.

    Args:
        runner: The runner.
        save: The function, with the same arguments.
    """

    def __init__(self, runner: Any, save: Callable[..., None]) -> None:
        self.bare, self.save_checkpoint = runner, save

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bare, name)


def bare_runner(runner: Any) -> Any:
    """Return the runner that a `SavesElsewhere` stands for; any other as it is."""
    return runner.bare if isinstance(runner, SavesElsewhere) else runner


class BestBefore:
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


_INFOS = ("best_score", "best_ckpt")
