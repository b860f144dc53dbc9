"""Matches modules by FQN patterns and class names, and raises for patterns that match nothing."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping

import torch.nn as nn

from mmfsdp.basics.text import compile_pattern, name_list
from mmfsdp.errors import PolicyError, closest

__all__ = ["class_names", "match_classes", "match_fqns"]


def match_fqns(patterns: Iterable[str], fqns: Iterable[str], *, what: str, config: str | None = None) -> dict[str, str]:
    """Return the FQNs that match, each with its first matching pattern.

    Args:
        patterns: Globs or ``'re:'`` regexes.
        fqns: Names to choose from.
        what: What is matched, for the message: ``'module'`` or ``'parameter'``.
        config: Path of the setting that holds the patterns.

    Raises:
        PolicyError: A pattern matched nothing; the message names the closest FQNs.
    """
    names = list(fqns)
    matched: dict[str, str] = {}
    for pattern in patterns:
        regex = compile_pattern(pattern)
        hits = [name for name in names if regex.fullmatch(name)]
        if not hits:
            literal = pattern.removeprefix("re:").replace("**", "").replace("*", "0").strip(".")
            hint = closest(literal, names) or f" There are: {name_list(names)}."
            raise PolicyError(f"Pattern {pattern!r} matches no {what}.{hint}", config=config)
        for name in hits:
            matched.setdefault(name, pattern)
    return {name: matched[name] for name in names if name in matched}


def class_names(cls: type) -> set[str]:
    """Return the spellings under which a class can be named: bare, dotted, and with a colon."""
    return {cls.__name__, f"{cls.__module__}.{cls.__qualname__}", f"{cls.__module__}:{cls.__qualname__}"}


def match_classes(
    wanted: Iterable[str],
    modules: Mapping[str, nn.Module],
    *,
    config: str | None = None,
    must_match: bool = True,
    words: Iterable[str] = (),
) -> dict[type, str]:
    """Return the classes of a model's modules that are, or derive from, one of the named classes.

    Names are compared with the names of each module's base classes, and looked up in modules that are already imported
    (a package may give a class a second home: ``'torch.nn.Linear'``). Nothing is imported.

    Args:
        wanted: Class names: ``'Block'``, ``'my.models.Block'`` or ``'my.models:Block'``.
        modules: FQN to module.
        config: Path of the setting that holds the names.
        must_match: Whether a name that no module has is an error.
        words: What else a misspelt name may have meant.

    Raises:
        PolicyError: A name matched no module; the message names the closest classes in the model.
    """
    spellings = {
        cls: {name: base for base in cls.__mro__ for name in class_names(base)} for cls in map(type, modules.values())
    }
    matched: dict[type, str] = {}
    for name in wanted:
        hits = [cls for cls, names in spellings.items() if name in names]
        if not hits and (home := _imported_class(name)) is not None:
            hits = [cls for cls in spellings if home in cls.__mro__]
        if not hits and must_match:
            present = sorted({cls.__name__ for cls in spellings})
            if "," in name:  # as on a command line
                several = [f'"{part}"' for part in re.findall(r"[\w.:]+", name)]
                raise PolicyError(
                    f"{name!r} is not a class. Write several as a list: [{', '.join(several)}].", config=config
                )
            hint = (
                closest(name.replace(":", ".").rpartition(".")[2], [*present, *words])
                or f" The model has: {name_list(present)}."
            )
            raise PolicyError(f"No module of the model is a {name!r}.{hint}", config=config)
        for cls in hits:
            matched.setdefault(cls, name)
    return matched


def _imported_class(name: str) -> type | None:
    """Return the class of a dotted name, if its module is imported already."""
    module, _, attribute = name.replace(":", ".").rpartition(".")
    found = getattr(sys.modules.get(module), attribute, None)
    return found if isinstance(found, type) else None
