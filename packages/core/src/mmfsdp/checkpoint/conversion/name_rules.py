"""Chooses and renames tensors by patterns; every pattern must match something."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mmfsdp.basics.text import compile_pattern, compile_regex, name_list
from mmfsdp.errors import ConfigError, closest

__all__ = ["NameRules"]


@dataclass
class NameRules:
    """Decides for each name whether it is written and under which new name; counts what matched.

    Patterns and rewrites see a name as it is below the part that is kept; for a part of several levels its keys are
    joined with ``/``. First comes the choice, by the source's names; then the prefix goes; then the rewrites follow, in
    order.
    """

    include: Sequence[str] = ()
    """Take only tensors that match one of these patterns; all if there is none."""
    exclude: Sequence[str] = ()
    """Leave out what matches one of these."""
    rename: Sequence[tuple[str, str]] = ()
    """Regular expressions and their replacements, as for ``re.sub``."""
    strip_prefix: str | None = None
    """Take this off the beginning of the last key of each name that has it."""
    renames: dict[str, str] = field(default_factory=dict)
    """Old name to new name of every tensor that was renamed so far."""
    _hits: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._include = {pattern: compile_pattern(pattern, "./") for pattern in self.include}
        self._exclude = {pattern: compile_pattern(pattern, "./") for pattern in self.exclude}
        self._rename = [(compile_regex(regex), replacement, regex) for regex, replacement in self.rename]

    @property
    def active(self) -> bool:
        """Whether there is any rule."""
        return bool(self.include or self.exclude or self.rename or self.strip_prefix)

    def included(self, name: str) -> bool:
        """Tell whether a tensor is asked for."""
        return self._matches(self._include, name) if self._include else True

    def excluded(self, name: str) -> bool:
        """Tell whether something, tensor or not, is to be left out."""
        return self._matches(self._exclude, name)

    def renamed(self, name: str, *, count: bool = True) -> str:
        """Return the new name.

        Args:
            name: The name in the source.
            count: Whether a match counts as a use of the rule.

        Raises:
            ConfigError: A replacement refers to a group that its regex does not have.
        """
        given = name
        parent, slash, key = name.rpartition("/")
        if self.strip_prefix and key.startswith(self.strip_prefix):
            key = key.removeprefix(self.strip_prefix)
            self._hits["strip_prefix"] = self._hits.get("strip_prefix", 0) + count
        name = parent + slash + key
        for regex, replacement, text in self._rename:
            try:
                name, matches = regex.subn(replacement, name)
            except (re.error, IndexError) as error:
                raise ConfigError(f"rename={text!r} -> {replacement!r} is malformed: {error}.") from error
            self._hits[f"rename {text}"] = self._hits.get(f"rename {text}", 0) + (matches if count else 0)
        if count and name != given:
            self.renames[given] = name
        return name

    def check_all_used(self, names: Iterable[str]) -> None:
        """Raise if a rule has matched nothing so far.

        Args:
            names: The names that there were, for suggestions.

        Raises:
            ConfigError: It names the rule and the nearest names.
        """
        unused = [(f"include={pattern!r}", pattern) for pattern in self.include if not self._hits.get(pattern)]
        unused += [(f"exclude={pattern!r}", pattern) for pattern in self.exclude if not self._hits.get(pattern)]
        unused += [(f"rename={text!r}", text) for _, _, text in self._rename if not self._hits.get(f"rename {text}")]
        if self.strip_prefix and not self._hits.get("strip_prefix"):
            unused.append((f"strip_prefix={self.strip_prefix!r}", self.strip_prefix))
        if unused:
            spelling, pattern = unused[0]
            present = list(names)
            hint = closest(pattern.removeprefix("re:").replace("*", ""), present)
            raise ConfigError(f"{spelling} matches nothing.{hint or f' There are: {name_list(present, 5)}.'}")

    def _matches(self, patterns: Mapping[str, re.Pattern[str]], name: str) -> bool:
        found = [pattern for pattern, regex in patterns.items() if regex.fullmatch(name)]
        for pattern in found:
            self._hits[pattern] = self._hits.get(pattern, 0) + 1
        return bool(found)
