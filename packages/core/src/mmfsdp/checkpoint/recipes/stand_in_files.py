"""Lets recipes rearrange tensors that are still to be computed, such as averages and restored weights.

A recipe knows boxes and bytes of files. So a tensor that is to be computed is taken for a file that holds its elements
in order, and the recipe says which of these go where. While the result is written, the parts that a block needs are
computed, and its elements are picked from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from mmfsdp.basics.dtypes import itemsize
from mmfsdp.checkpoint.chunks import Chunk
from mmfsdp.checkpoint.entries import ComputedEntry, FoldedEntry, TensorEntry
from mmfsdp.checkpoint.files.cast_entries import CastEntry
from mmfsdp.checkpoint.files.disk import OpenFiles
from mmfsdp.checkpoint.files.elements import tensor_blocks
from mmfsdp.checkpoint.geometry import ByteRun, byte_runs
from mmfsdp.errors import ConfigError

__all__ = ["StandIns"]

_MOST = 1 << 20  # elements that are computed at a time, to pick some of them
_WORTHWHILE = 1 << 16  # elements that are computed on their own, rather than with what lies between them
_WASTE = 4  # how often an element of a large tensor may be computed


class StandIns:
    """Gives tensors that are to be computed locations in files that do not exist, and takes them back."""

    def __init__(self) -> None:
        self._given: dict[Path, TensorEntry] = {}

    def of(self, entry: TensorEntry) -> TensorEntry:
        """Return a tensor that boxes can be cut from and put together; what is stored is returned as it is."""
        if not entry.is_computed:
            return entry
        file = Path(f"(computed {len(self._given)})")
        self._given[file] = entry
        chunk = Chunk(file, 0, entry.nbytes, (0,) * len(entry.shape), entry.shape)
        return TensorEntry(entry.name, entry.dtype, entry.shape, (chunk,))

    def resolved(self, entry: TensorEntry) -> TensorEntry:
        """Return what a tensor stands for: stored as it is, or computed and rearranged.

        Raises:
            ConfigError: It would be put together of what is stored and what is computed, or most elements would have
                to be computed many times.
        """
        if not self._given:
            return entry
        chunks = entry.chunks()
        computed = [chunk for chunk in chunks if chunk.file in self._given]
        if not computed:
            return entry
        if len(computed) < len(chunks):
            raise ConfigError(
                f"{entry.name!r} would be put together of weights that are stored and others that are computed while "
                "they are written. Write the computed ones first, without a recipe, and convert the result.",
                config="recipe",
            )
        sources = {chunk.file: self._given[chunk.file] for chunk in chunks}
        source = self._given[chunks[0].file]
        if source.shape == entry.shape and len(chunks) == 1 and chunks[0].strides is None:
            return replace(source, name=entry.name)
        return _Arranged.of(entry, sources)


class _Pick(NamedTuple):
    """The elements to take from a part: offset of the first, and sizes and steps of the box."""

    skipped: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Arranged(ComputedEntry):
    """A tensor whose elements are picked from boxes of others, one box after the other; the parts are these boxes."""

    picks: tuple[_Pick, ...] = field(kw_only=True)
    view: TensorEntry = field(kw_only=True, compare=False)
    sources: Mapping[Path, TensorEntry] = field(kw_only=True, compare=False)

    @classmethod
    def of(cls, view: TensorEntry, sources: Mapping[Path, TensorEntry]) -> _Arranged:
        item, parts, picks = itemsize(view.dtype), [], []
        for run in byte_runs(view):
            source = sources[run.file]
            sizes, strides = ((run.length // item,), (1,)) if isinstance(run, ByteRun) else (run.sizes, run.strides)
            for at, pick_sizes, pick_strides in _divided(run.source // item, sizes, strides):
                begin, part = _covering(source, at, at + _reach(pick_sizes, pick_strides))
                parts.append(part)
                picks.append(_Pick(at - begin, pick_sizes, pick_strides))
        if view.numel > _MOST and sum(part.numel for part in parts) > _WASTE * view.numel:
            raise ConfigError(
                f"{view.name!r} of shape {[*view.shape]} is computed while it is written, row by row, and would be "
                "written column by column. Write it first, without a recipe, and convert the result.",
                config="recipe",
            )
        chunks = tuple(chunk for part in parts for chunk in part.chunks())
        given = (tuple(parts), tuple(picks))
        return cls(view.name, view.dtype, view.shape, chunks, given[0], picks=given[1], view=view, sources=sources)

    @property
    def formula(self) -> tuple[object, ...]:
        return "picked", self.picks

    def parts_in_turn(self) -> tuple[TensorEntry, ...]:
        return self.parts

    def parts_together(self) -> tuple[TensorEntry, ...]:
        return ()

    def cut(self, offsets: Sequence[int], sizes: Sequence[int]) -> ComputedEntry:
        return _Arranged.of(self.view.cut(offsets, sizes), self.sources)

    def cast(self, dtype: str, overflow: Callable[[int], None]) -> ComputedEntry:
        # Elements that lie between those that are picked may be counted, too, if they are too large.
        sources = {file: CastEntry.of(source, dtype, overflow) for file, source in self.sources.items()}
        return _Arranged.of(_retyped(self.view, dtype), sources)

    def blocks(self, files: OpenFiles) -> Iterator[memoryview]:
        import numpy as np

        item = itemsize(self.dtype)
        for part, pick in zip(self.parts, self.picks, strict=True):
            if pick.strides == (1,):
                yield from _between(tensor_blocks(files, part), pick.skipped * item, pick.sizes[0] * item)
                continue
            data = b"".join(map(bytes, tensor_blocks(files, part)))
            words = np.frombuffer(data, f"V{item}")[pick.skipped :]
            steps = [step * item for step in pick.strides]
            picked = np.lib.stride_tricks.as_strided(words, pick.sizes, steps, writeable=False)
            yield memoryview(picked.tobytes())


def _reach(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements lie between the first and the last, both included."""
    return 1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))


def _divided(
    at: int, sizes: Sequence[int], strides: Sequence[int]
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Divide strided elements, in order, so that few are to be computed for each part; yield where each begins."""
    dims = [(size, step) for size, step in zip(sizes, strides, strict=True) if size != 1] or [(1, 1)]
    sizes, strides = tuple(size for size, _ in dims), tuple(step for _, step in dims)
    if strides == (1,):  # computed as a stream
        yield at, sizes, strides
        return
    (size, step), below = dims[0], _reach(sizes[1:], strides[1:])
    apart = step > 2 * below >= 2 * _WORTHWHILE
    if _reach(sizes, strides) <= _MOST and not apart:
        yield at, sizes, strides
        return
    count = 1 if apart else max(1, (_MOST - below) // step + 1)
    for first in range(0, size, count):
        some = min(count, size - first)
        if count == 1:
            yield from _divided(at + first * step, sizes[1:] or (1,), strides[1:] or (1,))
        else:
            yield at + first * step, (some, *sizes[1:]), strides


def _covering(source: TensorEntry, begin: int, end: int) -> tuple[int, TensorEntry]:
    """Return the smallest box that is contiguous and holds a range of elements, and how many lie before it."""
    offsets, sizes = [0] * len(source.shape), [*source.shape]
    before, below = 0, source.numel
    for dim, size in enumerate(source.shape):
        below //= size
        first, last = (begin - before) // below, (end - 1 - before) // below
        offsets[dim], sizes[dim] = first, last - first + 1
        before += first * below
        if first != last:
            break
    return before, source if tuple(sizes) == source.shape else source.cut(offsets, sizes)


def _between(blocks: Iterator[memoryview], skipped: int, length: int) -> Iterator[memoryview]:
    """Yield bytes of a stream: those after the ones that are skipped."""
    for block in blocks:
        some = block[skipped : skipped + length]
        skipped = max(0, skipped - len(block))
        length -= len(some)
        if some:
            yield some


def _retyped(view: TensorEntry, dtype: str) -> TensorEntry:
    """Return a view of the same elements where each takes another number of bytes."""
    old, new = itemsize(view.dtype), itemsize(dtype)
    chunks = tuple(
        replace(chunk, offset=chunk.offset // old * new, nbytes=chunk.nbytes // old * new) for chunk in view.chunks()
    )
    if isinstance(view, FoldedEntry):
        return replace(view, dtype=dtype, stored=chunks, folded=_retyped(view.folded, dtype))
    return replace(view, dtype=dtype, stored=chunks)
