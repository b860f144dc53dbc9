"""Settings of sharding on the command line: single ones by their dotted path."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["with_settings"]


def with_settings(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with others put in at their dotted paths, such as ``sharding.strategy``.

    A bare value on the way, such as ``sharding='FULL_SHARD'``, cannot be gone into.

    Raises:
        ConfigError: A path leads through a value that is not a section.
    """
    from mmfsdp.errors import ConfigError

    result: dict[str, Any] = json.loads(json.dumps(dict(base)))
    for path, value in changes.items():
        *sections, last = path.split(".")
        settings = result
        for depth, section in enumerate(sections):
            settings = settings.setdefault(section, {})
            if not isinstance(settings, dict):
                where = ".".join(sections[: depth + 1])
                raise ConfigError(
                    f"--set {path}: {where} is {settings!r} already, which has no settings. Give it as a section.",
                    config=where,
                )
        settings[last] = value
    return result
