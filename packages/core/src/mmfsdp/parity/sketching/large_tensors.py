"""Sketches tensors that are too large to give each element signs of its own: chunks are summed in buckets first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

import torch
import torch.nn.functional as F

from mmfsdp.parity.sketching.buckets import BUCKETS, POSITIONS, Bags, bags_of, keep, rows_of, signs_of, sums
from mmfsdp.parity.sketching.chunks import WIDTH, Chunks, chunks_of
from mmfsdp.parity.sketching.geometries import Geometry
from mmfsdp.parity.sketching.heads import Head, head_of, head_of_block, join_heads, vector_of

__all__ = ["LargeTensors"]

_TOGETHER = 64  # blocks whose buckets are multiplied by signs at a time
_SUMMED = 32  # products that are summed in single precision by a product of matrices
_PARTS = 8  # sums over `_SUMMED` elements that are added before they are weighted in double precision
_Kind = tuple[torch.device, torch.dtype, int]


@dataclass(frozen=True, slots=True)
class _Layout:
    """How boxes of one geometry are divided."""

    chunks: Chunks
    bags: Sequence[Bags]
    dtype: torch.dtype
    """Dtype of sums of chunks."""
    kind: _Kind
    is_padded: bool
    on_cpu: bool


class LargeTensors:
    """Sketches of large boxes."""

    def __init__(self) -> None:
        self.squares: dict[int, float] = {}
        """Sums of squares of tensors on the CPU, by index."""
        self._heads: dict[int, Head] = {}
        self._waiting: dict[_Kind, list[tuple[int, torch.Tensor]]] = {}  # indices, and the buckets of a block
        self._tails: list[tuple[Sequence[int], torch.Tensor]] = []  # indices, and what a block adds to their sketches

    def add(self, index: int, value: torch.Tensor, geometry: Geometry) -> None:
        """Take one box, which may change afterwards.

        Args:
            index: The row of its figures.
            value: Its elements, real numbers that need no gradient.
            geometry: Its geometry.
        """
        layout = _layout(geometry)
        rows, bags = rows_of(value, layout.chunks), layout.bags
        head: Head
        if layout.on_cpu:
            blocks = [rows] if len(bags) == 1 else [rows[each.start : each.stop] for each in bags]
            heads = []
            for block, each in zip(blocks, bags, strict=True):  # the processor's cache holds a block
                held = block if block.dtype == layout.dtype else block.to(layout.dtype)
                heads.append(head_of_block(held.view(-1)))
                self._wait(layout.kind, index, sums(held, each))
            head = join_heads(heads, value, is_padded=layout.is_padded)
        else:
            self._wait(layout.kind, index, sums(rows.to(layout.dtype), bags[0]))
            head = head_of(value.to(layout.dtype))
        if isinstance(head, tuple):
            self.squares[index] = head[1]
        self._heads[index] = head

    def take(self) -> list[tuple[list[int], torch.Tensor]]:
        """Return indices and the rows of their figures, which are on the tensors' devices."""
        for kind in self._waiting:
            self._finish(kind)
        made = []
        for device in {tail.device for _, tail in self._tails}:
            indices, tails = zip(*(item for item in self._tails if item[1].device == device), strict=True)
            row = {index: number for number, index in enumerate(dict.fromkeys(chain(*indices)))}
            rows = torch.tensor([row[index] for index in chain(*indices)], device=device)
            parts = torch.cat(tails)
            tail = parts.new_zeros(len(row), parts.shape[1]).index_add_(0, rows, parts)
            made.append(([*row], torch.cat([_vectors([self._heads[index] for index in row]), tail], 1)))
        return made

    def clear(self) -> None:
        """Forget all boxes."""
        self.squares, self._heads, self._waiting, self._tails = {}, {}, {}, []

    def _wait(self, kind: _Kind, index: int, buckets: torch.Tensor) -> None:
        waiting = self._waiting.setdefault(kind, [])
        waiting.append((index, buckets))
        if len(waiting) == _TOGETHER:
            self._finish(kind)

    def _finish(self, kind: _Kind) -> None:
        """Multiply the buckets of some blocks by signs."""
        if not (held := self._waiting[kind]):
            return
        indices, found = zip(*held, strict=True)
        held.clear()
        device, dtype, width = kind
        with torch.autocast(device.type, enabled=False):
            buckets = torch.stack(found)
            buckets = buckets if width == WIDTH else F.pad(buckets, (0, WIDTH - width))
            parts = buckets.view(len(found), -1, _SUMMED).transpose(0, 1)
            signed = torch.bmm(parts, signs_of(device, dtype).view(len(parts), _SUMMED, -1))
            added = _weights(device) @ signed.view(len(parts) // _PARTS, _PARTS, -1).sum(1).to(torch.float64)
        self._tails.append((indices, added.view(3, len(found), -1).transpose(0, 1).flatten(1)))


def _vectors(heads: Sequence[Head]) -> torch.Tensor:
    """Return heads as rows of float64."""
    if all(isinstance(head, tuple) for head in heads):
        return torch.tensor(heads, dtype=torch.float64)
    return torch.stack([*map(vector_of, heads)])


def _layout(geometry: Geometry) -> _Layout:
    def make() -> tuple[_Layout, int]:
        wide = geometry.dtype == torch.float64 or not geometry.dtype.is_floating_point
        dtype, device = torch.float64 if wide else torch.float32, geometry.device
        chunks = chunks_of(geometry.offsets, geometry.sizes, geometry.shape, geometry.leading)
        bags, size = bags_of(chunks, device, dtype)
        # On the CPU each block has its own buckets; elsewhere several blocks are added in double precision.
        kind = (device, dtype if bags[0].blocks == 1 else torch.float64, chunks.width)
        is_padded = bool(chunks.filled) or any(chunks.pad)
        return _Layout(chunks, bags, dtype, kind, is_padded, device.type == "cpu"), size

    return keep(geometry, make)


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return three weights of each part of a bucket: for the first set, the second, and the second times positions."""
    bucket = torch.arange(2 * BUCKETS * WIDTH // (_SUMMED * _PARTS), device=device) * (_SUMMED * _PARTS) // WIDTH
    first = (bucket < BUCKETS).to(torch.float64)
    position = (bucket - BUCKETS) // (BUCKETS // POSITIONS)
    return torch.stack([first, 1 - first, (1 - first) * (position + 0.5) / POSITIONS])
