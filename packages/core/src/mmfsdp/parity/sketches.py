"""Sketches of tensors: a few numbers that do not depend on sharding, and that add up over the boxes of a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F

from mmfsdp.parity.buckets import BUCKETS, PLACES, bags_of, indices, rows_of, signs_of, sums
from mmfsdp.parity.chunks import WIDTH, chunks_of
from mmfsdp.parity.figures import BITS, FIRST, PLACED

__all__ = ["Sketches", "sketch_of"]

_SMALL = BUCKETS * WIDTH
"""Elements up to which a tensor is not divided into chunks: each element has signs of its own."""
_TOGETHER = 16  # tensors whose buckets are multiplied by signs at a time
_SUMMED = 32  # products that are summed in single precision
_TINY = 1e-30  # a sum of squares in single precision that may have lost some

_Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], torch.device]
_Kind = tuple[torch.device, torch.dtype, int]
_Head = torch.Tensor | tuple[float, ...]


def sketch_of(local: torch.Tensor, offsets: Sequence[int], shape: Sequence[int], *, leading: int = 1) -> torch.Tensor:
    """Return the figures of one box of a tensor, as a vector of float64 on the CPU. Not collective.

    Args:
        local: See `Sketches.add`.
        offsets: See `Sketches.add`.
        shape: See `Sketches.add`.
        leading: See `Sketches.add`.
    """
    sketches = Sketches()
    sketches.add(local, tuple(offsets), tuple(shape), leading=leading)
    return sketches.take()[0]


class Sketches:
    """Sketches of many tensors, which are finished together.

    The chunks of a tensor (`mmfsdp.parity.chunks`) are summed, each with a sign, in two sets of buckets: a hash chooses
    the bucket in the first set, the place in the tensor that in the second. The elements of all buckets are summed with
    random signs then, 16 times in each set. A tensor is read once for each set, however many signs there are; and the
    sketches of its boxes add up to that of the whole, however it is divided.
    """

    def __init__(self) -> None:
        self._count = 0
        self._small: dict[_Box, tuple[list[int], list[torch.Tensor]]] = {}
        self._large: dict[_Kind, list[tuple[int, _Head, torch.Tensor]]] = {}
        self._done: list[tuple[list[int], torch.Tensor]] = []
        self._scaled: list[tuple[int, int, float]] = []
        self._squares: dict[int, float] = {}

    def add(self, local: torch.Tensor, offsets: tuple[int, ...], shape: tuple[int, ...], *, leading: int = 1) -> int:
        """Take one box of a tensor, which may change afterwards. Not collective.

        Args:
            local: The elements of the box, of any dtype.
            offsets: Where the box begins, in elements, one per dimension.
            shape: The shape of the whole tensor, in elements.
            leading: How many leading dimensions count as one, so that a box may be every n-th row of a tensor.

        Returns:
            The row in what `take` will return.
        """
        value, offsets, shape = _real(local, offsets, shape)
        place = self._places(1)[0]
        if _is_small(value, shape):
            self._add_small((offsets, tuple(value.shape), shape, value.device), [place], value.reshape(1, -1))
        else:
            self._add_large(place, value, offsets, shape, leading)
        return place

    def add_all(self, parts: Sequence[tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]]) -> range:
        """Take a box of each of some tensors, as `add` does, in less time if many are small."""
        places = self._places(len(parts))
        groups: dict[tuple[object, ...], tuple[_Box, list[int], list[torch.Tensor]]] = {}
        for place, part in zip(places, parts, strict=True):
            value, offsets, shape = _real(*part)
            if _is_small(value, shape):
                box = (offsets, tuple(value.shape), shape, value.device)
                group = groups.setdefault((*box, value.dtype), (box, [], []))
                group[1].append(place)
                group[2].append(value)
            else:
                self._add_large(place, value, offsets, shape, 1)
        for box, held, values in groups.values():
            self._add_small(box, held, torch.stack(values).view(len(values), -1))
        return places

    def add_scaled(self, row: int, factor: float) -> int:
        """Take the tensor of a row times a number, and return the row of that."""
        place = self._places(1)[0]
        self._scaled.append((place, row, factor))
        return place

    def square(self, row: int) -> float:
        """Return the sum of squares of a row's tensor, 0 if that is not known without waiting for a device."""
        return self._squares.get(row, 0.0)

    def take(self) -> torch.Tensor:
        """Return the figures of all boxes, and forget them.

        Returns:
            One row of float64 each, on the CPU, in the order of `mmfsdp.parity.figures.Figures`. A device is waited
            for once.
        """
        for box, (places, held) in self._small.items():
            self._done.append((places, _figures_of_small(box, torch.cat(held))))
        for kind in self._large:
            self._finish(kind)
        found = torch.zeros(self._count, FIRST + BITS + PLACED, dtype=torch.float64)
        for device in {rows.device for _, rows in self._done}:
            done = [(places, rows) for places, rows in self._done if rows.device == device]
            found[[place for places, _ in done for place in places]] = torch.cat([rows for _, rows in done]).cpu()
        for place, row, factor in self._scaled:
            found[place] = _scaled(found[row], factor)
        self.clear()
        return found

    def clear(self) -> None:
        """Forget all boxes."""
        self._count = 0
        self._small.clear()
        self._large.clear()
        self._done.clear()
        self._scaled.clear()
        self._squares.clear()

    def _places(self, count: int) -> range:
        found = range(self._count, self._count + count)
        self._count = found.stop
        return found

    def _add_small(self, box: _Box, places: list[int], values: torch.Tensor) -> None:
        known, held = self._small.setdefault(box, ([], []))
        known.extend(places)
        held.append(values.to(torch.float64, copy=True))

    def _add_large(
        self, place: int, value: torch.Tensor, offsets: tuple[int, ...], shape: tuple[int, ...], leading: int
    ) -> None:
        wide = value.dtype == torch.float64 or not value.is_floating_point()
        dtype = torch.float64 if wide else torch.float32
        chunks = chunks_of(offsets, tuple(value.shape), shape, leading)
        rows = rows_of(value, chunks)
        heads: list[tuple[float, ...]] = []
        found = []
        for bags in bags_of(chunks, value.device, dtype):
            part = rows if bags.stop - bags.start == len(rows) else rows[bags.start : bags.stop]
            part = part if part.dtype == dtype else part.to(dtype)
            if value.device.type == "cpu":
                heads.append(_head_of_block(part.view(-1)))
            found.append(sums(part, bags))  # the processor's cache holds the part
        is_padded = bool(chunks.filled) or any(chunks.pad)
        head = _head(value.to(dtype)) if not heads else _joined(heads, value, is_padded=is_padded)
        if isinstance(head, tuple):
            self._squares[place] = head[1]
        buckets = found[0] if len(found) == 1 else torch.stack(found).sum(0, dtype=torch.float64)
        kind = (value.device, buckets.dtype, chunks.width)
        held = self._large.setdefault(kind, [])
        held.append((place, head, buckets))
        if len(held) == _TOGETHER:
            self._finish(kind)

    def _finish(self, kind: _Kind) -> None:
        """Multiply the buckets of some tensors by signs."""
        device, dtype, width = kind
        if not (held := self._large[kind]):
            return
        with torch.autocast(device.type, enabled=False):
            buckets = torch.stack([buckets for _, _, buckets in held])
            buckets = buckets if width == WIDTH else F.pad(buckets, (0, WIDTH - width))
            parts = buckets.view(len(held), -1, _SUMMED).transpose(0, 1)
            signed = torch.bmm(parts, signs_of(device, dtype).view(len(parts), _SUMMED, -1)).to(torch.float64)
            added = _weights(device) @ signed.view(len(parts), -1)
        tail = added.view(3, len(held), -1).transpose(0, 1).flatten(1)
        heads = [head for _, head, _ in held]
        same = all(isinstance(head, tuple) for head in heads)
        first = torch.tensor(heads, dtype=torch.float64) if same else torch.stack([*map(_vector, heads)])
        self._done.append(([place for place, _, _ in held], torch.cat([first, tail], 1)))
        held.clear()


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return how parts of buckets add up: those of the first set, of the second, and of it times their places."""
    each = WIDTH // _SUMMED
    bucket = torch.arange(2 * BUCKETS * each, device=device) // each
    first = (bucket < BUCKETS).to(torch.float64)
    place = (bucket - BUCKETS) // (BUCKETS // PLACES)
    return torch.stack([first, 1 - first, (1 - first) * (place + 0.5) / PLACES])


def _scaled(row: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the figures of a tensor with finite elements times a number."""
    found = factor * row
    found[1] *= factor
    return found if factor > 0 else found[[0, 1, 3, 2, *range(4, len(found))]]


def _real(
    local: torch.Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    """Return a box of real numbers."""
    value = local.detach()
    return (torch.view_as_real(value), (*offsets, 0), (*shape, 2)) if value.is_complex() else (value, offsets, shape)


def _is_small(value: torch.Tensor, shape: tuple[int, ...]) -> bool:
    return math.prod(shape) <= _SMALL or value.numel() == 0


def _figures_of_small(box: _Box, values: torch.Tensor) -> torch.Tensor:
    """Return the figures of the same box of several small tensors."""
    offsets, sizes, shape, device = box
    if values.shape[1] == 0:
        head = values.new_tensor([[0, 0, math.inf, -math.inf, 0]]).expand(len(values), -1)
    else:
        low, high, odd = values.amin(1), values.amax(1), (~values.isfinite()).sum(1)
        head = torch.stack([values.sum(1), values.square().sum(1), low, high, odd], 1)
    numbers = indices(tuple(zip(offsets, sizes, shape, strict=True)), device)
    first, second = signs_of(device, torch.float64).view(2, _SMALL, -1)[:, numbers]
    places = (numbers[:, None] + 0.5) / math.prod(shape)
    return torch.cat([head, values @ torch.cat([first, second, second * places], 1)], 1)


def _head(values: torch.Tensor) -> torch.Tensor:
    """Return sum, sum of squares, extremes, and how many elements are not finite, without waiting for the device."""
    low, high = torch.aminmax(values)
    odd = values.numel() - values.isfinite().sum()
    square = torch.linalg.vector_norm(values).to(torch.float64).square()
    return torch.stack([*(part.to(torch.float64) for part in (values.sum(), square, low, high, odd))])


def _vector(head: _Head) -> torch.Tensor:
    return head if isinstance(head, torch.Tensor) else torch.tensor(head, dtype=torch.float64)


def _head_of_block(flat: torch.Tensor) -> tuple[float, ...]:
    low, high = torch.aminmax(flat)
    return float(flat.sum()), float(torch.dot(flat, flat)), float(low), float(high), 0.0


def _joined(blocks: Sequence[tuple[float, ...]], value: torch.Tensor, *, is_padded: bool) -> _Head:
    """Return what `_head` does, from the blocks of a tensor."""
    totals, squares, lows, highs, _ = zip(*blocks, strict=True)
    low, high, square = min(lows), max(highs), math.fsum(squares)
    if not _TINY < square < math.inf:  # it has infinite or NaN elements, or ones whose squares overflow or vanish
        return _head(value.to(torch.float64))
    if is_padded:
        low, high = (float(extreme) for extreme in torch.aminmax(value))
    return math.fsum(totals), square, low, high, 0.0
