"""Settings of sharding on the command line: a file of them, and single ones by their dotted path."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["read_settings", "with_settings"]


def read_settings(path: Path) -> dict[str, Any]:
    """Return what a JSON, TOML or YAML file holds.

    Raises:
        ConfigError: There is no such file, or it cannot be read as what its suffix says.
    """
    from mmfsdp.errors import ConfigError

    if not path.is_file():
        raise ConfigError(f"There is no file {str(path)!r}. Write the path of a .json, .toml or .yaml file.")
    try:
        if path.suffix == ".json":
            content = json.loads(path.read_text())
        elif path.suffix == ".toml":
            content = tomllib.loads(path.read_text())
        elif path.suffix in (".yaml", ".yml"):
            content = _yaml(path.read_text())
        else:
            raise ConfigError(f"{path.name} is neither .json nor .toml nor .yaml.", file=str(path))
    except ValueError as error:  # of json and tomllib
        raise ConfigError(f"{path.name} cannot be read: {error}", file=str(path)) from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path.name} holds {type(content).__name__}, expected settings by name.", file=str(path))
    return dict(content)


def with_settings(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with others put in at their dotted paths, such as ``sharding.strategy``.

    A bare value on the way, such as ``sharding='FULL_SHARD'``, cannot be gone into.

    Raises:
        ConfigError: A path leads through something that is no section.
    """
    from mmfsdp.errors import ConfigError

    result: dict[str, Any] = json.loads(json.dumps(dict(base)))
    for path, value in changes.items():
        *sections, last = path.split(".")
        place = result
        for depth, section in enumerate(sections):
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                where = ".".join(sections[: depth + 1])
                raise ConfigError(
                    f"--set {path}: {where} is {place!r} already, which has no settings. Give it as a section.",
                    config=where,
                )
        place[last] = value
    return result


def _yaml(text: str) -> Any:
    from mmfsdp.errors import ConfigError

    try:
        import yaml  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise ConfigError("Reading YAML needs PyYAML: pip install pyyaml. JSON and TOML need nothing.") from None
    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
