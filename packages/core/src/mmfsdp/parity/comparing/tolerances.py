"""Decides how far apart two runs may be: as far as runs of the reference with perturbed inputs are, times a factor."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mmfsdp.parity.comparing.assembling import Assembled
from mmfsdp.parity.records.record_files import Key
from mmfsdp.parity.sketching.figures import distance

__all__ = ["EPS", "Tolerances", "rounded_share", "size_of"]

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""The distance from 1 to the next number of a dtype."""

_FACTOR = 10.0
_COARSE_FACTOR = 2.5
"""For dtypes such as bfloat16, where a unit in the last place is much. Right runs stay below the yardstick itself."""
_COARSE = 2.0**-16
_ALIKE = 8 * EPS["float32"]
"""Sketches of equal tensors are equal but for the order of their sums, whatever the dtype."""
_UPDATES = 3.0
"""Adam divides by small numbers where gradients are small: updates and their consequences vary more."""
_SUMMED = ("gradient before clipping", "norm", "gradient", "update", "state")
"""Norms are sums over all elements, and gradients of biases over all samples, in single precision; ranks add in another
order. Perturbed inputs do not show that where a gradient does not depend on them. Sums of 2,048 equal terms were 3e-5
apart."""
_FEW = 4
"""Elements of a parameter that may be rounded the other way."""
_SETTINGS = 1e-12
"""Settings of the optimizer are not computed on devices."""
_SMALL = 1e-2
"""Smaller tensors are measured by this share of the usual size of their kind: they may be zero but for rounding."""


class Tolerances:
    """How far each tensor may be from the reference's, as a share of its size.

    Args:
        reference: The reference.
        other: The run to compare, which may compute in a coarser dtype.
        perturbed: Runs of the reference with perturbed inputs; without any, a share that depends on the dtype is used.
        rtol: The share to use for every tensor instead.
    """

    def __init__(
        self,
        reference: Mapping[Key, Assembled],
        other: Mapping[Key, Assembled],
        perturbed: Sequence[Mapping[Key, Assembled]] = (),
        rtol: float | None = None,
    ) -> None:
        self._rtol, self._reference = rtol, reference
        computed = [
            tensor.dtype for run in (reference, other) for tensor in run.values() if "output" in tensor.key.kind
        ]
        self._eps = max((EPS[dtype] for dtype in computed if dtype in EPS), default=EPS["float32"])
        self._factor = _COARSE_FACTOR if self._eps > _COARSE else _FACTOR
        self._usual = _usual_sizes(reference)
        self._moved: dict[Key, float] = {}
        for run in perturbed:
            for key, tensor in reference.items():
                again = run.get(key)
                if tensor.figures is not None and again is not None and again.figures is not None and tensor.is_float:
                    share = distance(tensor.figures, again.figures) / self.size(tensor)
                    self._moved[key] = max(self._moved.get(key, 0.0), share if math.isfinite(share) else 0.0)
        groups: dict[tuple[int, str], list[float]] = {}
        for key, share in self._moved.items():
            groups.setdefault((key.step, key.kind), []).append(share)
        self._typical = {group: statistics.median(shares) for group, shares in groups.items()}

    def size(self, tensor: Assembled) -> float:
        """Return what a difference from a tensor of the reference is measured by: its norm, if it is not tiny."""
        assert tensor.figures is not None
        if tensor.key.kind == "setting":
            return max(tensor.figures.norm, 1e-300)
        usual = self._usual.get((tensor.key.step, tensor.key.kind), 0.0)
        norm = tensor.figures.norm
        return max(norm if math.isfinite(norm) else 0.0, _SMALL * usual * size_of(tensor.shape), 1e-300)

    def of(self, tensor: Assembled) -> float:
        """Return how far another run may be from a tensor of the reference, as a share of `size`."""
        key = tensor.key
        if not tensor.is_float:
            return 0.0
        if key.kind == "setting":
            return _SETTINGS
        if self._rtol is not None:
            return self._rtol
        wide = _UPDATES if key.kind in ("update", "state") else 1.0
        if not self._moved:
            return wide * (1 + key.step) * math.sqrt(self._eps)
        typical = self._typical.get((key.step, key.kind), 0.0)
        summed = key.kind in _SUMMED and len(tensor.shape) < 2
        least = math.sqrt(min(self._eps, EPS["float32"])) if summed else 0.0
        found = wide * max(self._factor * max(self._moved.get(key, 0.0), typical, self._eps), least)
        return max(found, self._rounded(tensor)) if key.kind == "update" else found

    def _rounded(self, update: Assembled) -> float:
        """Return how far updates are apart if a few elements of the parameter are rounded the other way.

        That happens so rarely in float32 that perturbed runs may not show it.
        """
        after = self._reference.get(replace(update.key, kind="parameter"))
        eps = EPS.get(update.dtype, 1.0)
        if after is None or after.figures is None or eps > _COARSE:
            return 0.0
        return rounded_share(eps, math.prod(update.shape)) * after.figures.norm / self.size(update)

    def between_ranks(self, tensor: Assembled) -> float:
        """Return how far ranks may be apart that must be equal."""
        return 8 * EPS["float64"] if tensor.dtype == "float64" else _ALIKE if tensor.is_float else 0.0


def rounded_share(eps: float, count: int) -> float:
    """Return by what share of its norm a tensor changes if a few of its elements are rounded the other way.

    Args:
        eps: The distance from 1 to the next number of its dtype.
        count: Its number of elements.
    """
    return eps * math.sqrt(_FEW / max(count, 1))


def size_of(shape: Sequence[int]) -> float:
    """Return the square root of the number of elements."""
    return math.sqrt(math.prod(shape))


def _usual_sizes(run: Mapping[Key, Assembled]) -> dict[tuple[int, str], float]:
    """Return for each step and kind the median over tensors of the usual size of an element."""
    found: dict[tuple[int, str], list[float]] = {}
    for key, tensor in run.items():
        if tensor.figures is not None and math.isfinite(tensor.figures.norm) and 0 not in tensor.shape:
            found.setdefault((key.step, key.kind), []).append(tensor.figures.norm / size_of(tensor.shape))
    return {group: statistics.median(sizes) for group, sizes in found.items()}
