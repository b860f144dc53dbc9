"""Reads settings from a JSON, TOML or YAML file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mmfsdp.errors import ConfigError

__all__ = ["read_settings"]

_MOST_VALUES = 1_000_000


def read_settings(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the settings in a JSON, TOML or YAML file, by name.

    Args:
        path: A ``.json``, ``.toml``, ``.yaml`` or ``.yml`` file. YAML needs PyYAML.

    Raises:
        ConfigError: There is no such file, or it cannot be parsed as its suffix says.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"There is no file {str(path)!r}. Give the path of a .json, .toml or .yaml file.")
    readers: dict[str, Callable[[str], Any]] = {".json": json.loads, ".toml": _toml, ".yaml": _yaml, ".yml": _yaml}
    if path.suffix not in readers:
        raise ConfigError(f"{path.name} is not a .json, .toml or .yaml file.", file=str(path))
    try:
        content = readers[path.suffix](path.read_text(encoding="utf-8"))
        _check_size(content)
    except ValueError as error:  # all three parsers raise one
        raise ConfigError(f"{path.name} cannot be parsed: {error}", file=str(path)) from None
    except RecursionError:
        raise ConfigError(f"{path.name} cannot be parsed: it is nested too deeply.", file=str(path)) from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path.name} holds a {type(content).__name__}, expected settings by name.", file=str(path))
    return dict(content)


def _check_size(content: Any) -> None:
    """Raise ``ValueError`` if content refers to itself so often that nobody could go through it, as YAML can."""
    sizes: dict[int, int] = {}  # of the containers that were counted; 0 while one is

    def count(value: Any) -> int:
        if not isinstance(value, dict | list):
            return 1
        if id(value) not in sizes:
            sizes[id(value)] = 0
            sizes[id(value)] = 1 + sum(map(count, value.values() if isinstance(value, dict) else value))
        elif not sizes[id(value)]:
            raise ValueError("it holds itself")
        return sizes[id(value)]

    if count(content) > _MOST_VALUES:
        raise ValueError(f"it holds more than {_MOST_VALUES} values, with each alias as often as it is used")


def _toml(text: str) -> Any:
    import tomllib

    return tomllib.loads(text)


def _yaml(text: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise ConfigError("Reading YAML needs PyYAML: pip install pyyaml. JSON and TOML need nothing.") from None
    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
