"""The numbers that a recipe needs of a model, such as its heads: given, or found in the model's config file."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmfsdp.basics.arguments import argument
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.errors import ConfigError

__all__ = ["CONFIG_FILES", "RecipeValues", "config_numbers"]

CONFIG_FILES = ("config.json", "params.json")
"""Where Hugging Face and Meta write the numbers of a model."""

_SIGNS = {"*": operator.mul, "/": operator.floordiv, "+": operator.add, "-": operator.sub}
_LIMIT = 10_000_000  # bytes


@dataclass(frozen=True)
class RecipeValues:
    """The numbers of one model."""

    sources: Mapping[str, Sequence[str | int]]
    """For each value of the recipe where to look, in order: keys of config files, other values, or a number."""
    given: Mapping[str, int]
    """Values that the user set."""
    configs: Mapping[str, int]
    """The numbers in the model's config files."""
    equal: Callable[[TensorEntry, TensorEntry], bool]
    """Tells whether two tensors hold the same data."""

    def number(self, text: str, where: str) -> int:
        """Return what a number, a value, or several with ``*``, ``/``, ``+`` and ``-`` between them, come to.

        Args:
            text: Such as ``'3'``, ``'heads'`` or ``'heads / kv_heads + 2'``, computed from left to right.
            where: The rule that asks, for errors.

        Raises:
            ConfigError: A value is unknown, a division leaves a rest, or the result is not positive.
        """
        first, *rest = re.split(r"\s*([*/+-])\s*", text.strip())
        result = self._value(first, where)
        for sign, name in zip(rest[::2], rest[1::2], strict=True):
            value = self._value(name, where)
            if sign == "/" and (value == 0 or result % value):
                raise ConfigError(
                    f"{where}: {text!r} is {result} / {value}, which is not a whole number.", config=where
                )
            result = _SIGNS[sign](result, value)
        if result < 1:
            raise ConfigError(f"{where}: {text!r} is {result}, expected 1 or more.", config=where)
        return result

    def _value(self, name: str, where: str, asked: tuple[str, ...] = ()) -> int:
        if name.isdecimal():
            return int(name)
        if name in self.given:
            return self.given[name]
        keys = self.sources.get(name, ())
        for key in keys:
            if isinstance(key, int):
                return key
            if key in self.configs:
                return self.configs[key]
            # A model's config leaves out a value that is equal to another one; somebody who sets values may forget it.
            if key in self.sources and key not in (name, *asked, *self.given):
                return self._value(key, where, (name, *asked))
        if name not in self.sources:
            known = f"The recipe's values are {', '.join(self.sources)}" if self.sources else "The recipe has no values"
            raise ConfigError(f"{where}: {name!r} is neither a number nor a value. {known}.", config=where)
        looked = f", or put a config.json with {keys[0]!r} beside the checkpoint" if keys else ""
        set_ones = [str(key) for key in keys if key in self.given]
        may_differ = f" beside {set_ones[0]!r}, from which it may differ" if set_ones else ""
        raise ConfigError(
            f"{where} needs the value {name!r}{may_differ}. Give it in {argument('recipe_values')}, as "
            f"{name}=8{looked}.",
            config=where,
        )


def config_numbers(folders: Iterable[Path]) -> dict[str, int]:
    """Return the whole numbers in the config files of some folders, by key; the first file that has a key counts.

    Numbers of a part, such as ``text_config`` of a model that sees images, come after those at the top.
    """
    numbers: dict[str, int] = {}
    for path in [folder / name for folder in folders for name in CONFIG_FILES]:
        if path.is_file() and path.stat().st_size <= _LIMIT:
            try:
                content = json.loads(path.read_bytes())
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path.name} is not valid JSON: {error}.", file=str(path)) from None
            for part in _parts(content):
                found = {key: value for key, value in part.items() if type(value) is int}
                numbers = {**found, **numbers}
    return numbers


def _parts(content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, dict):
        return []
    return [content, *(part for key, part in content.items() if isinstance(part, dict) and key.endswith("text_config"))]
