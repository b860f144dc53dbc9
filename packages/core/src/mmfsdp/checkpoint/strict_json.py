"""Reads JSON that leaves no doubt: no key twice in an object, no NaN and no infinity."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

__all__ = ["parse_json"]


def parse_json(text: str | bytes) -> Any:
    """Return what JSON text says.

    Raises:
        ValueError: It is no JSON, or two readers could take it for two things.
        RecursionError: It is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"the key {next(name for name in counts if counts[name] > 1)!r} is there twice")
    return content


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number of JSON")
