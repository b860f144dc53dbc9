"""Minimum, maximum, mean and norm of one stored tensor, in one pass and constant memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from mmfsdp.checkpoint.conversion.parts import find_tensor
from mmfsdp.checkpoint.files.elements import tensor_blocks
from mmfsdp.checkpoint.files.numeric import require_numpy, values
from mmfsdp.checkpoint.files.opening import OpenFiles
from mmfsdp.checkpoint.geometry.coverage import check_coverage
from mmfsdp.checkpoint.geometry.views import without_repeats
from mmfsdp.checkpoint.layout import Layout

__all__ = ["TensorStatistics", "tensor_statistics"]

_BLOCK = 1 << 20  # bytes; in float64 they are up to eight times as many


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """What the elements of a tensor are like. NaNs are only counted; a complex number stands for its absolute value."""

    name: str
    """The tensor's whole name."""
    dtype: str
    """Its dtype."""
    shape: tuple[int, ...]
    """Its shape in elements."""
    elements: int
    """Number of elements."""
    min: float | None
    """Smallest element; ``None`` if there is none."""
    max: float | None
    """Largest element."""
    mean: float | None
    """Mean of the elements, added up in float64."""
    norm: float
    """Root of the sum of their squares."""
    zeros: int
    """Number of elements that are zero."""
    nans: int
    """Number of NaNs."""
    infs: int
    """Number of infinities."""

    def describe(self) -> dict[str, Any]:
        """Return plain values for JSON; what is not finite is a string such as ``'inf'``."""
        content = asdict(self)
        for key in ("min", "max", "mean", "norm"):
            if content[key] is not None and not math.isfinite(content[key]):
                content[key] = str(content[key])
        return content


def tensor_statistics(
    layout: Layout, name: str, *, progress: Callable[[int, int], None] | None = None
) -> TensorStatistics:
    """Read all of one tensor and return what its elements are like.

    Args:
        layout: The checkpoint.
        name: The tensor's whole name, or its name among the weights.
        progress: Called with the bytes read so far and the bytes to read.

    Raises:
        ConfigError: There is no such tensor, or no numpy.
        IncompleteCheckpointError, CorruptCheckpointError: Parts of it are missing.
    """
    require_numpy("Statistics of a tensor")
    import numpy as np

    entry = find_tensor(layout, name)
    check_coverage(layout, [entry.name])
    [stored], times = without_repeats(entry)
    low, high, total, squares = math.inf, -math.inf, 0.0, 0.0
    zeros = nans = infs = done = 0
    with OpenFiles() as files:
        for block in tensor_blocks(files, stored, _BLOCK):
            found = values(block, entry.dtype)
            with np.errstate(all="ignore"):  # signalling NaNs
                wide = (np.abs(found) if found.dtype.kind == "c" else found).astype(np.float64)
            nan = np.isnan(wide)
            nans += int(nan.sum())
            wide = wide[~nan] if nan.any() else wide
            zeros += int((wide == 0).sum())
            infs += int(np.isinf(wide).sum())
            with np.errstate(all="ignore"):
                low, high = min(low, float(wide.min(initial=math.inf))), max(high, float(wide.max(initial=-math.inf)))
                total, squares = total + float(wide.sum()), squares + float(np.square(wide).sum())
            done += len(block)
            if progress is not None:
                progress(done, stored.nbytes)
    count = stored.numel - nans
    return TensorStatistics(
        entry.name,
        entry.dtype,
        entry.shape,
        entry.numel,
        low if count else None,
        high if count else None,
        total / count if count else None,
        math.sqrt(squares * times),
        zeros * times,
        nans * times,
        infs * times,
    )
