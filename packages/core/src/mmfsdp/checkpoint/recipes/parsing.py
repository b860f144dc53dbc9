"""Reads a recipe from the content of a TOML, YAML or JSON file, and checks every part of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mmfsdp.checkpoint.recipes.rearranging import Pattern
from mmfsdp.checkpoint.recipes.recipe import Recipe
from mmfsdp.checkpoint.recipes.rules import Drop, Fuse, Rearrange, Rename, Rule, Split, Stack, Tie, Trim, Unstack, Untie
from mmfsdp.checkpoint.recipes.templates import Template
from mmfsdp.errors import ConfigError, closest

__all__ = ["parse_recipe"]


def parse_recipe(content: Mapping[str, Any], name: str) -> Recipe:
    """Return the recipe that a file describes.

    Args:
        content: What the file holds.
        name: What errors call it.

    Raises:
        ConfigError: A key is unknown, or a rule is malformed; the message says which.
    """
    _check_keys(content, ("about", "values", "unmatched", "rules"), name)
    unmatched = content.get("unmatched", "error")
    if unmatched not in ("keep", "error"):
        raise ConfigError(f"{name}: unmatched is {unmatched!r}, expected 'keep' or 'error'.", config="unmatched")
    rules = content.get("rules")
    if not isinstance(rules, list) or not rules:
        raise ConfigError(f"{name} has no rules. Add a list of them: [[rules]] in TOML.", config="rules")
    values = {
        key: tuple(_list(value, f"{name}: values.{key}", (str, int)))
        for key, value in content.get("values", {}).items()
    }
    parsed = tuple(_rule(rule, f"{name}: rules[{index}]") for index, rule in enumerate(rules))
    return Recipe(name, _text(content.get("about", ""), f"{name}: about"), parsed, values, unmatched == "keep")


def _rule(given: Any, where: str) -> Rule:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} is {given!r}, expected a table such as rename = {{...}}.", config=where)
    kinds = [key for key in given if key in _KINDS]
    if len(kinds) != 1:
        wrong = [key for key in given if key not in (*_KINDS, "optional", "recomputed")]
        hint = closest(wrong[0], _KINDS) if wrong else ""
        raise ConfigError(f"{where} has {len(kinds)} of {', '.join(_KINDS)}, expected one.{hint}", config=where)
    [kind] = kinds
    _check_keys(given, (kind, "optional", *(("recomputed",) if kind == "drop" else ())), where)
    flags = {}
    for flag in ("optional", "recomputed"):
        flags[flag] = given.get(flag, False)
        if not isinstance(flags[flag], bool):
            raise ConfigError(f"{where}.{flag} is {flags[flag]!r}, expected true or false.", config=where)
    path = f"{where}.{kind}"
    try:
        if kind == "drop":
            return Drop(path, flags["optional"], _templates(given[kind], path), flags["recomputed"])
        return _KINDS[kind](path, flags["optional"], given[kind])
    except ConfigError as error:
        known = error.message.startswith(where)
        raise error if known else ConfigError(f"{path}: {error.message}", config=path) from None


def _rename(where: str, optional: bool, given: Any) -> Rule:
    return Rename(where, optional, _pairs(given, where))


def _tie(where: str, optional: bool, given: Any) -> Rule:
    return Tie(where, optional, _pairs(given, where))


def _untie(where: str, optional: bool, given: Any) -> Rule:
    return Untie(where, optional, _pairs(given, where))


def _fuse(where: str, optional: bool, given: Any) -> Rule:
    return Fuse(where, optional, *_parted(where, given))


def _split(where: str, optional: bool, given: Any) -> Rule:
    return Split(where, optional, *_parted(where, given))


def _parted(where: str, given: Any) -> tuple[tuple[Template, ...], Template, int, tuple[str, ...] | None]:
    _check_keys(given, ("parts", "whole", "dim", "sizes"), where, ("parts", "whole"))
    parts = _templates(given["parts"], where)
    whole = Template(_text(given["whole"], f"{where}.whole"), parts[0].regexes)
    parts = tuple(Template(part.text, whole.regexes) for part in parts)
    for part in parts:
        _check_placeholders(part, whole, where)
    sizes = None
    if "sizes" in given:
        sizes = tuple(map(str, _list(given["sizes"], f"{where}.sizes", (str, int))))
        if len(sizes) != len(parts):
            raise ConfigError(f"{where} has {len(sizes)} sizes for {len(parts)} parts.", config=where)
    return parts, whole, _dim(given, where), sizes


def _stack(where: str, optional: bool, given: Any) -> Rule:
    return Stack(where, optional, *_stacked(where, given))


def _unstack(where: str, optional: bool, given: Any) -> Rule:
    return Unstack(where, optional, *_stacked(where, given))


def _stacked(where: str, given: Any) -> tuple[Template, str, Template, int]:
    _check_keys(given, ("parts", "over", "whole", "dim"), where, ("parts", "over", "whole"))
    over = _text(given["over"], f"{where}.over")
    part = Template(_text(given["parts"], f"{where}.parts"), {over: r"\d+"})
    whole = Template(_text(given["whole"], f"{where}.whole"), part.regexes)
    part = Template(part.text, whole.regexes)
    if {*part.names} != {*whole.names, over} or over in whole.names:
        raise ConfigError(
            f"{where}: {part.text!r} must have the placeholders of {whole.text!r} and {{{over}}}.", config=where
        )
    return part, over, whole, _dim(given, where)


def _rearrange(where: str, optional: bool, given: Any) -> Rule:
    _check_keys(given, ("names", "pattern", "sizes"), where, ("names", "pattern"))
    text = _text(given["pattern"], f"{where}.pattern")
    try:
        pattern = Pattern(text)
    except ValueError as error:
        raise ConfigError(f"{where}: the pattern {text!r} is malformed: {error}.", config=where) from None
    sizes = given.get("sizes", {})
    _check_keys(sizes, pattern.axes, f"{where}.sizes")
    sized = {axis: str(size) for axis, size in sizes.items()}
    return Rearrange(where, optional, _templates(given["names"], where), text, sized)


def _trim(where: str, optional: bool, given: Any) -> Rule:
    _check_keys(given, ("names", "size", "dim"), where, ("names", "size"))
    size = given["size"]
    if not isinstance(size, str | int) or isinstance(size, bool):
        raise ConfigError(f"{where}.size is {size!r}, expected a number or a value.", config=where)
    return Trim(where, optional, _templates(given["names"], where), str(size), _dim(given, where))


_KINDS: dict[str, Callable[[str, bool, Any], Rule]] = {
    "rename": _rename,
    "fuse": _fuse,
    "split": _split,
    "stack": _stack,
    "unstack": _unstack,
    "rearrange": _rearrange,
    "trim": _trim,
    "drop": lambda where, optional, given: Drop(where, optional, _templates(given, where), False),
    "tie": _tie,
    "untie": _untie,
}


def _pairs(given: Any, where: str) -> tuple[tuple[Template, Template], ...]:
    if not isinstance(given, Mapping) or not given:
        raise ConfigError(f"{where} is {given!r}, expected names and what they become.", config=where)
    pairs = []
    for one, two in given.items():
        first = Template(_text(one, where))
        second = Template(_text(two, where), first.regexes)
        first = Template(first.text, second.regexes)
        _check_placeholders(first, second, where)
        pairs.append((first, second))
    return tuple(pairs)


def _templates(given: Any, where: str) -> tuple[Template, ...]:
    texts = _list(given, where, (str,))
    if not texts:
        raise ConfigError(f"{where} names no tensor.", config=where)
    known: dict[str, str] = {}
    for text in texts:
        known |= Template(text).regexes
    return tuple(Template(text, known) for text in texts)


def _check_placeholders(one: Template, two: Template, where: str) -> None:
    if {*one.names} != {*two.names}:
        raise ConfigError(
            f"{where}: {one.text!r} and {two.text!r} have different placeholders, so names cannot be told apart. Use "
            "the same in both.",
            config=where,
        )


def _check_keys(given: Any, known: tuple[str, ...] | list[str], where: str, needed: tuple[str, ...] = ()) -> None:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} is {given!r}, expected a table.", config=where)
    for key in given:
        if key not in known:
            hint = closest(key, known) or f" Accepted: {', '.join(known) or 'none'}."
            raise ConfigError(f"{where} has the unknown key {key!r}.{hint}", config=where)
    for key in needed:
        if key not in given:
            raise ConfigError(f"{where} lacks {key!r}.", config=where)


def _dim(given: Mapping[str, Any], where: str) -> int:
    dim = given.get("dim", 0)
    if type(dim) is not int or dim < 0:
        raise ConfigError(f"{where}.dim is {dim!r}, expected 0 or more, counted from the first.", config=where)
    return dim


def _text(given: Any, where: str) -> str:
    if not isinstance(given, str):
        raise ConfigError(f"{where} is {given!r}, expected text.", config=where)
    return given


def _list(given: Any, where: str, kinds: tuple[type, ...]) -> list[Any]:
    items = [given] if isinstance(given, kinds) else given
    if not isinstance(items, list | tuple) or not all(isinstance(item, kinds) for item in items):
        raise ConfigError(f"{where} is {given!r}, expected a list.", config=where)
    return [*items]
