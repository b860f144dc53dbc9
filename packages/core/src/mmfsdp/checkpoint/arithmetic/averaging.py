"""Averages the weights of checkpoints: soups, the mean of the last few, and exponential moving averages."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from mmfsdp.basics.arguments import argument
from mmfsdp.basics.codes import codes_in_units, how_to_restore, parts_of_codes
from mmfsdp.basics.dtypes import is_floating_point, itemsize
from mmfsdp.basics.text import name_list
from mmfsdp.checkpoint.arithmetic.matching import for_weights, matched_weights, restored_for
from mmfsdp.checkpoint.conversion.converting import ConversionReport, convert
from mmfsdp.checkpoint.conversion.settings import Conversion
from mmfsdp.checkpoint.entries import ComputedEntry, TensorEntry
from mmfsdp.checkpoint.files.disk import OpenFiles
from mmfsdp.checkpoint.files.elements import equal_bytes, require_numpy, tensor_blocks, values
from mmfsdp.checkpoint.files.planned_files import Progress
from mmfsdp.checkpoint.files.rounding import Rounding
from mmfsdp.checkpoint.formats.opening import opened
from mmfsdp.checkpoint.geometry import check_coverage
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.checkpoint.tree import part_tensors
from mmfsdp.errors import ConfigError

__all__ = ["average_checkpoints"]

_BUFFERS = 16 << 20  # bytes of blocks of all sources together, for each thread
_ELEMENTS = 1 << 18  # per block, at most; with fewer, threads wait for Python's lock between the passes


def average_checkpoints(
    sources: Sequence[str | os.PathLike[str] | Layout],
    target: str | os.PathLike[str],
    conversion: Conversion | None = None,
    *,
    weights: Sequence[float] | None = None,
    ema: float | None = None,
    reference: str | os.PathLike[str] | Layout | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> ConversionReport:
    """Write the average of the weights of several checkpoints of any formats, in constant memory and without torch.

    Each element is ``(w1 * x1 + w2 * x2 + ...) / (w1 + w2 + ...)``, computed in float64 in the order of the sources
    and rounded once to the dtype that is written. That dtype is the last checkpoint's, or ``dtype``. The sources may
    differ in dtype, format and sharding, but not in names and shapes.

    What is not a floating point number cannot be averaged. It is written as it is if the sources agree, which is
    compared first; counters and other buffers of at most one dimension, such as ``num_batches_tracked``, are taken from
    the last checkpoint if they differ, and the report says so. ``meta`` is the last checkpoint's.

    Args:
        sources: The checkpoints, in order of time for ``ema``; two at least.
        target: The path to write; see `convert`.
        conversion: What to write and how.
        weights: One finite number per source, not all adding up to zero; equal ones by default.
        ema: Decay of an exponential moving average, above 0 and below 1: with each snapshot the average becomes
            ``ema * average + (1 - ema) * snapshot``, beginning with the first source.
        reference: A complete checkpoint of the same model, if a source does not hold all shapes; see ``open_layout``.
        dry_run: Check and report everything that can be known without writing.
        progress: Called with the bytes written so far and the bytes to write.
        **settings: Fields of `Conversion`, as for `convert`. Only weights can be averaged: ``keep`` is ``'model'``.

    Raises:
        ConfigError: Names or shapes differ; float8 or packed integers are quantised with scales of their own; a weight
            or setting is wrong; or numpy is missing.
        CheckpointError: As for `convert`.

    Example:
        >>> average_checkpoints(["epoch_10.pth", "epoch_11.pth", "epoch_12"], "mean.safetensors")
    """
    require_numpy("Averaging")
    chosen = for_weights((conversion or Conversion()).changed(settings), "Averaging")
    if isinstance(sources, str | os.PathLike | Layout):
        raise ConfigError(f"'sources' is one checkpoint, {_named(sources)}. Give a list of two or more.")
    if len(sources) == 1:  # such as a pattern that a shell did not replace, since nothing matches it
        opened(sources[0], trust=chosen.trust, reference=reference, format=chosen.source_format)
    factors, total = _factors(len(sources), weights, ema)
    layouts = [
        opened(source, trust=chosen.trust, reference=reference, format=chosen.source_format) for source in sources
    ]
    layout, notes = _averaged(restored_for(layouts, target, chosen), factors, total)
    report = convert(layout, target, chosen, dry_run=dry_run, progress=progress)
    return replace(report, notes=(*notes, *report.notes))


def _named(source: str | os.PathLike[str] | Layout) -> str:
    return repr(str(source.path if isinstance(source, Layout) else os.fspath(source)))


def _factors(count: int, weights: Sequence[float] | None, ema: float | None) -> tuple[tuple[float, ...], float]:
    """Return the factor of each source, and what their sum is divided by."""
    if count < 2:
        raise ConfigError(f"An average needs at least two checkpoints, got {count}.")
    if weights is not None and ema is not None:
        raise ConfigError(
            f"{argument('weights')} and {argument('ema')} are two ways to say the same. Give one of them."
        )
    if ema is not None:
        if not isinstance(ema, Real) or not 0 < ema < 1:
            raise ConfigError(
                f"{argument('ema')} must lie between 0 and 1, got {ema!r}. 0.9 keeps nine tenths of the average."
            )
        return (ema ** (count - 1), *((1 - ema) * ema ** (count - 1 - index) for index in range(1, count))), 1.0
    if weights is not None and not all(isinstance(weight, Real) for weight in weights):
        raise ConfigError(f"{argument('weights')} must be numbers, got {weights!r}.")
    factors = (1.0,) * count if weights is None else tuple(map(float, weights))
    if len(factors) != count:
        raise ConfigError(
            f"{argument('weights')} needs one number per checkpoint: expected {count}, got {len(factors)}."
        )
    total = math.fsum(factors)
    if not math.isfinite(total) or total == 0:
        raise ConfigError(f"{argument('weights')} must be finite and not add up to zero, got {list(factors)}.")
    return factors, total


def _averaged(layouts: Sequence[Layout], factors: tuple[float, ...], total: float) -> tuple[Layout, tuple[str, ...]]:
    last = layouts[-1]
    for layout in layouts:
        _refuse_codes(layout)
    matched = matched_weights(layouts)
    codes = parts_of_codes(matched[-1])  # which may be the same: a base that an adapter was trained on
    computed: dict[str, TensorEntry] = {}
    differing = []
    for name, entry in matched[-1].items():
        parts = tuple(weights[name] for weights in matched)
        if name not in codes and all(is_floating_point(part.dtype) for part in parts):
            chunks = tuple(chunk for part in parts for chunk in part.chunks())
            computed[entry.name] = WeightedSum(
                entry.name, entry.dtype, entry.shape, chunks, parts, factors=factors, total=total
            )
        elif not _equal(name, layouts, parts, may_differ=len(entry.shape) <= 1 and name not in codes):
            differing.append(name)
    notes = (f"Not averaged, taken from {last.path.name}: {name_list(differing, 5)}",) if differing else ()
    origins = tuple(origin for layout in layouts for origin in layout.origins or (layout,))
    return replace(last, tensors={**last.tensors, **computed}, origins=origins), notes


def _refuse_codes(layout: Layout) -> None:
    for name, scale in codes_in_units(weights := part_tensors(layout, "model")).items():
        raise ConfigError(
            f"{name!r} is {weights[name].dtype} in units of {scale!r}, and such numbers cannot be averaged. "
            + how_to_restore(name, weights),
            file=str(layout.path),
        )


def _equal(name: str, layouts: Sequence[Layout], parts: Sequence[TensorEntry], *, may_differ: bool) -> bool:
    """Tell whether tensors that are not averaged are equal; raise if they differ and may not."""
    last = parts[-1]
    dtypes = {part.dtype for part in parts}
    if len(dtypes) > 1:
        raise ConfigError(f"{name!r} is {' and '.join(sorted(dtypes))}, which cannot be averaged. Cast one of them.")
    for layout, part in zip(layouts, parts, strict=True):
        check_coverage(layout, [part.name])
    with OpenFiles() as files:
        for layout, part in zip(layouts[:-1], parts[:-1], strict=True):
            blocks = zip(tensor_blocks(files, part), tensor_blocks(files, last), strict=True)
            if all(equal_bytes(one, two) for one, two in blocks):
                continue
            if may_differ and not last.dtype.startswith("complex"):
                return False
            raise ConfigError(
                f"{name!r} is {last.dtype} of shape {list(last.shape)} and differs between {str(layout.path)!r} and "
                f"{str(layouts[-1].path)!r}. Only floating point tensors can be averaged; packed or quantised weights "
                "cannot. Leave it out of the checkpoints, or average those from before they were quantised.",
                file=str(layout.path),
            )
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedSum(ComputedEntry):
    """A weighted sum of tensors, added up in float64 and rounded once."""

    factors: tuple[float, ...]
    """The factor of each part."""
    total: float
    """The divisor of the sum."""

    @property
    def formula(self) -> tuple[object, ...]:
        return "weighted sum", self.factors, self.total

    def cut(self, offsets: Sequence[int], sizes: Sequence[int]) -> WeightedSum:
        parts = tuple(part.cut(offsets, sizes) for part in self.parts)
        chunks = tuple(chunk for part in parts for chunk in part.chunks())
        return replace(self, shape=tuple(sizes), stored=chunks, parts=parts)

    def blocks(self, files: OpenFiles) -> Iterator[memoryview]:
        import numpy as np

        sizes = [itemsize(part.dtype) for part in self.parts]
        elements = min(_ELEMENTS, _BUFFERS // sum(sizes), self.numel)
        streams = [tensor_blocks(files, part, elements * size) for part, size in zip(self.parts, sizes, strict=True)]
        result, term, room = np.empty(elements), np.empty(elements), np.empty(elements, np.float32)
        rounding = Rounding(self.dtype, elements)
        overflowed = 0
        for blocks in zip(*streams, strict=True):
            count = len(blocks[0]) // sizes[0]
            added, scaled = result[:count], term[:count]
            with np.errstate(all="ignore"):
                for index, (block, part, factor) in enumerate(zip(blocks, self.parts, self.factors, strict=True)):
                    given = values(block, part.dtype, room)
                    if factor != 1:
                        given = np.multiply(given, factor, out=scaled, dtype=np.float64)
                    if index == 0:
                        added[:] = given
                    else:
                        np.add(added, given, out=added)
                if self.total != 1:
                    np.divide(added, self.total, out=added)
            data, lost = rounding(added)
            overflowed += lost
            yield data
        if overflowed:
            self.overflow(overflowed)
