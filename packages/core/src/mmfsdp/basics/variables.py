"""Reads settings from environment variables."""

from __future__ import annotations

import os

from mmfsdp.errors import ConfigError

__all__ = ["seconds_of"]


def seconds_of(variable: str, default: float, advice: str) -> float:
    """Return the seconds that an environment variable gives.

    Args:
        variable: Its name.
        default: Seconds if it is not set, or empty.
        advice: What to do, for the message.

    Raises:
        ConfigError: It is not a positive number.
    """
    given = os.environ.get(variable, "")
    try:
        seconds = float(given or default)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"{variable} is {given!r}, not a positive number of seconds. {advice}")
    return seconds
