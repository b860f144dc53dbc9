"""Walks and maps nested content: dicts, lists and tuples of values, as an optimizer keeps for a parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["map_values", "nested_values"]


def nested_values(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every value that is not a dict, list, tuple or set, with the keys that lead to it, joined by ``/``."""
    if isinstance(value, Mapping):
        pairs = [*value.items()]
    elif isinstance(value, list | set | frozenset) or type(value) is tuple:
        pairs = [*enumerate(value)]
    else:
        yield path, value
        return
    for key, child in pairs:
        yield from nested_values(f"{path}/{key}" if path else str(key), child)


def map_values(function: Callable[[Any], Any], value: Any) -> Any:
    """Return nested content with every value replaced; nothing is changed in place."""
    if isinstance(value, Mapping):
        return {key: map_values(function, child) for key, child in value.items()}
    if isinstance(value, list) or type(value) is tuple:
        return type(value)(map_values(function, child) for child in value)
    return function(value)
