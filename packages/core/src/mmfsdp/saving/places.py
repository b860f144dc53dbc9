"""Tells all ranks at once where the tensors of a checkpoint lie, if it has few pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mmfsdp.basics.boxes import Bounds, ListedBoxes, is_within
from mmfsdp.checkpoint.chunks import Unlocated
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.manifest import FileEntry
from mmfsdp.state.lazy_tensors import Wanted

__all__ = ["Places", "place_of", "singles"]

_MOST_PIECES = 20_000  # chunks, of about a hundred bytes each in a message
_MOST_BLOCKS = 1_000_000  # checksums of four bytes


@dataclass(frozen=True)
class Places:
    """Where all tensors of a checkpoint lie.

    One broadcast of it replaces a question of each rank to the first one, whose work would grow with the number of
    ranks. For a checkpoint of many pieces, such as one of as many ranks, the questions are smaller.
    """

    directory: Path
    """The checkpoint."""
    tensors: Mapping[str, TensorEntry]
    """Its tensors by name."""
    sums: Mapping[Path, FileEntry]
    """The files whose blocks have checksums."""

    @property
    def are_few(self) -> bool:
        """Whether every rank can be told all of them."""
        pieces = sum(entry.num_chunks for entry in self.tensors.values())
        return pieces <= _MOST_PIECES and sum(len(file.blocks or ()) for file in self.sums.values()) <= _MOST_BLOCKS

    def located(self) -> Places:
        """Return the same without what finds them on first use, so that it can be sent."""
        tensors = {name: entry.within(((0,) * len(entry.shape), entry.shape)) for name, entry in self.tensors.items()}
        return Places(self.directory, tensors, self.sums)

    @cached_property
    def _records(self) -> dict[tuple[str, Bounds], TensorEntry]:
        """The chunks that only their own checksum can prove, each as a tensor with this chunk alone."""
        return {
            (name, bounds): single
            for name, entry in self.tensors.items()
            for bounds, file, single in singles(entry, self.directory)
            if file not in self.sums and _may_have_sum(single)
        }

    @property
    def num_records(self) -> int:
        """Number of chunks that only their own checksum can prove."""
        return len(self._records)

    def read_in_part(self, wanted: Sequence[Wanted]) -> list[int]:
        """Return a number for each of these chunks: -1 if a rank that wants some boxes reads it only in part, else 0.

        Args:
            wanted: The boxes.
        """
        numbers = {key: number for number, key in enumerate(self._records)}
        found = [0] * len(numbers)
        for name, box in wanted:
            for bounds, _, _ in singles(self.tensors[name].within(box), self.directory):
                number = numbers.get((name, bounds))
                if number is not None and not is_within(bounds, box):
                    found[number] = -1
        return found

    def dealt(self, flags: Sequence[int], place: int, count: int) -> list[TensorEntry]:
        """Return the chunks that one rank checks, for all ranks that read parts of them.

        Args:
            flags: What `read_in_part` returned, the lowest over all ranks.
            place: The rank.
            count: Number of ranks.
        """
        flagged = [single for single, flag in zip(self._records.values(), flags, strict=True) if flag < 0]
        return flagged[place::count]


def _may_have_sum(entry: TensorEntry) -> bool:
    """Tell whether a tensor of one chunk may have a record with a checksum; what is not located yet may."""
    return isinstance(entry.stored, Unlocated) or any(
        chunk.record is not None and chunk.record.crc32 is not None for chunk in entry.stored
    )


def singles(entry: TensorEntry, directory: Path) -> Iterator[tuple[Bounds, Path, TensorEntry]]:
    """Yield each box of a tensor with its file, and the tensor with that box alone."""
    if not isinstance(entry.stored, Unlocated):
        for chunk in entry.stored:
            yield chunk.bounds, chunk.file, replace(entry, stored=(chunk,))
        return
    for box, where in entry.stored.boxes.meeting(None).items():
        single = Unlocated(ListedBoxes({box: where}), entry.stored.locate)
        yield box, place_of(where, directory)[0], replace(entry, stored=single)


def place_of(where: Any, directory: Path) -> tuple[Path, int, int | None]:
    """Return file, first byte and end of what `Unlocated` boxes say; the end is None for a whole file."""
    if isinstance(where, int):  # a rank's file
        return directory / f"rank{where}.pth", 0, None
    return directory / where.file, where.offset, where.offset + where.length
