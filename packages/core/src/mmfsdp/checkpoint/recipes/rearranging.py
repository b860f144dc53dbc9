"""Fuses, splits, stacks and rearranges tensors by arithmetic on their boxes; no data is read or moved."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from mmfsdp.basics.dtypes import itemsize
from mmfsdp.checkpoint.chunks import Chunk, row_major_strides, simplified_strides
from mmfsdp.checkpoint.entries import FoldedEntry, TensorEntry

__all__ = ["Pattern", "fused", "split", "stacked", "trimmed", "unstacked"]


def fused(name: str, entries: Sequence[TensorEntry], dim: int) -> TensorEntry:
    """Return tensors one behind the other along a dimension, as ``torch.cat`` does.

    Raises:
        ValueError: They differ in dtype, or in the size of another dimension than ``dim``.
    """
    first = entries[0]
    _check_alike(entries, dim)
    chunks, begin = [], 0
    for entry in entries:
        chunks += [replace(chunk, box_offsets=_added(chunk.box_offsets, dim, begin)) for chunk in entry.chunks()]
        begin += entry.shape[dim]
    return TensorEntry(name, first.dtype, (*first.shape[:dim], begin, *first.shape[dim + 1 :]), tuple(chunks))


def split(entry: TensorEntry, names: Sequence[str], dim: int, parts: Sequence[int]) -> list[TensorEntry]:
    """Return the parts of a tensor along a dimension, as ``torch.split`` does.

    Args:
        entry: The tensor.
        names: What the parts will be called.
        dim: The dimension.
        parts: Their sizes, in proportion: ``(4, 1, 1)`` cuts 6144 rows into 4096, 1024 and 1024.

    Raises:
        ValueError: The tensor has no such dimension, or it cannot be divided so.
    """
    if dim >= len(entry.shape):
        raise ValueError(f"it has no dimension {dim}")
    size, whole = entry.shape[dim], sum(parts)
    if size % whole:
        raise ValueError(f"dimension {dim} has {size} elements, which do not divide into {':'.join(map(str, parts))}")
    found, begin = [], 0
    for name, part in zip(names, parts, strict=True):
        count = size // whole * part
        offsets = _added((0,) * len(entry.shape), dim, begin)
        found.append(replace(entry.cut(offsets, _replaced(entry.shape, dim, count)), name=name))
        begin += count
    return found


def stacked(name: str, entries: Sequence[TensorEntry], dim: int) -> TensorEntry:
    """Return tensors of one shape as one with a new dimension, as ``torch.stack`` does.

    Raises:
        ValueError: They differ in dtype or shape.
    """
    first = entries[0]
    _check_alike(entries, None)
    chunks = [
        replace(
            chunk,
            box_offsets=_inserted(chunk.box_offsets, dim, index),
            box_sizes=_inserted(chunk.box_sizes, dim, 1),
            strides=None if chunk.strides is None else _inserted(chunk.strides, dim, 1),
        )
        for index, entry in enumerate(entries)
        for chunk in entry.chunks()
    ]
    return TensorEntry(name, first.dtype, _inserted(first.shape, dim, len(entries)), tuple(chunks))


def unstacked(entry: TensorEntry, dim: int) -> list[TensorEntry]:
    """Return the slices of a tensor along a dimension, as ``torch.unbind`` does.

    Raises:
        ValueError: The tensor has no such dimension.
    """
    if dim >= len(entry.shape):
        raise ValueError(f"it has no dimension {dim}")
    slices = []
    for index in range(entry.shape[dim]):
        part = entry.cut(_added((0,) * len(entry.shape), dim, index), _replaced(entry.shape, dim, 1))
        chunks = [
            replace(
                chunk,
                box_offsets=_removed(chunk.box_offsets, dim),
                box_sizes=_removed(chunk.box_sizes, dim),
                strides=None if chunk.strides is None else _removed(chunk.strides, dim),
            )
            for chunk in part.chunks()
        ]
        slices.append(TensorEntry(entry.name, entry.dtype, _removed(entry.shape, dim), tuple(chunks)))
    return slices


def trimmed(entry: TensorEntry, dim: int, size: int) -> TensorEntry:
    """Return the first elements of a tensor along a dimension.

    Raises:
        ValueError: The tensor has no such dimension, or fewer elements there.
    """
    if dim >= len(entry.shape):
        raise ValueError(f"it has no dimension {dim}")
    if entry.shape[dim] < size:
        raise ValueError(f"dimension {dim} has {entry.shape[dim]} elements, expected {size} or more")
    return entry.cut((0,) * len(entry.shape), _replaced(entry.shape, dim, size))


class _Axis(NamedTuple):
    """The part of an axis that a chunk holds."""

    start: int
    length: int
    step: int  # in the file, in elements


class Pattern:
    """How the axes of a tensor are divided, ordered anew and joined, such as ``'(h d two) c -> (h two d) c'``.

    It uses the notation of einops (https://einops.rocks/api/rearrange). Each side names the axes of the tensor, and
    parentheses hold the axes into which one is divided, the slowest first. A number stands for an axis of that size.

    Args:
        text: The pattern.

    Raises:
        ValueError: It is malformed, or its sides name other axes.
    """

    def __init__(self, text: str) -> None:
        sides = text.split("->")
        if len(sides) != 2:
            raise ValueError("it must have two sides, as in 'o i -> i o'")
        self.left, self.right = map(_groups, sides)
        left, right = ([axis for group in side for axis in group] for side in (self.left, self.right))
        if sorted(left) != sorted(right) or len({*left}) != len(left):
            raise ValueError("both sides must name the same axes, each once")
        self._order = [left.index(axis) for axis in right]

    @property
    def inverse(self) -> str:
        """The pattern that undoes this one."""
        return " -> ".join(" ".join(f"({' '.join(axes)})" for axes in side) for side in (self.right, self.left))

    @property
    def axes(self) -> list[str]:
        """The names of the axes."""
        return [axis for group in self.left for axis in group if not axis.isdecimal()]

    def applied(self, entry: TensorEntry, given: Mapping[str, int]) -> TensorEntry:
        """Return a tensor with its axes rearranged.

        Args:
            entry: The tensor.
            given: Sizes of axes by name; of those between one pair of parentheses, one may be left to the shape.

        Raises:
            ValueError: The tensor has another number of dimensions, or sizes that do not fit.
        """
        sizes = _sizes(self.left, entry.shape, given)
        shape = tuple(math.prod(sizes[axis] for axis in group) for group in self.right)
        item = itemsize(entry.dtype)
        folded: list[Chunk] = []
        chunks: list[Chunk] = []
        for chunk in entry.chunks():
            for box in self._divided(chunk, sizes, item):
                folded.append(box)
                chunks += self._joined(box, sizes, item)
        if len(chunks) == len(folded):
            return TensorEntry(entry.name, entry.dtype, shape, tuple(chunks))
        axes = tuple(sizes[axis] for group in self.right for axis in group)
        whole = TensorEntry(entry.name, entry.dtype, axes, tuple(folded))
        return FoldedEntry(entry.name, entry.dtype, shape, tuple(chunks), whole)

    def _divided(self, chunk: Chunk, sizes: Mapping[str, int], item: int) -> Iterator[Chunk]:
        """Yield a chunk as boxes over all axes, in the order of the right side."""
        steps = chunk.strides or row_major_strides(chunk.box_sizes)
        divided = [
            [*_divided(_Axis(start, count, step), [sizes[axis] for axis in group])]
            for group, start, count, step in zip(self.left, chunk.box_offsets, chunk.box_sizes, steps, strict=True)
        ]
        for boxes in itertools.product(*divided):
            axes = [axis for _, own in boxes for axis in own]
            yield _box(chunk, sum(skipped for skipped, _ in boxes), [axes[index] for index in self._order], item)

    def _joined(self, chunk: Chunk, sizes: Mapping[str, int], item: int) -> Iterator[Chunk]:
        """Yield a box over all axes as boxes of the right side's dimensions."""
        steps = chunk.strides or row_major_strides(chunk.box_sizes)
        axes = map(_Axis, chunk.box_offsets, chunk.box_sizes, steps)
        joined = [[*_joined([(next(axes), sizes[axis]) for axis in group])] for group in self.right]
        for parts in itertools.product(*joined):
            yield _box(chunk, sum(skipped for skipped, _ in parts), [axis for _, axis in parts], item)


def _box(chunk: Chunk, skipped: int, axes: Sequence[_Axis], item: int) -> Chunk:
    """Return a part of a chunk, which begins the given number of elements after the chunk does."""
    counts = tuple(axis.length for axis in axes)
    return replace(
        chunk,
        offset=chunk.offset + item * skipped,
        nbytes=math.prod(counts) * item,
        box_offsets=tuple(axis.start for axis in axes),
        box_sizes=counts,
        strides=simplified_strides(counts, tuple(axis.step for axis in axes)),
    )


def _groups(side: str) -> list[tuple[str, ...]]:
    tokens = re.findall(r"\([^()]*\)|\S+", side)
    groups = [tuple(axis for axis in token.strip("()").split() if axis != "1") for token in tokens]
    for group in groups:
        for axis in group:
            if not re.fullmatch(r"[a-z_][a-z_0-9]*|[1-9]\d*", axis, re.IGNORECASE):
                raise ValueError(f"{axis!r} is neither the name of an axis nor a size")
    return groups


def _sizes(side: list[tuple[str, ...]], shape: tuple[int, ...], given: Mapping[str, int]) -> dict[str, int]:
    """Return the size of every axis."""
    if len(side) != len(shape):
        raise ValueError(f"it has {len(shape)} dimensions, and the pattern {len(side)}")
    sizes: dict[str, int] = {}
    for group, whole in zip(side, shape, strict=True):
        known = {
            axis: int(axis) if axis.isdecimal() else given[axis] for axis in group if axis.isdecimal() or axis in given
        }
        unknown = [axis for axis in group if axis not in known]
        if len(unknown) > 1:
            raise ValueError(f"the sizes of {' and '.join(map(repr, unknown))} are not given; one may be left out")
        rest, left = divmod(whole, math.prod(known.values())) if all(known.values()) else (0, 1)
        if left or (not unknown and rest != 1):
            stated = ", ".join(f"{axis}={size}" for axis, size in known.items())
            raise ValueError(f"{whole} elements do not divide into ({' '.join(group)}) with {stated}")
        sizes |= known | dict.fromkeys(unknown, rest)
    return sizes


def _divided(axis: _Axis, sizes: Sequence[int]) -> Iterator[tuple[int, list[_Axis]]]:
    """Divide a range into boxes over several axes; yield how far in the file each begins behind it, and its axes."""
    if not sizes:  # a dimension of one element that the other side leaves out
        if axis.length:
            yield 0, []
        return
    if len(sizes) == 1:
        yield 0, [axis]
        return
    below = math.prod(sizes[1:])
    position, end = axis.start, axis.start + axis.length
    while position < end:
        row, inside = divmod(position, below)
        skipped = (position - axis.start) * axis.step
        if inside or end - position < below:
            count, rows = min(below - inside, end - position), 1
        else:
            rows = (end - position) // below
            count = below
        outer = _Axis(row, rows, below * axis.step)
        for more, inner in _divided(_Axis(inside, count, axis.step), sizes[1:]):
            yield skipped + more, [outer, *inner]
        position += rows * count


def _joined(axes: Sequence[tuple[_Axis, int]]) -> Iterator[tuple[int, _Axis]]:
    """Join axes, given with their whole sizes, to ranges of one; yield where in the file each begins, and the range."""
    if not axes:
        yield 0, _Axis(0, 1, 1)
        return
    (outer, _), rest = axes[0], axes[1:]
    if not rest:
        yield 0, outer
        return
    whole = math.prod(size for _, size in rest)
    for skipped, inner in _joined(rest):
        start = outer.start * whole + inner.start
        if outer.length == 1:
            yield skipped, _Axis(start, inner.length, inner.step)
        elif inner.length == whole and (whole == 1 or outer.step == inner.step * whole):
            yield skipped, _Axis(start, outer.length * whole, outer.step if whole == 1 else inner.step)
        else:
            for row in range(outer.length):
                yield skipped + row * outer.step, _Axis(start + row * whole, inner.length, inner.step)


def _check_alike(entries: Sequence[TensorEntry], apart_from: int | None) -> None:
    first = entries[0]
    for entry in entries:
        if apart_from is not None and apart_from >= len(entry.shape):
            raise ValueError(f"a tensor of shape {[*entry.shape]} has no dimension {apart_from}")
        one, two = (
            shape if apart_from is None else _removed(shape, apart_from) for shape in (first.shape, entry.shape)
        )
        if one != two or entry.dtype != first.dtype:
            raise ValueError(
                f"{first.dtype} of shape {[*first.shape]} does not fit {entry.dtype} of shape {[*entry.shape]}"
            )


def _added(values: tuple[int, ...], index: int, more: int) -> tuple[int, ...]:
    return _replaced(values, index, values[index] + more)


def _replaced(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _inserted(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index:])


def _removed(values: tuple[int, ...], index: int) -> tuple[int, ...]:
    return (*values[:index], *values[index + 1 :])
