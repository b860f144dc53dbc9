"""Names, patterns and sizes as text: compiles patterns on names, lists names in messages, prints and reads byte counts.

It needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mmfsdp.errors import ConfigError

__all__ = [
    "WRAPPER_PREFIX",
    "clean_fqn",
    "compile_pattern",
    "compile_regex",
    "human_bytes",
    "human_range",
    "missing",
    "name_list",
    "parse_bytes",
]

WRAPPER_PREFIX = "module."
"""The prefix that DistributedDataParallel and averages of models put before the names of weights."""

_FSDP1_STEP = "_fsdp_wrapped_module"
_GLOB_PARTS = re.compile(r"(\*\*|\*|\?|\[[^\]]*\])")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_BINARY_UNITS = ("KiB", "MiB", "GiB", "TiB")


def compile_pattern(pattern: str, separators: str = ".") -> re.Pattern[str]:
    """Return the regex of a pattern on names. Use it with ``fullmatch``.

    Args:
        pattern: A glob, or ``'re:'`` and a regular expression. In a glob ``*`` and ``?`` match within one part of a
            name, ``**`` across parts, and ``[...]`` one of the listed characters.
        separators: The characters that separate the parts of a name.

    Raises:
        ConfigError: The regular expression is malformed.
    """
    if pattern.startswith("re:"):
        return compile_regex(pattern[3:], pattern)
    within = f"[^{re.escape(separators)}]"
    translated = {"**": ".*", "*": f"{within}*", "?": within}
    pieces = (
        translated.get(piece) or (piece.replace("[!", "[^") if piece.startswith("[") else re.escape(piece))
        for piece in _GLOB_PARTS.split(pattern)
    )
    return compile_regex("".join(pieces), pattern)


def compile_regex(regex: str, given: str | None = None) -> re.Pattern[str]:
    """Return a compiled regular expression.

    Args:
        regex: The regular expression.
        given: How the user wrote it, for the message; by default ``regex``.

    Raises:
        ConfigError: The regular expression is malformed.
    """
    try:
        return re.compile(regex)
    except re.error as error:
        given = regex if given is None else given
        raise ConfigError(f"{given!r} is not a regular expression: {error}.") from None


def clean_fqn(name: str) -> str:
    """Return the name that a parameter or module has in the unsharded model.

    Engine ``fsdp1`` wraps modules, which adds ``_fsdp_wrapped_module`` to their names.
    """
    return ".".join(part for part in name.split(".") if part != _FSDP1_STEP) if _FSDP1_STEP in name else name


def name_list(names: Sequence[object], limit: int = 8, *, quoted: bool = True) -> str:
    """Return names for a message: ``"'a', 'b' and 3 more"``.

    Args:
        names: The names, or numbers such as ranks, which are never quoted.
        limit: How many to show.
        quoted: Whether to quote strings.
    """
    shown = ", ".join(repr(name) if quoted else str(name) for name in names[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown


def missing(names: Sequence[str], *, quoted: bool = False) -> str:
    """Return the end of a sentence: ``"rank1.pth is missing"``, or ``"rank1.pth and 3 more are missing"``."""
    return f"{name_list(names, quoted=quoted)} {'is' if len(names) == 1 else 'are'} missing"


def human_bytes(count: int) -> str:
    """Return a number of bytes with a binary unit: ``'512 B'``, ``'1.50 MiB'``."""
    if abs(count) < 1024:
        return f"{count} B"
    size = float(count)
    for unit in _BINARY_UNITS:
        size /= 1024
        if abs(size) < 1024 or unit == _BINARY_UNITS[-1]:
            break
    return f"{size:.2f} {unit}"


def human_range(sizes: tuple[int, int]) -> str:
    """Return the least and the most bytes with units: ``'1.27 GiB to 2.24 GiB'``, or one size if both look the same."""
    low, high = map(human_bytes, sizes)
    return low if low == high else f"{low} to {high}"


def parse_bytes(size: int | str) -> int:
    """Return a number of bytes given as a number, or as text such as ``'5GB'``, ``'500 MB'`` or ``'2GiB'``.

    Raises:
        ConfigError: The size is malformed, has no unit, or is not positive.
    """
    units = {"B": 1}
    for power, letter in enumerate("KMGT", start=1):
        units |= {f"{letter}B": 1000**power, f"{letter}IB": 1024**power}
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match and not match[2]:
        raise ConfigError(
            f"{size!r} has no unit, and sizes need one. Write {match[1] + 'MiB'!r} or {match[1] + 'GiB'!r}."
        )
    value = int(float(match[1]) * units.get(match[2].upper(), 0)) if match else size
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(f"{size!r} is not a size. Write text such as '2GiB', '500MiB' or '5GB'.")
    return value
