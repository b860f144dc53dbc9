"""Writes linear layers as 8-bit floats with a scale for each tensor or output, or for each block (`quantizing`).

The first two are as in compressed-tensors. Beside ``weight`` of float8_e4m3fn lies ``weight_scale``, of shape ``[1]``
or ``[rows, 1]``, and a weight is the product of the two: ``format`` ``float-quantized`` of compressed-tensors
(https://github.com/vllm-project/compressed-tensors), which vLLM and transformers load. Inputs are quantised by whoever
runs the model, token by token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from mmfsdp.checkpoint.entries import ComputedEntry, TensorEntry
from mmfsdp.checkpoint.files.disk import OpenFiles
from mmfsdp.checkpoint.files.rounding import Rounding
from mmfsdp.checkpoint.formats.eight_bit import quantizing
from mmfsdp.checkpoint.formats.eight_bit.quantizing import LARGEST, Rows, ScaledCodes, is_matrix, largest, replaced

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["SCALE", "STRATEGIES", "quantization_config", "quantized"]

SCALE = "_scale"
"""The suffix of the name of a weight's scales."""

_IN_BLOCKS = "fp8"
STRATEGIES = {"fp8_tensor": "tensor", "fp8_channel": "channel"}
"""Settings of ``quantize``, and what compressed-tensors calls them."""


def quantized(
    tensors: Mapping[str, TensorEntry], kind: str, count: Callable[[str, int], None]
) -> tuple[dict[str, TensorEntry], tuple[str, ...]]:
    """Return the tensors to write, with scales beside those that are quantised, and what the user should know.

    Args:
        tensors: The weights by name.
        kind: ``'fp8'``, ``'fp8_tensor'`` or ``'fp8_channel'``: what the setting ``quantize`` says.
        count: Called with a name and the number of its elements that were infinite, if there are any.

    Raises:
        ConfigError: There is no linear layer, or one is quantised already, or numpy is missing.
    """
    if kind == _IN_BLOCKS:
        return quantizing.quantized(tensors, count)
    by_row = STRATEGIES[kind] == "channel"

    def pair(name: str, entry: TensorEntry) -> tuple[TensorEntry, TensorEntry]:
        scales, chunks = _RowScales(entry, by_row), entry.chunks()
        codes = _RowCodes(name, "float8_e4m3fn", entry.shape, chunks, (entry,), partial(count, name), scales=scales)
        shape = (entry.shape[0], 1) if by_row else (1,)
        return codes, _ScaleEntry(name + SCALE, scales.dtype, shape, chunks, (entry,), scales=scales)

    return replaced(tensors, SCALE, pair)


def quantization_config(names: Mapping[str, TensorEntry], kind: str) -> dict[str, Any]:
    """Return the ``quantization_config`` with which transformers and vLLM load what `quantized` makes.

    Args:
        names: The weights as they are written.
        kind: As for `quantized`.
    """
    if kind == _IN_BLOCKS:
        return quantizing.quantization_config(names)
    kept = {name.removesuffix(".weight") for name, entry in names.items() if is_matrix(name, entry)}
    kept -= {name.removesuffix(".weight" + SCALE) for name in names if name.endswith(SCALE)}
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "strategy": STRATEGIES[kind], "dynamic": False},
        "input_activations": {**common, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted(kept | {"lm_head"}),  # a tied head is in no file
    }


class _RowScales:
    """The scales of one matrix, computed when they are asked for first; threads may share them.

    They have the matrix's dtype, because transformers rounds them to it. They are rounded up, so that no code is too
    large.
    """

    def __init__(self, source: TensorEntry, by_row: bool) -> None:
        self._source, self._by_row = source, by_row
        self.dtype = source.dtype if source.dtype in ("bfloat16", "float16") else "float32"
        self._lock = threading.Lock()
        self._known: NDArray[np.float32] | None = None

    def of(self, files: OpenFiles) -> NDArray[np.float32]:
        """Return the scales: one for each row, or one for all."""
        import numpy as np

        with self._lock:
            if self._known is None:
                found = np.concatenate([largest(rows, 1) for rows in Rows(self._source).read(files)])
                most: NDArray[np.float32] = found if self._by_row else found.max(keepdims=True)
                self._known = self._rounded_up(most / np.float32(LARGEST))
            return self._known

    def _rounded_up(self, exact: NDArray[np.float32]) -> NDArray[np.float32]:
        import numpy as np

        if self.dtype == "bfloat16":
            scales = (exact.view(np.uint32) + np.uint32(0xFFFF) & np.uint32(0xFFFF0000)).view(np.float32)
        elif self.dtype == "float16":
            near = exact.astype(np.float16)
            up = np.nextafter(near, np.float16(np.inf))
            scales = np.where(near.astype(np.float32) < exact, up, near).astype(np.float32)
        else:
            scales = exact
        # What is all zeros, or so small that its scale would be zero, is written as it is.
        return np.where(scales > 0, scales, np.float32(1))


@dataclass(frozen=True, slots=True)
class _RowCodes(ScaledCodes):
    """The quantised weight, with one scale for each row or one for all."""

    scales: _RowScales = field(kw_only=True, compare=False)

    def shares(self, files: OpenFiles, rows: Rows) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        scales, row = self.scales.of(files), 0
        for some in rows.read(files):
            yield some, scales[row : row + len(some), None] if scales.size > 1 else scales
            row += len(some)


@dataclass(frozen=True, slots=True)
class _ScaleEntry(ComputedEntry):
    """Its scales."""

    scales: _RowScales = field(kw_only=True, compare=False)

    def blocks(self, files: OpenFiles) -> Iterator[memoryview]:
        found = self.scales.of(files)
        yield Rounding(self.dtype, len(found))(found)[0]
