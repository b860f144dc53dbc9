"""Reads the elements of tensors: their bytes in row-major order, block by block, and as numbers of numpy."""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Generator, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from mmfsdp.basics.descriptors import read_into, size_of
from mmfsdp.basics.dtypes import itemsize, numbers_per_element
from mmfsdp.basics.installing import pip_install
from mmfsdp.checkpoint.chunks import row_major_strides
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.files.disk import OpenFiles, read_errors, truncated
from mmfsdp.checkpoint.geometry import StridedRun, byte_runs
from mmfsdp.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "BLOCK",
    "equal_bytes",
    "equal_data",
    "has_numpy",
    "packed_blocks",
    "raw",
    "require_numpy",
    "small_floats",
    "tensor_blocks",
    "values",
]

BLOCK = 4 << 20
"""Bytes of a block: a multiple of every item size."""
_FIRST = 1 << 12  # bytes of two blocks that are compared before they are copied to be compared
_FORMATS: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


def tensor_blocks(files: OpenFiles, entry: TensorEntry, block: int = BLOCK) -> Iterator[memoryview]:
    """Yield a whole tensor, packed in row-major order, in blocks that are full but for the last.

    Args:
        files: The open files to read with.
        entry: The tensor; its chunks must cover it (see ``check_coverage``).
        block: Bytes of a block, a multiple of the item size.

    Yields:
        A view of a buffer that the next block overwrites.

    Raises:
        CorruptCheckpointError: A file ends too early.
    """
    buffer = memoryview(bytearray(min(block, entry.nbytes)))
    filled = 0
    computed = entry.blocks(files)
    for given in computed or ():
        filled = yield from _put(given, buffer, filled)
    for run in byte_runs(entry) if computed is None else ():
        if isinstance(run, StridedRun):
            for piece in packed_blocks(files.descriptor(run.file), run, entry.name):
                filled = yield from _put(memoryview(piece), buffer, filled)
            continue
        source, end = run.source, run.source + run.length
        while source < end:
            # Asked for anew each time: while the reader of a block is at work, others may have used the files.
            view = buffer[filled : filled + min(end - source, len(buffer) - filled)]
            descriptor = files.descriptor(run.file)
            with read_errors(run.file):
                count = read_into(descriptor, view, source)
            if count == 0:
                raise truncated(run.file, entry.name, source)
            if files.observer is not None:
                files.observer(run.file, source, view[:count])
            source, filled = source + count, filled + count
            if filled == len(buffer):
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


def _put(rest: memoryview, buffer: memoryview, filled: int) -> Generator[memoryview, None, int]:
    """Append bytes to a buffer, yield it whenever it is full, and return how many bytes it has then."""
    while rest:
        count = min(len(rest), len(buffer) - filled)
        buffer[filled : filled + count] = rest[:count]
        rest, filled = rest[count:], filled + count
        if filled == len(buffer):
            yield buffer
            filled = 0
    return filled


def packed_blocks(source: int, run: StridedRun, name: str) -> Iterator[bytes]:
    """Yield the elements of a strided run in target order, packed, a few megabytes at a time.

    Args:
        source: Descriptor of the file that holds them.
        run: Which elements.
        name: The tensor, for messages.

    Raises:
        CorruptCheckpointError: The file ends before the last element.
    """
    item, sizes, strides = _simplified(run)
    span = item * (1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True)))
    if size_of(source) < run.source + span:
        raise truncated(run.file, name, run.source)
    # The kernel may drop mapped pages again: they only count as page cache.
    begin = run.source - run.source % mmap.ALLOCATIONGRANULARITY
    # Not closed by hand: slices of it may still be alive if the caller stops early.
    if source < 0:
        mapped = _copy_to_map(source, begin, run.source + span, run, name)
    else:
        mapped = mmap.mmap(source, run.source + span - begin, prot=mmap.PROT_READ, offset=begin)
    block = bytearray()
    for piece in _pieces(memoryview(mapped)[run.source - begin :], item, sizes, strides):
        block += piece
        if len(block) >= BLOCK:
            yield bytes(block)
            block.clear()
    if block:
        yield bytes(block)


def _copy_to_map(source: int, begin: int, end: int, run: StridedRun, name: str) -> mmap.mmap:
    """Return bytes of a file on a server as a mapped file without a name, to be read in any order."""
    import tempfile  # only for servers

    with tempfile.TemporaryFile() as copy:
        copy.truncate(end - begin)
        mapped = mmap.mmap(copy.fileno(), end - begin)
    view, at = memoryview(mapped), run.source
    while at < end:
        count = read_into(source, view[at - begin :][:BLOCK], at)
        if count == 0:
            raise truncated(run.file, name, at)
        at += count
    return mapped


def _simplified(run: StridedRun) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    # Neighbouring dimensions whose steps fit become one, so that the inner loop, which C does, is long.
    item, sizes, strides = run.item, list(run.sizes), list(run.strides)
    if item not in _FORMATS:  # complex128: two halves of eight bytes
        item, sizes, strides = 8, [*sizes, 2], [*(step * 2 for step in strides), 1]
    merged: list[tuple[int, int]] = []
    for size, step in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * step:
            merged[-1] = (merged[-1][0] * size, step)
        else:
            merged.append((size, step))
    merged = merged or [(1, 1)]
    return item, tuple(size for size, _ in merged), tuple(step for _, step in merged)


def _pieces(data: memoryview, item: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Iterator[bytes]:
    """Yield the elements in pieces of up to one block."""
    if not sizes:
        yield bytes(data[:item])
        return
    size, step = sizes[0], strides[0]
    below = item * math.prod(sizes[1:])
    if step == 0 and below <= BLOCK:  # an expanded dimension
        unit = b"".join(_pieces(data, item, sizes[1:], strides[1:]))
        yield from _repeated(unit, size)
    elif len(sizes) > 1 and 4 * sizes[-1] < max(sizes) and size * below <= BLOCK and 0 not in strides:
        yield _scattered(data, item, sizes, strides)
    elif len(sizes) > 1:
        for index in range(size):
            yield from _pieces(data[index * step * item :], item, sizes[1:], strides[1:])
    else:
        for begin in range(0, size, BLOCK // item):
            count = min(BLOCK // item, size - begin)
            elements = data[begin * step * item : (begin * step + (count - 1) * step + 1) * item]
            yield elements.cast(_FORMATS[item])[::step].tobytes()


def _scattered(data: memoryview, item: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """Return elements whose last dimension is short; go along the longest one, so that each step copies many."""
    packed_strides = row_major_strides(sizes)
    longest = sizes.index(max(sizes))
    others = [dim for dim in range(len(sizes)) if dim != longest]
    packed = bytearray(item * math.prod(sizes))
    target = memoryview(packed).cast(_FORMATS[item])
    step, packed_step = strides[longest], packed_strides[longest]
    reach = (sizes[longest] - 1) * step + 1
    for index in itertools.product(*(range(sizes[dim]) for dim in others)):
        begin = sum(at * strides[dim] for at, dim in zip(index, others, strict=True))
        first = sum(at * packed_strides[dim] for at, dim in zip(index, others, strict=True))
        elements = data[begin * item : (begin + reach) * item].cast(_FORMATS[item])
        target[first : first + (sizes[longest] - 1) * packed_step + 1 : packed_step] = elements[::step]
    return bytes(packed)


def _repeated(unit: bytes, times: int) -> Iterator[bytes]:
    at_once = min(times, BLOCK // len(unit))
    block = unit * at_once
    for _ in range(times // at_once):
        yield block
    yield unit * (times % at_once)


def equal_bytes(one: memoryview, two: memoryview) -> bool:
    """Tell whether two blocks of bytes are equal."""
    # Two memoryviews compare one item after the other, in a hundred times the time. Most that differ do so early.
    return bytearray(one[:_FIRST]) == two[:_FIRST] and bytearray(one) == two


def equal_data(one: TensorEntry, two: TensorEntry) -> bool:
    """Tell whether two tensors are the same bit for bit; reads both, unless the same bytes hold them."""
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        return False
    if one.has_same_source(two):
        return True
    with OpenFiles() as files:
        pairs = zip(tensor_blocks(files, one), tensor_blocks(files, two), strict=True)
        return all(equal_bytes(left, right) for left, right in pairs)


# dtype -> (bits of the exponent, bits of the mantissa, bias, what the largest codes mean):
# https://arxiv.org/abs/2209.05433 for e4m3fn and e5m2, https://onnx.ai/onnx/technical/float8.html for the others.
_SMALL_FLOATS = {
    "float8_e4m3fn": (4, 3, 7, "fn"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e4m3fnuz": (4, 3, 8, "fnuz"),
    "float8_e5m2fnuz": (5, 2, 16, "fnuz"),
}


def require_numpy(what: str) -> None:
    """Raise unless numpy can be imported.

    Args:
        what: The feature that needs it, for the message.

    Raises:
        ConfigError: numpy is missing; the message names the command that installs it.
    """
    try:
        import numpy  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{what} needs numpy. Install it with: {pip_install('mmfsdp[numpy]')}") from error


def has_numpy() -> bool:
    """Tell whether numpy can be imported."""
    try:
        require_numpy("")
    except ConfigError:
        return False
    return True


def raw(block: memoryview, dtype: str) -> NDArray[Any]:
    """Return the elements as opaque words to compare for equality; a row of words for elements of 3 or 16 bytes."""
    import numpy as np

    size = itemsize(dtype)
    if size == 16:
        return np.frombuffer(block, np.uint64).reshape(-1, 2)
    if size == 3:  # four numbers of 6 bits
        return np.frombuffer(block, np.uint8).reshape(-1, 3)
    return np.frombuffer(block, f"<u{size}")


def values(block: memoryview, dtype: str, room: NDArray[np.float32] | None = None) -> NDArray[Any]:
    """Return the elements as an array of numbers that holds each exactly.

    bfloat16 and 8-bit floats become float32, and bytes of smaller floats uint8; everything else stays what it is.

    Args:
        block: The elements, packed.
        dtype: Their dtype.
        room: Memory for bfloat16, at least as many elements as the block has, to be used again for the next block:
            new memory for each block takes as long as the arithmetic.
    """
    import numpy as np

    if dtype == "bfloat16":
        words = np.frombuffer(block, "<u2")
        bits = (np.empty(len(words), np.float32) if room is None else room[: len(words)]).view(np.uint32)
        bits[:] = words
        np.left_shift(bits, np.uint32(16), out=bits)
        return bits.view(np.float32)
    if numbers_per_element(dtype) > 1:
        return np.frombuffer(block, np.uint8)  # parts of several codes
    if dtype.startswith("float8"):
        return small_floats(dtype)[np.frombuffer(block, np.uint8)]
    return np.frombuffer(block, np.dtype(dtype).newbyteorder("<"))


@cache
def small_floats(dtype: str) -> NDArray[np.float32]:
    """Return the value of each of the 256 codes of an 8-bit float."""
    import numpy as np

    return np.array([_decoded(dtype, code) for code in range(256)], np.float32)


def _decoded(dtype: str, code: int) -> float:
    if dtype == "float8_e8m0fnu":  # powers of two only
        return float("nan") if code == 255 else 2.0 ** (code - 127)
    exponent_bits, mantissa_bits, bias, kind = _SMALL_FLOATS[dtype]
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    if kind == "fnuz" and code == 0x80:
        return float("nan")
    if kind == "fn" and code & 0x7F == 0x7F:
        return float("nan")
    if kind == "ieee" and exponent == (1 << exponent_bits) - 1:
        return float("nan") if mantissa else sign * float("inf")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
