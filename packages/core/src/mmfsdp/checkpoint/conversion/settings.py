"""The settings of a conversion, one validated value, and the rules for names that follow from them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from mmfsdp.basics.arguments import argument
from mmfsdp.basics.boxes import Ranks
from mmfsdp.basics.dtypes import canonical_dtype
from mmfsdp.basics.text import compile_pattern, compile_regex, name_list, parse_bytes
from mmfsdp.checkpoint.formats.common.format import Format
from mmfsdp.checkpoint.formats.registry import FORMATS, find_format, format_of_suffix
from mmfsdp.config.settings_file import read_settings
from mmfsdp.errors import ConfigError, closest

__all__ = ["Conversion", "NameRules", "target_format"]

_READ = [item for item in FORMATS if item.reads]
_WRITTEN = [item for item in FORMATS if item.writes]


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The settings of `convert`. They load from YAML, JSON or TOML with ``from_file``.

    Raises:
        ConfigError: A setting is unknown, misspelt or malformed, or two settings contradict each other.

    Example:
        >>> Conversion(keep="model", dtype="bf16", max_shard_size="5GB").to_dict()["max_shard_size"]
        5000000000
    """

    keep: str | None = None
    """Which part to write. ``'model'``: the weights (in a ``.pth`` file as ``{'state_dict': ..., 'meta': ...}``, the
    shape that OpenMMLab publishes; in a distributed checkpoint their bare names). ``'all'``: everything; in a ``.pth``
    file what a ``full`` checkpoint holds, in a safetensors file every tensor under its whole path such as
    ``'optimizer/state/0/exp_avg'``. Otherwise a top-level key such as ``'ema_state_dict'``. By default everything for
    directories that training resumes from (``dcp``, ``local``), else the weights."""
    drop: tuple[str, ...] = ()
    """Write everything except these top-level keys, such as ``['optimizer']``."""
    include: tuple[str, ...] = ()
    """Write only tensors whose name in the part that is kept matches one of these patterns: a glob (``*`` within one
    dotted part, ``**`` across parts) or ``'re:...'``."""
    exclude: tuple[str, ...] = ()
    """Leave out every tensor and value whose name matches one of these patterns."""
    rename: tuple[tuple[str, str], ...] = ()
    """Regular expressions and replacements as for ``re.sub``, applied to the names in order; a mapping works too."""
    strip_prefix: str | None = None
    """Remove this prefix from names that have it, before they are renamed."""
    recipe: str | None = None
    """Rewrite names and shapes for another library's model: a name that `known_recipes` lists, or the path of a TOML,
    YAML or JSON file. It sees the weights after the rules above."""
    inverse: bool = False
    """Undo the recipe instead."""
    recipe_values: Mapping[str, int] | None = None
    """Numbers that the recipe needs, such as ``{'heads': 32}``; by default they are read from ``config.json`` or
    ``params.json`` beside the source."""
    dtype: str | Mapping[str, str] | None = None
    """Cast floating point tensors to this dtype, or those that match a pattern to its dtype; the patterns see the new
    names. One of float8_e4m3fn, float8_e5m2, float16, bfloat16, float32 and float64. Rounds to nearest, ties to even;
    what is too large becomes infinite (448 in float8_e4m3fn) and is reported. Needs numpy."""
    quantize: str | None = None
    """``'fp8'``: write the weights of linear layers as float8_e4m3fn with a float32 scale for each block of 128 x 128,
    under the names that transformers and vLLM load, after any ``dtype``. Embeddings, heads, routers and norms stay.
    ``'fp8_tensor'`` and ``'fp8_channel'``: the same with a scale for each tensor or output, in the layout of
    compressed-tensors. All three are for safetensors and Hugging Face folders, whose ``config.json`` gets a
    ``quantization_config``. ``'q8_0'``, for ``gguf``: write every matrix in blocks of 32 signed bytes with a float16
    scale. ``'none'``: restore weights that such scales lie beside, before anything else is done; the other kinds and
    ``gguf`` do so too. Needs numpy."""
    use_ema: bool = False
    """Write the averaged weights as the model's weights."""
    publish: bool = False
    """Write the weights and ``meta`` only, and put the first eight digits of the file's SHA-256 in its name."""
    max_shard_size: int | str | None = None
    """Write a directory of safetensors files with at most this much tensor data each, such as ``'5GB'``, and their
    index. A number counts bytes; text needs a unit."""
    to: str | None = None
    """The format to write, by a name that `known_formats` lists; by default the suffix of the target says it."""
    like: str | None = None
    """For ``huggingface``: a folder of the same model, whose configuration and tokenizer files are copied and whose
    weights, if it has any, say which names and shapes are right. By default the source, if it is such a folder, or
    what is at the target. For ``gguf``: the folder with the model's ``config.json`` and tokenizer; by default
    the source. The tokenizer comes from ``vocab.gguf``, a GGUF file, or else from ``tokenizer.model`` or
    ``tokenizer.json``."""
    ranks: int | str | None = None
    """Number of ranks that ``dcp`` and ``local`` divide the tensors among, or text such as ``'2x4'`` for two replicas
    of four shards. By default as many as wrote the source."""
    source_format: str | None = None
    """The format of the source, by a name that `known_formats` lists, if its content does not show it."""
    overwrite: bool = False
    """Replace an existing target."""
    resume: bool = False
    """If the conversion is interrupted, keep what is written, hidden beside the target. The next one with this setting
    goes on from there if its other settings are the same and its source has not changed. In S3, it sends again what
    has changed."""
    trust: bool = False
    """Keep unknown pickled objects as opaque placeholders, never imported, instead of rejecting the source. They are
    written again into a ``.pth`` target."""
    verify: bool = True
    """Compare stored CRC-32 checksums with the data, and a directory with its manifest. Records that are copied whole
    are compared on the way, others are read twice."""
    verify_output: bool = False
    """Read the output before it appears, and compare every tensor with the source."""
    fsync: bool = True
    """Wait until the output is on disk."""
    jobs: int | None = None
    """Threads that copy; by default one per processor, four at most. The output does not depend on it."""

    def __new__(cls, **settings: Any) -> Self:
        names = [item.name for item in fields(cls)]
        for name in settings:
            if name not in names:
                hint = closest(name, names) or f" Accepted: {name_list(names, len(names))}."
                raise ConfigError(f"Conversion.{name}: unknown setting {name!r}.{hint}", config=name)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        wrong: dict[str, str] = {}
        for name, check in _CHECKS.items():
            try:
                if (value := getattr(self, name)) is not None:
                    object.__setattr__(self, name, check(value))
            except ConfigError as error:
                wrong[name] = f"{argument(name, python=f'Conversion.{name}')}: {error.message}"
        if wrong:
            lines = [*wrong.values()]
            several = "\n".join([f"{len(lines)} settings are wrong:", *(f"  - {line}" for line in lines)])
            raise ConfigError(lines[0] if len(lines) == 1 else several, config=next(iter(wrong)))
        self._check_together()

    def _check_together(self) -> None:
        if self.drop and self.keep not in (None, "all"):
            raise ConfigError(
                f"Conversion: {argument('drop')} leaves keys out of everything; it cannot be combined with "
                f"{argument('keep')} {self.keep!r}. Remove one."
            )
        part = "all" if self.drop else self.keep
        if self.recipe is None and (self.inverse or self.recipe_values):
            given = "inverse" if self.inverse else "recipe_values"
            raise ConfigError(
                f"Conversion: {argument(given)} needs a {argument('recipe')}. Set it, or remove {argument(given)}.",
                config=given,
            )
        weights_alone = (
            ("use_ema", self.use_ema),
            ("publish", self.publish),
            ("recipe", self.recipe is not None),
        )
        for name, wanted in weights_alone:
            if wanted and part not in (None, "model"):
                given = argument("drop") if self.drop else f"{argument('keep')} {part!r}"
                raise ConfigError(
                    f"Conversion: {argument(name)} writes the weights; it cannot be combined with {given}. Remove one."
                )

    def changed(self, settings: Mapping[str, Any]) -> Conversion:
        """Return this conversion with some settings replaced, validated again.

        Raises:
            ConfigError: A setting is unknown or malformed, or two contradict each other.
        """
        return Conversion(**{**vars(self), **settings}) if settings else self

    def to_dict(self, *, defaults: bool = True) -> dict[str, Any]:
        """Return plain values, fit for JSON, YAML and TOML (no nulls).

        Args:
            defaults: Whether to include settings that have their default.
        """
        content = {item.name: (getattr(self, item.name), item.default) for item in fields(self)}
        kept = {name: value for name, (value, default) in content.items() if defaults or value != default}
        plain: dict[str, Any] = json.loads(
            json.dumps({name: value for name, value in kept.items() if value is not None})
        )
        return plain

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return JSON text, which `from_file` reads back to an equal object."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Conversion:
        """Return a conversion from plain data; ``data`` is not changed.

        Raises:
            ConfigError: A setting is unknown or malformed, or two contradict each other.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(f"Conversion: {data!r} is not a mapping of settings.")
        return cls(**{str(name): value for name, value in data.items()})

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Conversion:
        """Return a conversion from a file of settings: ``.json``, ``.toml``, ``.yaml`` or ``.yml``.

        Raises:
            ConfigError: There is no such file, it cannot be parsed, or a setting is unknown or malformed.
        """
        return cls.from_dict(read_settings(path))


def _mistyped(expected: str, value: object) -> ConfigError:
    return ConfigError(f"Input should be {expected}, got {value!r} (type {type(value).__name__}).")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _mistyped("a valid string", value)
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _mistyped("a valid boolean", value)
    return value


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, str | list | tuple):
        raise _mistyped("a valid tuple", value)
    return (value,) if isinstance(value, str) else tuple(map(_text, value))


def _numbers(value: Any) -> dict[str, int]:
    if not isinstance(value, Mapping) or not all(type(number) is int and number > 0 for number in value.values()):
        raise _mistyped("names and positive whole numbers", value)
    return {_text(name): number for name, number in value.items()}


def _pairs(value: Any) -> tuple[tuple[str, str], ...]:
    pairs = [*value.items()] if isinstance(value, Mapping) else value
    if not isinstance(pairs, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
    ):
        raise _mistyped("pairs of a regular expression and its replacement", value)
    return tuple((_text(regex), _text(replacement)) for regex, replacement in pairs)


def _dtypes(value: Any) -> str | dict[str, str]:
    if isinstance(value, Mapping):
        return {_text(pattern): canonical_dtype(dtype) for pattern, dtype in value.items()}
    return canonical_dtype(value)


QUANTIZATIONS = ("fp8", "fp8_channel", "fp8_tensor", "q8_0", "none")
"""The values of ``quantize``."""


def _quantization(value: Any) -> str:
    if value not in QUANTIZATIONS:
        raise _mistyped(f"one of {', '.join(map(repr, QUANTIZATIONS))}", value)
    return _text(value)


def _ranks(value: Any) -> int | str:
    Ranks.parse(value)
    return value  # type: ignore[no-any-return]


def _format(among: Iterable[Format], what: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        find_format(str(value), among, what)
        return _text(value)

    return check


def _positive(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _mistyped("a valid integer", value)
    if value < 1:
        raise _mistyped("greater than or equal to 1", value)
    return value


_CHECKS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("keep", "strip_prefix"), _text),
    **dict.fromkeys(
        ("recipe", "like"), lambda value: _text(os.fspath(value) if isinstance(value, os.PathLike) else value)
    ),
    "recipe_values": _numbers,
    **dict.fromkeys(("drop", "include", "exclude"), _names),
    "rename": _pairs,
    "dtype": _dtypes,
    "quantize": _quantization,
    "max_shard_size": parse_bytes,
    "to": _format(_WRITTEN, "format to write"),
    "ranks": _ranks,
    "source_format": _format(_READ, "format to read"),
    "jobs": _positive,
}
_CHECKS |= {item.name: _flag for item in fields(Conversion) if isinstance(item.default, bool)}


_OF_FILES = (".pth", ".pt", ".bin", ".ckpt", ".safetensors", ".gguf")


def target_format(path: Path, conversion: Conversion) -> Format:
    """Return the format to write.

    Args:
        path: Where to write.
        conversion: The settings; ``to``, else ``max_shard_size``, else the suffix of ``path`` sets the format.

    Raises:
        ConfigError: The suffix does not name a format, or a setting does not fit the format.
    """
    by_suffix = format_of_suffix(path.suffix)
    if conversion.to is not None:
        target = find_format(conversion.to, _WRITTEN, "format to write")
        if target.directory and path.suffix.lower() in _OF_FILES:
            remedy = f"Leave out {path.suffix!r}{', or ' + argument('to') if by_suffix is not None else ''}."
            raise ConfigError(f"{conversion.to!r} writes a directory, and {path.name!r} is named like a file. {remedy}")
        if by_suffix is not None and by_suffix is not target:
            raise ConfigError(
                f"{path.name!r} is named like {by_suffix.description}, and {conversion.to!r} is not that. Leave out "
                f"{argument('to')}, or choose another suffix than {path.suffix!r}."
            )
    elif conversion.max_shard_size is None and by_suffix is not None:
        target = by_suffix
    elif conversion.max_shard_size is None:
        raise ConfigError(
            f"The suffix {path.suffix!r} of {path.name!r} does not name a format. Use .safetensors, .pth or .pt, or "
            f"set {argument('to')} to 'safetensors', 'pth', 'hf', 'gguf', 'dcp' or 'local'."
        )
    elif by_suffix is not None:
        raise ConfigError(
            f"{argument('max_shard_size')} writes a directory of several files, but {path.name!r} has the suffix of a "
            "file. Leave out the suffix."
        )
    else:
        target = find_format("safetensors_index")
    quantizes = conversion.quantize == "none" or conversion.quantize in target.quantizes
    for setting, fits, needed in (
        ("max_shard_size", target.divides, _named(lambda item: item.divides)),
        ("like", bool(target.like), _named(lambda item: bool(item.like))),
        ("quantize", quantizes, _named(lambda item: conversion.quantize in item.quantizes)),
        ("verify_output", target.reads, "that can be read"),
        ("publish", not target.directory, "of a single file"),
        ("ranks", target.by_rank, "'dcp' or 'local'"),
    ):
        if getattr(conversion, setting) and not fits:
            given = conversion.to or target.name
            raise ConfigError(f"{argument(setting)} applies only to the format {needed}, not to {given!r}.")
    if target.like and (conversion.drop or conversion.keep not in (None, "model")):
        given = f"{argument('keep')} {conversion.keep!r}" if conversion.keep else argument("drop")
        raise ConfigError(f"A {target.like} holds the weights; it cannot be combined with {given}. Remove it.")
    return target


def _named(fits: Callable[[Format], bool]) -> str:
    """Return the names of the formats that fit, for an error message, those that need a folder to be like last."""
    names = [repr(item.name) for item in sorted(filter(fits, FORMATS), key=lambda item: bool(item.like))]
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


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
                raise ConfigError(f"{argument('rename', text)} -> {replacement!r} is malformed: {error}.") from error
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
        unused = [(argument("include", pattern), pattern) for pattern in self.include if not self._hits.get(pattern)]
        unused += [(argument("exclude", pattern), pattern) for pattern in self.exclude if not self._hits.get(pattern)]
        unused += [
            (argument("rename", text), text) for _, _, text in self._rename if not self._hits.get(f"rename {text}")
        ]
        if self.strip_prefix and not self._hits.get("strip_prefix"):
            unused.append((argument("strip_prefix", self.strip_prefix), self.strip_prefix))
        if unused:
            spelling, pattern = unused[0]
            present = list(names)
            hint = _wider(pattern, present) or closest(pattern.removeprefix("re:").replace("*", ""), present)
            raise ConfigError(f"{spelling} matches nothing.{hint or f' There are: {name_list(present, 5)}.'}")

    def _matches(self, patterns: Mapping[str, re.Pattern[str]], name: str) -> bool:
        found = [pattern for pattern, regex in patterns.items() if regex.fullmatch(name)]
        for pattern in found:
            self._hits[pattern] = self._hits.get(pattern, 0) + 1
        return bool(found)


def _wider(pattern: str, names: Sequence[str]) -> str:
    """Return a sentence for a glob that matches nothing, if it would when ``*`` crossed dots."""
    wide = pattern if pattern.startswith("re:") else re.sub(r"\*+", "**", pattern)
    regex = compile_pattern(wide, "./")
    found = [name for name in names if regex.fullmatch(name)]
    if not found:
        return ""
    return f" '*' stays within one dotted part: {wide!r} matches {len(found)} names, such as {found[0]!r}."
