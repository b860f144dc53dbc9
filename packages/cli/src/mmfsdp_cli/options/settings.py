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
