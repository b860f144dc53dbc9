"""Walks and maps the nested content of a checkpoint, including the inside of pickled objects."""

from __future__ import annotations

import collections
from collections.abc import Callable, Container, Iterator
from typing import Any

from mmfsdp.checkpoint.layout import TensorRef
from mmfsdp.checkpoint.pickles.unpickling import PickledObject
from mmfsdp.errors import FormatError

__all__ = ["leaves", "map_leaves", "named_tensors", "select_tensors", "tensor_free_paths", "unique_name"]


def map_leaves(tree: Any, function: Callable[[str, Any], Any]) -> Any:
    """Return a copy of the tree with every leaf replaced; shared containers stay shared.

    Args:
        tree: Nested dicts, lists and tuples. Pickled objects are walked too, and changed in place.
        function: Called as ``function(path, leaf)``, where the path joins ``str(key)`` of the nested keys with ``/``.

    Raises:
        FormatError: Something holds itself, or is nested deeper than 100 levels.
    """
    return _Mapper(function).map("", tree)


def leaves(tree: Any, limit: int = 10_000_000) -> Iterator[tuple[str, Any]]:
    """Yield every leaf of a tree with its path; a shared leaf comes once for each path to it.

    Args:
        tree: Nested dicts, lists and tuples, and pickled objects.
        limit: Largest number of leaves and containers.

    Raises:
        FormatError: There are more, for example because a container holds itself.
    """
    stack: list[tuple[str, Any]] = [("", tree)]
    for _ in range(limit):
        if not stack:
            return
        path, value = stack.pop()
        if isinstance(value, dict | list | tuple | PickledObject):
            below = [(_join(path, key), child) for key, child in _children(value)]
            stack.extend(reversed(below))
        else:
            yield path, value
    raise FormatError(f"There are more than {limit} values in this checkpoint, or one that holds itself.")


def select_tensors(tree: Any) -> list[str]:
    """Return the names of the tensors that a tree refers to, each once, in order."""
    names: dict[str, None] = {}

    def visit(_: str, leaf: Any) -> Any:
        if isinstance(leaf, TensorRef):
            names[leaf.name] = None
        return leaf

    map_leaves(tree, visit)
    return list(names)


def named_tensors(part: Any) -> dict[str, str]:
    """Return the names that tensors have within a part, mapped to their names in the source."""
    names: dict[str, str] = {}

    def visit(path: str, leaf: Any) -> Any:
        if isinstance(leaf, TensorRef):
            names[unique_name(path, names)] = leaf.name
        return leaf

    map_leaves(part, visit)
    return names


def tensor_free_paths(tree: Any, prefix: str = "") -> list[str]:
    """Return the paths of the largest parts of a tree that hold no tensor, in order."""
    if isinstance(tree, TensorRef):
        return []
    if not select_tensors(tree):
        return [prefix or "(everything)"]
    return [path for key, child in _children(tree) for path in tensor_free_paths(child, _join(prefix, key))]


def unique_name(name: str, taken: Container[str]) -> str:
    """Return the name, or ``'name~2'`` and so on if it is taken: the keys 0 and '0' of one dict have the same path."""
    unique, count = name, 1
    while unique in taken:
        count += 1
        unique = f"{name}~{count}"
    return unique


def _join(prefix: str, key: object) -> str:
    return f"{prefix}/{key}" if prefix else str(key)


def _children(tree: Any) -> Iterator[tuple[object, Any]]:
    if isinstance(tree, dict):
        yield from tree.items()
    elif isinstance(tree, list | tuple):
        yield from enumerate(tree)
    elif isinstance(tree, PickledObject):
        yield from ((key, getattr(tree, key)) for key in _PARTS if getattr(tree, key))


_DEPTH = 100  # levels of containers
_PARTS = ("args", "kwargs", "elements", "items", "state")


class _Mapper:
    def __init__(self, function: Callable[[str, Any], Any]) -> None:
        self._function = function
        # The originals are kept beside the copies, so that no id is reused while mapping.
        self._done: dict[int, tuple[Any, Any]] = {}
        self._holders: set[int] = set()

    def map(self, path: str, value: Any) -> Any:
        if not isinstance(value, dict | list | tuple | PickledObject):
            return self._function(path, value)
        if id(value) in self._holders:
            raise FormatError(f"What is at {path[:200]!r} holds itself. No checkpoint is like this.")
        if id(value) in self._done:
            return self._done[id(value)][1]
        if len(self._holders) == _DEPTH:
            raise FormatError(f"There are more than {_DEPTH} levels above {path[:200]!r}. No checkpoint is like this.")
        self._holders.add(id(value))
        mapped = self._map_container(path, value)
        self._holders.remove(id(value))
        return mapped

    def _map_container(self, path: str, value: Any) -> Any:
        if isinstance(value, PickledObject):
            return self._map_pickled(path, value)
        if isinstance(value, dict):
            return self._map_dict(path, value)
        if isinstance(value, list):
            copy: list[Any] = []
            self._done[id(value)] = (value, copy)
            copy.extend(self.map(_join(path, index), element) for index, element in enumerate(value))
            return copy
        result = tuple(self.map(_join(path, index), element) for index, element in enumerate(value))
        self._done[id(value)] = (value, result)
        return result

    def _map_dict(self, path: str, value: dict[Any, Any]) -> dict[Any, Any]:
        copy: dict[Any, Any] = collections.OrderedDict() if isinstance(value, collections.OrderedDict) else {}
        self._done[id(value)] = (value, copy)
        for key, child in value.items():
            copy[key] = self.map(_join(path, key), child)
        if isinstance(value, collections.OrderedDict):
            vars(copy).update(vars(value))
        return copy

    def _map_pickled(self, path: str, value: PickledObject) -> PickledObject:
        self._done[id(value)] = (value, value)
        value.args = self.map(_join(path, "args"), value.args)
        for part in ("kwargs", "elements", "items"):
            if getattr(value, part):  # most have none, and share that
                setattr(value, part, self.map(_join(path, part), getattr(value, part)))
        if value.has_state:
            value.state = self.map(_join(path, "state"), value.state)
        return value
