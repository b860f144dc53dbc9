"""Settings of sharding on the command line: single ones by their dotted path."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

__all__ = ["with_settings"]


def with_settings(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with others put in at their dotted paths, such as ``sharding.strategy``.

    A bare value that stands for a section, such as ``precision='bf16'``, and settings of this section go together, in
    any order.

    Raises:
        ConfigError: A path leads through a value that is not a section.
    """
    from mmfsdp.errors import ConfigError

    result: dict[str, Any] = json.loads(json.dumps(dict(base)))
    for path, value in sorted(changes.items(), key=lambda change: change[0].count(".")):
        *sections, last = path.split(".")
        settings = result
        for depth, section in enumerate(sections):
            if depth == 0 and isinstance(settings.get(section), str):
                settings[section] = _section_of(section, settings[section])
            settings = settings.setdefault(section, {})
            if not isinstance(settings, dict):
                where = ".".join(sections[: depth + 1])
                raise ConfigError(
                    f"--set {path}: {where} is {settings!r}, which has no settings of its own.",
                    config=where,
                )
        settings[last] = value
    return result


def _section_of(name: str, value: str) -> Any:
    """Return the section that a bare value stands for, ``{"preset": "bf16"}``, or the value if it stands for none."""
    from mmfsdp import ShardConfig
    from mmfsdp.errors import ConfigError

    config = ShardConfig.from_dict({name: value})
    section = config.model_dump(mode="json", exclude_unset=True).get(name)
    if not isinstance(section, dict):
        return value
    for key, one in section.items():
        with contextlib.suppress(ConfigError):  # a section may need several
            if ShardConfig.from_dict({name: {key: one}}) == config:
                return {key: one}
    return section
