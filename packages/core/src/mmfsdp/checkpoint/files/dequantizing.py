"""Restores weights that are stored as 8-bit codes with scales, such as float8 of DeepSeek-V3 and compressed-tensors."""

from __future__ import annotations

import collections
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mmfsdp.basics.codes import block_of, codes_in_units, how_to_restore, needless_parts, not_restored, scales_of
from mmfsdp.basics.dtypes import itemsize
from mmfsdp.checkpoint.entries import ComputedEntry, TensorEntry
from mmfsdp.checkpoint.files.disk import OpenFiles
from mmfsdp.checkpoint.files.elements import require_numpy, tensor_blocks, values
from mmfsdp.checkpoint.files.rounding import Rounding
from mmfsdp.checkpoint.geometry import check_coverage
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.checkpoint.tree import is_ref, part_tensors, weights_of
from mmfsdp.errors import ConfigError

__all__ = ["restore_codes"]

_READ = 1 << 20  # bytes of codes at a time, or one row


def _dequantized(layout: Layout) -> Layout:
    """Return a checkpoint with its weights as numbers: each code times its scale, exact or rounded once.

    `scales_of` says how scales are named, and `block_of` which shapes they have. Tensors without one stay. Scales of
    inputs are left out.

    Args:
        layout: The checkpoint.

    Returns:
        Its layout, in which what was quantised is float32. What lies beside the weights is as it was.

    Raises:
        ConfigError: Nothing is quantised, a scale does not fit, or the codes are of another kind; the message names
            the tensor. Or numpy is missing.
    """
    require_numpy("Restoring quantised weights")
    part = weights_of(layout)
    given = {name: layout.tensors[stored] for name, stored in part.names.items()}
    if others := not_restored(given):
        raise ConfigError(others, config="quantize")
    found = scales_of(given)
    scales = {name: given[scale] for name, scale in found.items()}
    if not scales and layout.origins:
        return layout  # tensors computed from other checkpoints were restored before
    if not scales:
        raise ConfigError(_nothing(layout, given), config="quantize")
    check_coverage(layout, [scale.name for scale in scales.values()])
    gone = needless_parts(given, found)
    left_out = {part.names[name] for name in gone}
    tensors = {name: entry for name, entry in layout.tensors.items() if name not in left_out}
    for name, scale in scales.items():
        tensors[part.names[name]] = _Restored.of(given[name], scale)
    tree = _pruned(layout.tree, part.where, left_out)
    return replace(layout, tensors=tensors, tree=tree, origins=layout.origins or (layout,))


def _nothing(layout: Layout, given: Mapping[str, TensorEntry]) -> str:
    """Say why nothing can be restored."""
    for name, scale in codes_in_units(given).items():
        kind = given[name].dtype
        return f"{name!r} is {kind} in units of {scale!r}, which mmfsdp does not read. {how_to_restore(name, given)}"
    return (
        f"{layout.path.name} holds nothing that is quantised: no float8 or int8 weight has one of its name and "
        "'_scale' or '_scale_inv' beside it. There is nothing to restore."
    )


def _pruned(tree: Mapping[Any, Any], where: Sequence[Any], names: Container[str]) -> dict[Any, Any]:
    """Return content without some tensors of the weights under the keys ``where``; the rest is shared."""
    if where:
        return {**tree, where[0]: _pruned(tree[where[0]], where[1:], names)}
    kept: dict[Any, Any] = collections.OrderedDict() if isinstance(tree, collections.OrderedDict) else {}
    for key, value in tree.items():
        if not (is_ref(value) and value.name in names):
            kept[key] = _pruned(value, (), names) if isinstance(value, dict) else value
    if isinstance(tree, collections.OrderedDict):
        vars(kept).update(vars(tree))  # such as `_metadata` of a module's state dict
    return kept


def restore_codes(layouts: Sequence[Layout], *, required: bool) -> list[Layout]:
    """Return checkpoints, with those restored that are quantised.

    Args:
        layouts: The checkpoints.
        required: Whether one or more must be quantised.

    Raises:
        ConfigError: See `_dequantized`; or none of them is quantised, and one has to be.
    """
    scaled = [bool(scales_of(part_tensors(layout, "model"))) for layout in layouts]
    if required and not any(scaled):
        _dequantized(layouts[0])  # raises
    return [_dequantized(layout) if own else layout for layout, own in zip(layouts, scaled, strict=True)]


@dataclass(frozen=True, slots=True)
class _Restored(ComputedEntry):
    """A box of a tensor whose parts are its codes and the scales of the whole."""

    block: tuple[int, ...] = field(kw_only=True)
    """Sizes of the blocks that share a scale."""
    begin: tuple[int, ...] = field(kw_only=True)
    """Where the box begins."""

    @classmethod
    def of(cls, codes: TensorEntry, scale: TensorEntry) -> _Restored:
        if (block := block_of(codes, scale)) is None:
            raise ConfigError(
                f"{codes.name!r} of shape {[*codes.shape]} has {scale.dtype} scales of shape {[*scale.shape]}. "
                "Expected one, one for each row, or one for each block, such as 128 x 128. Load the model with the "
                "library that wrote it, and save it unquantised.",
                config="quantize",
            )
        start = (0,) * len(block)
        return cls(codes.name, "float32", codes.shape, codes.chunks(), (codes, scale), block=block, begin=start)

    @property
    def formula(self) -> Any:
        return ("_Restored", self.block, self.begin)

    def cut(self, offsets: Sequence[int], sizes: Sequence[int]) -> ComputedEntry:
        codes, scale = self.parts
        part = codes.cut(offsets, sizes)
        begin = tuple(own + offset for own, offset in zip(self.begin, offsets, strict=True))
        return replace(self, shape=tuple(sizes), stored=part.chunks(), parts=(part, scale), begin=begin)

    def blocks(self, files: OpenFiles) -> Iterator[memoryview]:
        import numpy as np

        codes, scale = self.parts
        # A product with a scale of 16 bits is exact in float32; with others it is rounded once, to the wanted dtype.
        exact = np.float32 if self.dtype == "float32" or itemsize(scale.dtype) == 2 else np.float64
        scales = np.concatenate([values(block, scale.dtype).astype(exact) for block in tensor_blocks(files, scale)])
        shape = (1,) * len(codes.shape) if scales.size == 1 else scale.shape
        scales = scales.reshape(*shape, *(1,) * (len(codes.shape) - len(shape)))
        # Rows of the box, however many dimensions number them; the scales of each are a row of their matrix.
        width = codes.shape[-1]
        indices = [
            np.minimum((first + np.arange(size)) // max(side, 1), count - 1)
            for first, size, side, count in zip(self.begin, codes.shape, self.block, scales.shape, strict=True)
        ]
        rows: Any = np.zeros((), np.intp)
        for index, count in zip(indices[:-1], scales.shape[:-1], strict=True):
            rows = rows[..., None] * count + index
        rows, across, matrix = rows.reshape(-1), indices[-1], scales.reshape(-1, scales.shape[-1])
        row, lost = 0, 0
        most = max(_READ // max(width, 1), 1) * max(width, 1)
        rounding = Rounding(self.dtype, most)
        for block in tensor_blocks(files, codes, most):
            numbers = values(block, codes.dtype).astype(exact).reshape(-1, width)
            chosen = matrix[rows[row : row + len(numbers)]]
            row += len(numbers)
            with np.errstate(all="ignore"):
                product = numbers * (chosen if matrix.shape[1] == 1 else chosen[:, across])
            data, count = rounding(product.reshape(-1))
            lost += count
            yield data
        if lost:
            self.overflow(lost)
