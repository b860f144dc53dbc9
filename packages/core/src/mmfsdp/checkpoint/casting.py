"""Changes the dtype of floating point tensors while they are copied, in blocks: rounded to nearest, ties to even."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmfsdp.checkpoint.layout import TensorEntry
from mmfsdp.checkpoint.numeric import require_numpy, values
from mmfsdp.checkpoint.open_files import OpenFiles
from mmfsdp.checkpoint.renaming import compile_pattern
from mmfsdp.checkpoint.streaming import tensor_blocks
from mmfsdp.dtypes import canonical_dtype, is_floating_point
from mmfsdp.errors import ConfigError, closest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["CastEntry", "cast_block", "chosen_dtypes", "converted_blocks"]

_BLOCK = 1 << 19  # bytes of the source: what is made of it fits the second-level cache too
_TARGETS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class CastEntry(TensorEntry):
    """A tensor as it will be: its dtype is the wanted one, its chunks are those of the source."""

    source: TensorEntry
    """The tensor as it is stored."""
    overflow: Callable[[str, int], None]
    """Called with the name and the number of finite elements that became infinite, if there are any."""

    @classmethod
    def of(cls, source: TensorEntry, dtype: str, overflow: Callable[[str, int], None]) -> CastEntry:
        """Return a tensor cast to another dtype."""
        return cls(source.name, dtype, source.shape, source.chunks, source, overflow)


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
    patterns = {pattern: compile_pattern(pattern) for pattern in dtypes}
    floating = [name for name, entry in tensors.items() if is_floating_point(entry.dtype)]
    chosen: dict[str, str] = {}
    for pattern, regex in patterns.items():
        matched = [name for name in floating if regex.match(name)]
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
    """Return elements of another dtype, and how many finite ones became infinite.

    Args:
        block: The elements, packed.
        source: Their dtype.
        target: The wanted dtype: float16, bfloat16, float32 or float64.
    """
    import numpy as np

    given = values(block, source)
    with np.errstate(all="ignore"):
        if target == "bfloat16":
            if given.dtype == np.float32 and _is_ordinary(given):
                return _bytes(_rounded(given)), 0
            words = _bfloat16(given)
            infinite = (words & np.uint16(0x7FFF)) == 0x7F80
            return _bytes(words), int((infinite & np.isfinite(given)).sum())
        cast = given.astype(np.dtype(target).newbyteorder("<"))
        return _bytes(cast), int((np.isinf(cast) & np.isfinite(given)).sum())


def _bytes(array: NDArray[Any]) -> memoryview:
    import numpy as np

    return array.astype(array.dtype.newbyteorder("<"), copy=False).view(np.uint8).data


def _is_ordinary(given: NDArray[np.float32]) -> bool:
    """Tell whether all elements are numbers that stay finite in bfloat16, by two reductions."""
    most = 3.39e38  # a little below where rounding goes to infinity
    return not given.size or (float(given.max()) < most and float(given.min()) > -most)


def _rounded(given: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round numbers as ``_bfloat16`` does, in few passes over memory."""
    import numpy as np

    bits = given.view(np.uint32)
    words = bits >> np.uint32(16)
    words &= np.uint32(1)
    words += np.uint32(0x7FFF)
    words += bits
    words >>= np.uint32(16)
    return words.astype(np.uint16)


def _bfloat16(given: NDArray[Any]) -> NDArray[np.uint16]:
    import numpy as np

    bits = (_to_odd(given) if given.dtype == np.float64 else given.astype(np.float32)).view(np.uint32)
    # Half a unit of the last place that stays, less one where that place is even: ties go to even.
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(given), quiet, rounded).astype(np.uint16)


def _to_odd(given: NDArray[Any]) -> NDArray[np.float32]:
    """Round float64 to float32 so that rounding once more is right: cut off, and set the last bit if that lost any.

    Rounding to nearest twice can turn a value next to a tie into the tie: Boldo and Melquiond, "When double rounding is
    odd", 2004.
    """
    import numpy as np

    near = given.astype(np.float32)
    back = near.astype(np.float64)
    bits = near.view(np.uint32).copy()
    inexact = (back != given) & ~np.isnan(given)
    bits[inexact & (np.abs(back) > np.abs(given))] -= np.uint32(1)
    bits[inexact] |= np.uint32(1)
    return bits.view(np.float32)
