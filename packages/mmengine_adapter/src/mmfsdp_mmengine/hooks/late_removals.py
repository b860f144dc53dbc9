"""A file backend that removes checkpoints only when those that replace them are complete."""

from __future__ import annotations

from typing import Any

__all__ = ["RemovesLater"]


class RemovesLater:
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
