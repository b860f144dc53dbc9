"""The settings of a conversion, one validated value, and the rules for names that follow from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from mmfsdp.basics.boxes import Ranks
from mmfsdp.basics.dtypes import canonical_dtype
from mmfsdp.basics.text import compile_pattern, compile_regex, name_list, parse_bytes
from mmfsdp.checkpoint.formats.registry import FORMATS, Format, find_format, format_of_suffix
from mmfsdp.config.base import ConfigModel
from mmfsdp.errors import ConfigError, closest

__all__ = ["Conversion", "NameRules", "target_format"]

_WRITTEN = [item for item in FORMATS if item.writer is not None]


def _checked(check: Callable[[Any], Any]) -> BeforeValidator:
    """Return a validator that skips None and whose error message reaches the user."""

    def validate(value: Any) -> Any:
        try:
            return None if value is None else check(value)
        except ConfigError as error:
            raise ValueError(error.message) from None

    return BeforeValidator(validate)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _pairs(value: Any) -> Any:
    return list(value.items()) if isinstance(value, Mapping) else value


def _dtypes(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {pattern: canonical_dtype(dtype) for pattern, dtype in value.items()}
    return canonical_dtype(value)


def _written_format(value: Any) -> Any:
    find_format(str(value), _WRITTEN, "format to write")
    return value


def _read_format(value: Any) -> Any:
    find_format(str(value), what="format to read")
    return value


def _ranks(value: Any) -> Any:
    Ranks.parse(value)
    return value


Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]


class Conversion(ConfigModel):
    """What `convert` writes of a checkpoint, and how. Loads from YAML, JSON or TOML with ``from_file``.

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
    drop: Names = ()
    """Write everything except these top-level keys, such as ``['optimizer']``."""
    include: Names = ()
    """Write only tensors whose name in the part that is kept matches one of these patterns: a glob (``*`` within one
    dotted part, ``**`` across parts) or ``'re:...'``."""
    exclude: Names = ()
    """Leave out every tensor and value whose name matches one of these patterns."""
    rename: Annotated[tuple[tuple[str, str], ...], BeforeValidator(_pairs)] = ()
    """Regular expressions and replacements as for ``re.sub``, applied to the names in order; a mapping works too."""
    strip_prefix: str | None = None
    """Remove this prefix from names that have it, before they are renamed."""
    dtype: Annotated[str | dict[str, str] | None, _checked(_dtypes)] = None
    """Cast floating point tensors to this dtype, or those that match a pattern to its dtype; the patterns see the new
    names. One of float8_e4m3fn, float8_e5m2, float16, bfloat16, float32 and float64. Rounds to nearest, ties to even;
    what is too large becomes infinite (448 in float8_e4m3fn) and is reported. Needs numpy."""
    use_ema: bool = False
    """Write the averaged weights as the model's weights."""
    publish: bool = False
    """Write the weights and ``meta`` only, and put the first eight digits of the file's SHA-256 in its name."""
    max_shard_size: Annotated[int | None, _checked(parse_bytes)] = None
    """Write a directory of safetensors files with at most this much tensor data each, such as ``'5GB'``, and their
    index. A number counts bytes; text needs a unit."""
    to: Annotated[str | None, _checked(_written_format)] = None
    """The format to write, by a name that `known_formats` lists; by default the suffix of the target says it."""
    ranks: Annotated[int | str | None, _checked(_ranks)] = None
    """Number of ranks that ``dcp`` and ``local`` divide the tensors among, or text such as ``'2x4'`` for two replicas
    of four shards. By default as many as wrote the source."""
    source_format: Annotated[str | None, _checked(_read_format)] = None
    """The format of the source, by a name that `known_formats` lists, if its content does not show it."""
    overwrite: bool = False
    """Replace an existing target."""
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
    jobs: Annotated[int | None, Field(ge=1)] = None
    """Threads that copy; by default one per processor, four at most. The output does not depend on it."""

    def check_together(self) -> None:
        if self.drop and self.keep not in (None, "all"):
            raise ValueError(
                f"'drop' leaves keys out of everything; it cannot be combined with 'keep' {self.keep!r}. Remove one."
            )
        part = "all" if self.drop else self.keep
        for name, wanted in (("use_ema", self.use_ema), ("publish", self.publish)):
            if wanted and part not in (None, "model"):
                given = "'drop'" if self.drop else f"'keep' {part!r}"
                raise ValueError(f"{name!r} writes the weights; it cannot be combined with {given}. Remove one.")

    def changed(self, settings: Mapping[str, Any]) -> Conversion:
        """Return this conversion with some settings replaced, validated again.

        Raises:
            ConfigError: A setting is unknown or malformed, or two contradict each other.
        """
        if not settings:
            return self
        return Conversion.from_dict({**self.model_dump(exclude_unset=True), **settings})


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
    elif conversion.max_shard_size is None and by_suffix is not None:
        target = by_suffix
    elif conversion.max_shard_size is None:
        raise ConfigError(
            f"The suffix {path.suffix!r} of {path.name!r} does not name a format. Use .safetensors, .pth or .pt, or "
            "set 'to' to 'safetensors', 'pth', 'dcp' or 'local'."
        )
    elif by_suffix is not None:
        raise ConfigError(
            f"'max_shard_size' writes a directory of several files, but {path.name!r} has the suffix of a file. Leave "
            "out the suffix."
        )
    else:
        target = find_format("safetensors_index")
    for setting, fits, needed in (
        ("max_shard_size", target.name == "safetensors_index", "'safetensors_index'"),
        ("publish", not target.directory, "of a single file"),
        ("ranks", target.by_rank, "'dcp' or 'local'"),
    ):
        if getattr(conversion, setting) and not fits:
            given = conversion.to or target.name
            raise ConfigError(f"{setting!r} applies only to the format {needed}, not to {given!r}.")
    return target


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
