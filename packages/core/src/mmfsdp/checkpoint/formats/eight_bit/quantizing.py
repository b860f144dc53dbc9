"""Writes the weights of linear layers as 8-bit floats with a scale for each block of 128 x 128, as DeepSeek-V3's are.

The names and their meaning are those that transformers (``FineGrainedFP8Config``) and vLLM load: beside ``weight`` of
float8_e4m3fn lies ``weight_scale_inv`` of float32, and a weight is the product of the two.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmfsdp.basics.arguments import argument
from mmfsdp.basics.codes import codes_in_units, how_to_restore, not_restored
from mmfsdp.basics.dtypes import is_floating_point, itemsize
from mmfsdp.checkpoint.entries import ComputedEntry, TensorEntry
from mmfsdp.checkpoint.files.disk import OpenFiles
from mmfsdp.checkpoint.files.elements import require_numpy, tensor_blocks, values
from mmfsdp.checkpoint.files.rounding import Rounding
from mmfsdp.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "LARGEST",
    "SCALE",
    "Rows",
    "ScaledCodes",
    "is_linear",
    "is_matrix",
    "largest",
    "quantization_config",
    "quantized",
    "replaced",
]

SCALE = "_scale_inv"
"""The suffix of the name of a weight's scales."""

LARGEST = 448.0
"""The largest number of float8_e4m3fn."""

_SIDE = 128  # of a block, in elements
_ELEMENTS = 1 << 19  # that are worked on at a time, at most, or else a row; few make threads wait for Python's lock
# Matrices that are no linear layers, and those that stay as they are in published models: heads and routers.
_KEPT = re.compile(
    r"(.*\.)?(embed\w*|\w*embeddings?|wte|wpe|shared|relative_attention_bias|lm_head|embed_out|head|score|classifier"
    r"|gate|router|shared_expert_gate)(\.decoder|\.classifier)?"
)


def quantized(
    tensors: Mapping[str, TensorEntry], count: Callable[[str, int], None]
) -> tuple[dict[str, TensorEntry], tuple[str, ...]]:
    """Return the tensors to write, with scales beside those that are quantised, and what the user should know.

    Args:
        tensors: The weights by name.
        count: Called with a name and the number of its elements that were infinite, if there are any.

    Raises:
        ConfigError: There is no linear layer, or one is quantised already, or numpy is missing.
    """

    def pair(name: str, entry: TensorEntry) -> tuple[TensorEntry, TensorEntry]:
        chunks = entry.chunks()
        blocks = tuple(-(-size // _SIDE) for size in entry.shape)
        codes = _BlockCodes(name, "float8_e4m3fn", entry.shape, chunks, (entry,), functools.partial(count, name))
        return codes, _BlockScales(name + SCALE, "float32", blocks, chunks, (entry,))

    return replaced(tensors, SCALE, pair)


def replaced(
    tensors: Mapping[str, TensorEntry], ending: str, pair: Callable[[str, TensorEntry], tuple[TensorEntry, TensorEntry]]
) -> tuple[dict[str, TensorEntry], tuple[str, ...]]:
    """Return the tensors with codes for the weights of linear layers, and what the user should know.

    Args:
        tensors: The weights by name.
        ending: What the names of scales end with; they come after their weights.
        pair: Returns the codes and the scales of a weight.

    Raises:
        ConfigError: There is no linear layer, or one is quantised already, or numpy is missing.
    """
    require_numpy("Quantising")
    _refuse_other_codes(tensors)
    made: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        made[name] = entry
        if is_linear(name, entry):
            _refuse_quantized(name, entry, tensors)
            entry = entry.counting(lambda _: None)  # the codes count what is infinite, and the scales read it again
            made[name], made[name + ending] = pair(name, entry)
    number = len(made) - len(tensors)
    if not number:
        raise ConfigError(
            f"{argument('quantize')} finds no weight of a linear layer: a floating point matrix named '*.weight'."
        )
    return made, (f"{number} weights of linear layers are quantised; embeddings, heads, routers and norms are not",)


def quantization_config(names: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Return ``quantization_config`` of a model's config.

    Args:
        names: The weights as they are written.
    """
    kept = {name.removesuffix(".weight") for name, entry in names.items() if is_matrix(name, entry)}
    kept -= {name.removesuffix(".weight" + SCALE) for name in names if name.endswith(SCALE)}
    # transformers would expect codes of experts that are stacked, which stay numbers here.
    stacked = {name.rpartition(".")[0] for name, entry in names.items() if len(entry.shape) == 3}
    kept |= {module for module in stacked if re.fullmatch(r"(.*\.)?experts", module)}
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [_SIDE, _SIDE],
        "modules_to_not_convert": sorted(kept | {"lm_head"}),  # a tied head is in no file
    }


def is_matrix(name: str, entry: TensorEntry) -> bool:
    """Tell whether a tensor is a weight that is a matrix of floating point numbers."""
    return name.endswith(".weight") and len(entry.shape) == 2 and is_floating_point(entry.dtype) and entry.numel > 0


def is_linear(name: str, entry: TensorEntry) -> bool:
    """Tell whether a tensor is the weight of a linear layer that published models quantise."""
    return is_matrix(name, entry) and not _KEPT.fullmatch(name.removesuffix(".weight"))


def _refuse_quantized(name: str, entry: TensorEntry, tensors: Mapping[str, TensorEntry]) -> None:
    """Raise a ``ConfigError`` if a weight is quantised already."""
    scale = next((name + end for end in (SCALE, "_scale") if name + end in tensors), None)
    if scale is not None:
        raise ConfigError(
            f"{name!r} is quantised already, as {scale!r} beside it says. Quantise the checkpoint from before that, or "
            f"leave the scale out with {argument('exclude')} if it is of something else.",
            config="quantize",
        )
    if entry.dtype.startswith("float8"):
        raise ConfigError(
            f"{name!r} is quantised already: it is {entry.dtype}, and has no scale beside it. If it holds numbers, set "
            f"{argument('dtype')}, which casts them before they are quantised.",
            config="quantize",
        )


def _refuse_other_codes(tensors: Mapping[str, TensorEntry]) -> None:
    """Raise a ``ConfigError`` if weights of any name are codes: they would stay, and the config would not say of what.

    Bytes may also be masks, but not if they are named ``weight``.
    """
    message = not_restored(tensors)
    for name, scale in codes_in_units(tensors).items() if not message else ():
        message = f"{name!r} is {tensors[name].dtype} in units of {scale!r}. {how_to_restore(name, tensors)}"
    for name, entry in tensors.items() if not message else ():
        if entry.dtype in ("int8", "uint8") and name.endswith(".weight") and len(entry.shape) > 1:
            message = f"{name!r} is {entry.dtype}, and nothing beside it says what its codes stand for."
    if message:
        raise ConfigError(
            f"{argument('quantize')} makes codes of numbers, and some weights are codes already: {message} Leave out "
            f"{argument('quantize')} to copy them as they are.",
            config="quantize",
        )


class Rows:
    """Yields the rows of a matrix as numbers: some at a time, in the same memory.

    Args:
        source: The matrix.
    """

    def __init__(self, source: TensorEntry) -> None:
        import numpy as np

        self._source = source
        self.elements = max(1, _ELEMENTS // source.shape[1]) * source.shape[1]
        """The most elements to yield at a time."""
        self._room = np.empty(self.elements, np.float32)

    def read(self, files: OpenFiles) -> Iterator[NDArray[np.float32]]:
        """Yield all rows."""
        for block in tensor_blocks(files, self._source, self.elements * itemsize(self._source.dtype)):
            yield from self.within(block)

    def within(self, block: memoryview) -> Iterator[NDArray[np.float32]]:
        """Yield the rows of a block that was read."""
        import numpy as np

        step = self.elements * itemsize(self._source.dtype)
        for begin in range(0, len(block), step):
            numbers = values(block[begin : begin + step], self._source.dtype, self._room)
            yield numbers.astype(np.float32, copy=False).reshape(-1, self._source.shape[1])


def largest(rows: NDArray[np.float32], axis: int) -> NDArray[np.float32]:
    """Return the largest magnitude along an axis, without infinities and NaNs."""
    import numpy as np

    found: NDArray[np.float32] = np.maximum(rows.max(axis=axis), -rows.min(axis=axis))
    if not np.isfinite(found).all():
        found = np.where(np.isfinite(rows), np.abs(rows), np.float32(0)).max(axis=axis)
    return found


def _stripes(files: OpenFiles, source: TensorEntry) -> Iterator[memoryview]:
    """Yield the rows of a matrix, as many at a time as a block has."""
    return tensor_blocks(files, source, _SIDE * source.shape[1] * itemsize(source.dtype))


def _scales(stripe: Iterable[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Return the scale of each block of a stripe: its largest finite number becomes the largest of the dtype."""
    import numpy as np

    sizes = functools.reduce(np.maximum, (largest(rows, 0) for rows in stripe))
    most = np.maximum.reduceat(sizes, range(0, len(sizes), _SIDE))
    scales = (most / np.float32(LARGEST)).astype(np.float32)
    # A block of zeros, or of numbers so small that their scale would be zero, is written as it is.
    return np.where(scales > 0, scales, np.float32(1))


class ScaledCodes(ComputedEntry):
    """A weight as 8-bit floats: its numbers are divided by scales, then rounded."""

    __slots__ = ()

    def shares(self, files: OpenFiles, rows: Rows) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the weight's rows, some at a time, with the divisors of their numbers."""
        raise NotImplementedError

    def blocks(self, files: OpenFiles) -> Iterator[memoryview]:
        rows, lost = Rows(self.parts[0]), 0
        rounding = Rounding(self.dtype, rows.elements)
        for some, divisors in self.shares(files, rows):
            data, count = rounding.of_shares(some, divisors)
            lost += count
            yield data
        if lost:
            self.overflow(lost)


@dataclass(frozen=True, slots=True)
class _BlockCodes(ScaledCodes):
    """The quantised weight; a block has one scale."""

    def shares(self, files: OpenFiles, rows: Rows) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        import numpy as np

        [source] = self.parts
        for stripe in _stripes(files, source):
            divisors = np.repeat(_scales(rows.within(stripe)), _SIDE)[: source.shape[1]]
            for some in rows.within(stripe):
                yield some, divisors


@dataclass(frozen=True, slots=True)
class _BlockScales(ComputedEntry):
    """The scales of its blocks."""

    def blocks(self, files: OpenFiles) -> Iterator[memoryview]:
        import numpy as np

        rows = Rows(self.parts[0])
        for stripe in _stripes(files, self.parts[0]):
            yield _scales(rows.within(stripe)).view(np.uint8).data
