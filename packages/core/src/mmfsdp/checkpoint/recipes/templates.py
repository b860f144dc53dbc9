"""Matches names of tensors against templates such as ``'layers.{i}.attention.wq.weight'``, and fills them in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from mmfsdp.basics.text import compile_regex
from mmfsdp.errors import ConfigError

__all__ = ["Binding", "Group", "Template", "grouped"]

Binding = tuple[tuple[str, str], ...]
"""The value of each placeholder, sorted by placeholder."""

_PLACEHOLDER = re.compile(r"\{(\w+)(?:([+-]\d{1,9})|:([^{}]+))?\}")
_DEFAULT = r"[^.]+"
_NUMBER = r"\d{1,18}"


class Template:
    """Text with placeholders: ``{i}`` stands for a part without dots, ``{x:REGEX}`` for what a regex matches.

    ``{i+1}`` and ``{i-1}`` stand for the number after and before ``i``. A placeholder that occurs twice stands for the
    same text both times.

    Args:
        text: The template; it must match a whole name.
        known: Regular expressions of placeholders that another template defines.

    Raises:
        ConfigError: A placeholder or its regular expression is malformed.
    """

    def __init__(self, text: str, known: Mapping[str, str] | None = None) -> None:
        self.text = text
        self.regexes: dict[str, str] = dict(known or {})
        self.names: list[str] = []
        self._shifts: dict[str, int] = {}
        self._parts: list[str | tuple[str, int]] = []
        position, regex = 0, ""
        for match in _PLACEHOLDER.finditer(text):
            name, shift, own = match[1], int(match[2] or 0), match[3]
            if own is not None:
                compile_regex(own)
                self.regexes[name] = own
            regex += self._literal(text[position : match.start()])
            self._parts.append((name, shift))
            if name not in self.names:
                self.names.append(name)
                self._shifts[name] = shift
                own = _NUMBER if shift else self.regexes.get(name, _DEFAULT)
                regex += f"(?P<{name}>{own})"
            elif shift == self._shifts[name]:
                regex += f"(?P={name})"
            else:
                raise ConfigError(
                    f"Template {text!r} uses {{{name}}} with and without a number added. Use one of them."
                )
            position = match.end()
        self._regex = compile_regex(regex + self._literal(text[position:]), text)

    def _literal(self, text: str) -> str:
        if "{" in text or "}" in text:
            raise ConfigError(
                f"Template {self.text!r} has a brace that is not part of a placeholder. Write {{i}}, {{i+1}} or "
                r"{x:REGEX} without braces in the regular expression."
            )
        self._parts.append(text)
        return re.escape(text)

    def match(self, name: str) -> dict[str, str] | None:
        """Return what the placeholders stand for in a name; ``None`` if it does not match."""
        found = self._regex.fullmatch(name)
        if found is None:
            return None
        values = found.groupdict()
        for key, shift in self._shifts.items():
            if shift:
                values[key] = str(int(values[key]) - shift)
        return None if any(value.startswith("-") for value in values.values()) else values

    def filled(self, values: Mapping[str, str]) -> str:
        """Return the name with the placeholders filled in.

        Raises:
            ConfigError: A number is to be added to text.
        """
        return "".join(part if isinstance(part, str) else self._value(*part, values) for part in self._parts)

    def _value(self, name: str, shift: int, values: Mapping[str, str]) -> str:
        value = values[name]
        if not shift:
            return value
        if not re.fullmatch(_NUMBER, value):
            raise ConfigError(f"Template {self.text!r} adds a number to {{{name}}}, which is {value!r}.")
        return str(int(value) + shift)


class Group(NamedTuple):
    """Names that belong together."""

    values: dict[str, str]
    """The values of the placeholders that they share."""
    names: dict[tuple[int, str], str]
    """The names, by the number of their template and what the placeholder stands for that they do not share."""


def grouped(names: Iterable[str], templates: Sequence[Template], over: str = "") -> list[Group]:
    """Return the names that match templates, together where their placeholders agree.

    Args:
        names: The names; one that several templates match belongs to the first of them.
        templates: They share all their placeholders.
        over: A placeholder in which the names of a group differ.
    """
    groups: dict[Binding, Group] = {}
    for name in names:
        for index, template in enumerate(templates):
            values = template.match(name)
            if values is not None:
                own = values.pop(over, "")
                key = tuple(sorted(values.items()))
                groups.setdefault(key, Group(values, {})).names[index, own] = name
                break
    return [*groups.values()]
