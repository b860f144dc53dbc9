"""Tells all ranks at once where the tensors of a checkpoint lie, if it has few pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from mmfsdp.basics.boxes import Bounds, EvenBoxes, ListedBoxes, is_within
from mmfsdp.checkpoint.chunks import Unlocated
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.saving.reading.file_sums import FileSums
from mmfsdp.state.lazy_tensors import Wanted

__all__ = ["Places", "is_rule", "singles"]

_MOST_PIECES = 20_000  # chunks, of about a hundred bytes each in a message


@dataclass(frozen=True)
class Places:
    """Where all tensors of a checkpoint lie.

    One broadcast of it replaces a question of each rank to the first one, whose work would grow with the number of
    ranks. Boxes that follow a rule are sent as the rule, however many ranks wrote them. Where no rule says which of
    many pieces is where, the questions are smaller.
    """

    directory: Path
    """The checkpoint."""
    tensors: Mapping[str, TensorEntry]
    """Its tensors by name."""
    sums: FileSums
    """The checksums of blocks."""
    needs_records: bool
    """Whether chunks may be proved by their own checksum alone."""

    @property
    def are_few(self) -> bool:
        """Whether every rank can be told all of them."""
        pieces = (1 if is_rule(entry) else entry.num_chunks for entry in self.tensors.values())
        return sum(pieces) <= _MOST_PIECES

    def located(self) -> Places:
        """Return the same without what finds them on first use, so that it can be sent."""
        tensors = {
            name: TensorEntry(entry.name, entry.dtype, entry.shape, entry.stored)
            if is_rule(entry)
            else entry.within(((0,) * len(entry.shape), entry.shape))
            for name, entry in self.tensors.items()
        }
        return replace(self, tensors=tensors)

    @cached_property
    def _records(self) -> dict[tuple[str, Bounds], TensorEntry]:
        """The chunks that only their own checksum can prove, each as a tensor with this chunk alone."""
        listed = [(name, entry) for name, entry in self.tensors.items() if not is_rule(entry)]
        return {
            (name, bounds): single
            for name, entry in (listed if self.needs_records else [])
            for bounds, file, single in singles(entry, self.directory)
            if self.sums.of(file) is None and _may_have_sum(single)
        }

    @property
    def num_records(self) -> int:
        """Number of chunks that only their own checksum can prove; those that follow a rule count as one."""
        return 1 + len(self._records) if self.needs_records else 0

    def read_in_part(self, told: Iterable[tuple[Wanted, TensorEntry]]) -> list[int]:
        """Return a number for each of these chunks: -1 if a rank reads it only in part, else 0.

        Args:
            told: The boxes that the rank wants, each with the chunks that meet it.
        """
        numbers = {key: number for number, key in enumerate(self._records, 1)}
        found = [0] * self.num_records
        for (name, box), entry in told if found else ():
            for bounds, _, _ in singles(entry, self.directory, cut_by=box):
                number = numbers.get((name, bounds), 0 if is_rule(self.tensors[name]) else None)
                if number is not None:
                    found[number] = -1
        return found

    def dealt(self, flags: Sequence[int], rank: int, count: int) -> list[TensorEntry]:
        """Return the chunks that one rank checks, for all ranks that read parts of them.

        Args:
            flags: What `read_in_part` returned, the lowest over all ranks.
            rank: The rank that checks.
            count: Number of ranks.
        """
        flagged = [single for single, flag in zip(self._records.values(), flags[1:], strict=True) if flag < 0]
        return flagged[rank::count]


def is_rule(entry: TensorEntry) -> bool:
    """Tell whether a rule says where the chunks of a tensor lie, however many there are."""
    return isinstance(entry.stored, Unlocated) and isinstance(entry.stored.boxes, EvenBoxes)


def _may_have_sum(entry: TensorEntry) -> bool:
    """Tell whether a tensor of one chunk may have a record with a checksum; a tensor that is not located yet may."""
    return isinstance(entry.stored, Unlocated) or any(
        chunk.record is not None and chunk.record.crc32 is not None for chunk in entry.stored
    )


def singles(
    entry: TensorEntry, directory: Path, *, cut_by: Bounds | None = None
) -> Iterator[tuple[Bounds, Path, TensorEntry]]:
    """Yield each box of a tensor with its file, and the tensor with that box alone.

    Args:
        entry: The tensor.
        directory: The checkpoint.
        cut_by: Leave out boxes that lie entirely within this one.
    """
    if not isinstance(entry.stored, Unlocated):
        for chunk in entry.stored:
            if cut_by is None or not is_within(chunk.bounds, cut_by):
                yield chunk.bounds, chunk.file, replace(entry, stored=(chunk,))
        return
    for box, where in entry.stored.boxes.meeting(None).items():
        if cut_by is None or not is_within(box, cut_by):
            file = entry.stored.file.format(where) if isinstance(where, int) else where.file
            yield box, directory / file, replace(entry, stored=replace(entry.stored, boxes=ListedBoxes({box: where})))
