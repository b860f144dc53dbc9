"""Restores weights that are stored as 8-bit codes with scales, such as float8 of DeepSeek-V3 and compressed-tensors."""

from __future__ import annotations

import collections
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mmfsdp.basics.dtypes import is_floating_point, itemsize
from mmfsdp.checkpoint.entries import ComputedEntry, TensorEntry
from mmfsdp.checkpoint.files.disk import OpenFiles
from mmfsdp.checkpoint.files.elements import require_numpy, tensor_blocks, values
from mmfsdp.checkpoint.files.rounding import Rounding
from mmfsdp.checkpoint.files.scales import BLOCK, not_restored, scales_of
from mmfsdp.checkpoint.geometry import check_coverage
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.checkpoint.tree import is_ref, named_tensors, part_tensors, weights_of
from mmfsdp.errors import ConfigError

__all__ = ["dequantized", "restored_sources"]

_READ = 1 << 20  # bytes of codes at a time, or one row
_OF_INPUTS = ".input_scale"  # scales that were measured for codes


def dequantized(layout: Layout) -> Layout:
    """Return a checkpoint with its weights as numbers: each code times its scale, exact or rounded once.

    A scale may be that of a tensor, of a row, or of a block of 128 x 128, and its name ends with ``weight_scale`` or
    ``weight_scale_inv``. Tensors without one stay. Scales of inputs are left out.

    Args:
        layout: The checkpoint.

    Returns:
        Its layout, in which what was quantised is float32. What lies beside the weights is as it was.

    Raises:
        ConfigError: Nothing is quantised, a scale does not fit, or the codes are of another kind; the message names
            the tensor. Or numpy is missing.
    """
    require_numpy("Restoring quantised weights")
    given = part_tensors(layout, "model")
    if others := not_restored(given):
        raise ConfigError(others, config="quantize")
    found = scales_of(given)
    scales = {name: given[scale] for name, scale in found.items()}
    if not scales and layout.origins:
        return layout  # what is computed of other checkpoints was restored before
    if not scales:
        raise ConfigError(
            f"{layout.path.name} holds nothing that is quantised: no float8 or int8 weight has one of its name and "
            "'_scale' or '_scale_inv' beside it. There is nothing to restore.",
            config="quantize",
        )
    check_coverage(layout, [scale.name for scale in scales.values()])
    gone = {*found.values()}
    gone |= {name for name in given if name.endswith(_OF_INPUTS) and name[: -len(_OF_INPUTS)] + ".weight" in scales}
    part = weights_of(layout)
    stored = named_tensors(part.weights)
    left_out = {stored[name] for name in gone}
    tensors = {name: entry for name, entry in layout.tensors.items() if name not in left_out}
    for name, scale in scales.items():
        tensors[stored[name]] = _Restored.of(given[name], scale)
    tree = _pruned(layout.tree, part.where, left_out)
    return replace(layout, tensors=tensors, tree=tree, origins=layout.origins or (layout,))


def _pruned(tree: Mapping[Any, Any], where: Sequence[Any], names: Container[str]) -> dict[Any, Any]:
    """Return content without some tensors of its weights, which the keys of ``where`` lead to; the rest is shared."""
    if where:
        return {**tree, where[0]: _pruned(tree[where[0]], where[1:], names)}
    kept: dict[Any, Any] = collections.OrderedDict() if isinstance(tree, collections.OrderedDict) else {}
    for key, value in tree.items():
        if not (is_ref(value) and value.name in names):
            kept[key] = _pruned(value, (), names) if isinstance(value, dict) else value
    if isinstance(tree, collections.OrderedDict):
        vars(kept).update(vars(tree))  # such as `_metadata` of a module's state dict
    return kept


def restored_sources(layouts: Sequence[Layout]) -> list[Layout]:
    """Return checkpoints of which one or more are quantised, with those restored.

    Raises:
        ConfigError: See `dequantized`; none of them is quantised.
    """
    scaled = [bool(scales_of(part_tensors(layout, "model"))) for layout in layouts]
    if not any(scaled):
        dequantized(layouts[0])  # raises
    return [dequantized(layout) if own else layout for layout, own in zip(layouts, scaled, strict=True)]


@dataclass(frozen=True, slots=True)
class _Restored(ComputedEntry):
    """A box of a matrix whose parts are its codes and the scales of the whole."""

    block: tuple[int, int] = field(kw_only=True)
    """Rows and columns that share a scale."""
    begin: tuple[int, int] = field(kw_only=True, default=(0, 0))
    """Where the box begins."""

    @classmethod
    def of(cls, codes: TensorEntry, scale: TensorEntry) -> _Restored:
        rows, columns = codes.shape if len(codes.shape) == 2 else (0, 0)
        blocks = {
            (): (rows, columns),
            (1,): (rows, columns),
            (rows, 1): (1, columns),
            (rows,): (1, columns),
            (-(-rows // BLOCK), -(-columns // BLOCK)): (BLOCK, BLOCK),
        }
        block = blocks.get(scale.shape)
        if len(codes.shape) != 2 or block is None or not is_floating_point(scale.dtype):
            raise ConfigError(
                f"{codes.name!r} of shape {[*codes.shape]} has {scale.dtype} scales of shape {[*scale.shape]}. "
                f"Expected one, one for each row, or one for each block of {BLOCK} x {BLOCK} of a matrix.",
                config="quantize",
            )
        return cls(codes.name, "float32", codes.shape, codes.chunks(), (codes, scale), block=block)

    @property
    def formula(self) -> Any:
        return ("_Restored", self.block, self.begin)

    def cut(self, offsets: Sequence[int], sizes: Sequence[int]) -> ComputedEntry:
        codes, scale = self.parts
        part = codes.cut(offsets, sizes)
        begin = (self.begin[0] + offsets[0], self.begin[1] + offsets[1])
        return replace(self, shape=tuple(sizes), stored=part.chunks(), parts=(part, scale), begin=begin)

    def blocks(self, files: OpenFiles) -> Iterator[memoryview]:
        import numpy as np

        codes, scale = self.parts
        # A product with a scale of 16 bits is exact in float32; with others it is rounded once, to the wanted dtype.
        exact = np.float32 if self.dtype == "float32" or itemsize(scale.dtype) == 2 else np.float64
        scales = np.concatenate([values(block, scale.dtype).astype(exact) for block in tensor_blocks(files, scale)])
        scales = scales.reshape(scale.shape if len(scale.shape) == 2 else (-1, 1))
        width = codes.shape[1]
        across = (self.begin[1] + np.arange(width)) // max(self.block[1], 1)
        row, lost = self.begin[0], 0
        most = max(_READ // max(width, 1), 1) * max(width, 1)
        rounding = Rounding(self.dtype, most)
        for block in tensor_blocks(files, codes, most):
            numbers = values(block, codes.dtype).astype(exact).reshape(-1, width)
            down = (row + np.arange(len(numbers))) // max(self.block[0], 1)
            row += len(numbers)
            chosen = scales[down]
            with np.errstate(all="ignore"):
                product = numbers * (chosen if scales.shape[1] == 1 else chosen[:, across])
            data, count = rounding(product.reshape(-1))
            lost += count
            yield data
        if lost:
            self.overflow(lost)
