"""Writes numbers as ggml's Q8_0: for each 32 of a row a float16 scale and 32 signed bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmfsdp.basics.arguments import argument
from mmfsdp.basics.dtypes import itemsize
from mmfsdp.checkpoint.entries import ComputedEntry, TensorEntry
from mmfsdp.checkpoint.files.disk import OpenFiles
from mmfsdp.checkpoint.files.elements import tensor_blocks, values
from mmfsdp.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["WIDTH", "EightBitBlocks"]

WIDTH = 32
"""Elements of a block."""
_BYTES = 34  # of a block: the scale and the codes
_READ = 1 << 19  # bytes of the source at a time, a multiple of a block's


@dataclass(frozen=True, slots=True)
class EightBitBlocks(ComputedEntry):
    """A floating point tensor as the bytes of its blocks; its one part is the tensor."""

    @classmethod
    def of(cls, source: TensorEntry) -> EightBitBlocks:
        """Return the blocks of a tensor whose last dimension is a multiple of `WIDTH`."""
        shape = (*source.shape[:-1], source.shape[-1] // WIDTH * _BYTES)
        return cls(source.name, "uint8", shape, source.chunks(), (source,))

    def blocks(self, files: OpenFiles) -> Iterator[memoryview]:
        import numpy as np

        [source] = self.parts
        for block in tensor_blocks(files, source, _READ // 4 * itemsize(source.dtype)):
            numbers = values(block, source.dtype).astype(np.float32, copy=False)
            yield _encoded(numbers.reshape(-1, WIDTH), source.name).reshape(-1).data


def _encoded(numbers: NDArray[np.float32], name: str) -> NDArray[np.uint8]:
    """Return the bytes of blocks: the largest number of a block becomes 127, halves are rounded away from zero.

    It takes the steps of ggml's reference in float32, so the bytes are the same.
    """
    import numpy as np

    encoded = np.empty((len(numbers), _BYTES), np.uint8)
    with np.errstate(all="ignore"):
        scales = np.abs(numbers).max(axis=1, keepdims=True) / np.float32(127)
        shares = numbers * np.where(scales == 0, np.float32(0), np.float32(1) / scales)
        stored = scales.astype("<f2")
    if not np.isfinite(stored).all():
        raise ConfigError(
            f"{name!r} holds numbers that are infinite, NaN or above 8.3e6, which Q8_0 cannot hold. Leave out "
            f"{argument('quantize')}, or repair the weights.",
            config="quantize",
        )
    whole = np.trunc(shares)
    with np.errstate(invalid="ignore"):  # of a scale so small that its inverse is infinite; it is stored as zero
        encoded[:, 2:] = (whole + np.trunc(2 * (shares - whole))).astype(np.int8).view(np.uint8)
    encoded[:, :2] = stored.view(np.uint8)
    return encoded
