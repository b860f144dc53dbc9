"""Changes the dtype of floating point tensors while they are copied, in blocks: rounded to nearest, ties to even."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmfsdp.basics.dtypes import canonical_dtype, is_floating_point
from mmfsdp.basics.text import compile_pattern
from mmfsdp.checkpoint.files.numeric import require_numpy, values
from mmfsdp.checkpoint.files.open_files import OpenFiles
from mmfsdp.checkpoint.files.rounding import to_bfloat16, to_float8
from mmfsdp.checkpoint.files.streaming import tensor_blocks
from mmfsdp.checkpoint.layout import TensorEntry
from mmfsdp.errors import ConfigError, closest

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["CastEntry", "cast_block", "chosen_dtypes", "converted_blocks"]

_BLOCK = 1 << 19  # bytes of the source: what is made of it fits the second-level cache too
_TARGETS = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class CastEntry(TensorEntry):
    """A tensor as it will be: its dtype is the wanted one, its chunks are those of the source."""

    source: TensorEntry
    """The tensor as it is stored."""
    overflow: Callable[[str, int], None]
    """Called with the name and the number of elements that were too large for the dtype, if there are any."""

    @classmethod
    def of(cls, source: TensorEntry, dtype: str, overflow: Callable[[str, int], None]) -> CastEntry:
        """Return a tensor cast to another dtype."""
        return cls(source.name, dtype, source.shape, source.chunks(), source, overflow)


def chosen_dtypes(wanted: str | Mapping[str, str] | None, tensors: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Return the new dtype of each tensor that changes.

    Args:
        wanted: One dtype for all floating point tensors, or patterns and the dtype of what they match; the first that
            matches counts.
        tensors: The tensors by the names that they will have.

    Raises:
        ConfigError: A dtype is unknown or cannot be cast to, a pattern matches no floating point tensor, or numpy is
            not there.
    """
    if wanted is None:
        return {}
    rules = {"**": wanted} if isinstance(wanted, str) else dict(wanted)
    dtypes = {pattern: canonical_dtype(dtype) for pattern, dtype in rules.items()}
    for dtype in dtypes.values():
        if dtype not in _TARGETS:
            raise ConfigError(f"Tensors cannot be cast to {dtype!r} here. Use one of {', '.join(_TARGETS)}.")
    require_numpy("Casting")
    patterns = {pattern: compile_pattern(pattern, "./") for pattern in dtypes}
    floating = [name for name, entry in tensors.items() if is_floating_point(entry.dtype)]
    chosen: dict[str, str] = {}
    for pattern, regex in patterns.items():
        matched = [name for name in floating if regex.fullmatch(name)]
        if not matched:
            hint = closest(pattern.replace("*", ""), floating)
            raise ConfigError(f"dtype pattern {pattern!r} matches no floating point tensor.{hint}")
        for name in matched:
            chosen.setdefault(name, dtypes[pattern])
    return {name: dtype for name, dtype in chosen.items() if dtype != tensors[name].dtype}


def converted_blocks(files: OpenFiles, entry: TensorEntry) -> Iterator[memoryview]:
    """Yield a tensor's bytes as they will be written, packed and cast where that is asked for.

    Args:
        files: The open files to read with.
        entry: The tensor, a ``CastEntry`` or not.
    """
    if not isinstance(entry, CastEntry):
        yield from tensor_blocks(files, entry)
        return
    overflowed = 0
    for block in tensor_blocks(files, entry.source, _BLOCK):
        data, count = cast_block(block, entry.source.dtype, entry.dtype)
        overflowed += count
        yield data
    if overflowed:
        entry.overflow(entry.name, overflowed)


def cast_block(block: memoryview, source: str, target: str) -> tuple[memoryview, int]:
    """Return elements of another dtype, and how many were too large for it.

    Args:
        block: The elements, packed.
        source: Their dtype.
        target: The wanted dtype, one that ``chosen_dtypes`` accepts.
    """
    import numpy as np

    given = values(block, source)
    with np.errstate(all="ignore"):
        if target == "bfloat16":
            words, count = to_bfloat16(given)
            return _bytes(words), count
        if target.startswith("float8"):
            codes, count = to_float8(given, target)
            return _bytes(codes), count
        cast = given.astype(np.dtype(target).newbyteorder("<"))
        return _bytes(cast), int((np.isinf(cast) & np.isfinite(given)).sum())


def _bytes(array: NDArray[Any]) -> memoryview:
    import numpy as np

    return array.astype(array.dtype.newbyteorder("<"), copy=False).view(np.uint8).data
