"""Reads settings from a JSON, TOML or YAML file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mmfsdp.errors import ConfigError

__all__ = ["read_settings"]


def read_settings(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the settings in a file, by name.

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
    except ValueError as error:  # all three parsers raise one
        raise ConfigError(f"{path.name} cannot be parsed: {error}", file=str(path)) from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path.name} holds a {type(content).__name__}, expected settings by name.", file=str(path))
    return dict(content)


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
