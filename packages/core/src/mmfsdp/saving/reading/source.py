"""An open checkpoint that ranks share: the first rank knows where everything lies, and each reads its own part."""

from __future__ import annotations

import logging
import re
import secrets
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmfsdp.basics.boxes import Bounds
from mmfsdp.basics.descriptors import is_remote
from mmfsdp.checkpoint.damage import not_permitted
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.files.disk import identity
from mmfsdp.checkpoint.geometry import check_coverage
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.checkpoint.manifest import MANIFEST_NAME
from mmfsdp.collective.channels import host_of
from mmfsdp.errors import CheckpointNotFoundError, CorruptCheckpointError
from mmfsdp.saving.reading.file_sums import FileSums, file_sums
from mmfsdp.saving.reading.locations import Places, singles
from mmfsdp.saving.reading.verified_files import VerifiedFiles
from mmfsdp.state.lazy_tensors import LazyTensor, Wanted

__all__ = ["Found", "Source", "lazy_tensors", "save_at"]

_log = logging.getLogger("mmfsdp.saving")
_SAVE_ID = re.compile(rb'"save_id": "([^"]*)"')
_HEAD = 4096  # bytes of a manifest that hold its save id
_MARKS = (".metadata", "rank0.pth")


@dataclass(frozen=True)
class Found:
    """The first rank's answer to another rank that asked for boxes."""

    entries: tuple[TensorEntry, ...]
    """For each box, the tensor with the chunks that meet the box."""
    checks: tuple[TensorEntry, ...]
    """Tensors with the chunks whose whole records this rank checks, for all ranks that read parts of them."""


class Source:
    """An open checkpoint, from which ranks read tensors; a `TensorSource` of lazy tensors.

    Args:
        path: The checkpoint.
        open: Reads its layout. It is called at once, and on other ranks only if they need more than they were told.
        verify: Compare what is read with its checksum.

    Attributes:
        key: Identifies the source; its copies on other ranks have the same.
        save: Identifies the save that was opened among those at the same path.
        is_shared: Whether only the first rank has read where things lie.
        places: Where everything lies, if every rank was told.

    Raises:
        CheckpointError: The checkpoint cannot be read, or parts of it are missing.
    """

    def __init__(self, path: Path, open: Callable[[], Layout], *, verify: bool = True) -> None:
        self.path, self.verify = path, verify
        self.key = secrets.token_hex(8)
        self.save = save_at(path)
        self._first_host = host_of()
        self.is_shared = False
        self.places: Places | None = None
        self._sums = FileSums()
        self._prepare(own_records=True)
        self.attach(open)
        for note in self._read_layout().notes:
            _log.warning("Reading %r: %s.", str(path), note)

    def _prepare(self, *, own_records: bool) -> None:
        self._layout: Layout | None = None
        self._open: Callable[[], Layout] | None = None
        self._told: dict[Wanted, TensorEntry] = {}
        self._open_files(own_records=own_records)

    def _open_files(self, *, own_records: bool) -> None:
        self._files = VerifiedFiles(verify=self.verify, own_records=own_records, sums=self._sums)
        weakref.finalize(self, self._files.close)

    def __getstate__(self) -> dict[str, Any]:
        names = ("path", "verify", "key", "save", "is_shared", "places", "_sums", "_first_host")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare(own_records=False)

    def attach(self, open: Callable[[], Layout]) -> None:
        """Give a copy on another rank the function that reads the layout."""
        self._open = open

    def share(self) -> None:
        """Let the ranks that receive a copy ask this one where things lie, or tell them all of it."""
        self.is_shared = True
        self._files.own_records = False
        places = Places(self.path, self.layout.tensors, self._sums, needs_records=self.needs_records)
        self.places = places.located() if places.are_few else None

    @property
    def layout(self) -> Layout:
        """The whole layout, read on first use."""
        return self._layout or self._read_layout()

    def _read_layout(self) -> Layout:
        assert self._open is not None
        layout = self._open()
        check_coverage(layout, look_up=False)
        if self._layout is None and not self.is_shared and self.verify:
            self._sums = file_sums(layout)
            self._open_files(own_records=True)
        self._layout = layout
        return layout

    def check_unchanged(self) -> None:
        """Compare the save that is at the path now with the one that was opened. Not collective.

        Raises:
            CorruptCheckpointError: Another save is there.
            CheckpointNotFoundError: Nothing is there: it was removed, or this host does not share the first rank's
                file system.
        """
        try:
            save = save_at(self.path)
        except CheckpointNotFoundError as error:
            raise CheckpointNotFoundError(
                f"There is nothing at {str(self.path)!r} on host {host_of()!r}, but the checkpoint was opened there on "
                f"host {self._first_host!r}. Every rank reads its own part: put the checkpoint on a file system that "
                "all hosts share, or copy it to each host.",
                file=str(self.path),
            ) from error
        if save != self.save:
            raise CorruptCheckpointError(
                f"{self.path.name} was replaced while it was loaded: {self.save} was opened, and on host {host_of()!r} "
                f"there is now {save}. What was loaded may come from both. Load it again.",
                file=str(self.path),
            )

    def find(self, requests: Sequence[Sequence[Wanted]]) -> list[Found]:
        """Return what each rank must know to read the boxes that it wants. Not collective.

        Args:
            requests: What each rank wants.
        """
        told = [tuple(self.layout.tensors[name].within(box) for name, box in wanted) for wanted in requests]
        checks = self._in_parts(requests, told) if self.needs_records else []
        return [Found(entries, tuple(checks[rank :: len(told)])) for rank, entries in enumerate(told)]

    def parts(self, count: int) -> list[list[TensorEntry]]:
        """Return all tensors of the checkpoint, each once, in ``count`` lists of similar size. Not collective."""
        found = {
            (entry.name, bounds): single
            for entry in self.layout.tensors.values()
            for bounds, _, single in singles(entry, self.path)
        }
        largest_first = sorted(found.values(), key=lambda entry: -entry.nbytes)
        return [largest_first[rank::count] for rank in range(count)]

    def learn(self, wanted: Sequence[Wanted], found: Found) -> None:
        """Receive this rank's part of the first rank's result, and check the records that the first rank assigns to it.

        Raises:
            CorruptCheckpointError: The checksum of a record differs.
        """
        self._told.update(zip(wanted, found.entries, strict=True))
        self._open_files_of(wanted)
        self.check(found.checks)

    @property
    def needs_records(self) -> bool:
        """Whether some chunks may only be proved by their own checksum, once all of it was read."""
        return self.verify and not self._sums.of_all_files

    @property
    def is_local(self) -> bool:
        """Whether it is on disk, and not on a server."""
        return not is_remote(self.path)

    @property
    def num_records(self) -> int | None:
        """Number of chunks that may need a check; ``None`` if ranks ask where things lie."""
        return None if self.places is None else self.places.num_records

    def read_in_part(self, wanted: Sequence[Wanted]) -> list[int]:
        """Prepare to read boxes; return -1 for each of these chunks that is read only in part, else 0. Not collective.

        The first number is for all chunks that follow a rule.
        """
        assert self.places is not None
        told = [(item, self.places.tensors[item[0]].within(item[1])) for item in wanted]
        self._told.update(told)
        return self.places.read_in_part(told)

    def check_own(self, wanted: Sequence[Wanted], flags: Sequence[int], rank: int, count: int) -> None:
        """Find the files of boxes, and check this rank's share of the chunks that ranks read only in part.

        Raises:
            CorruptCheckpointError: The checksum of a record differs.
        """
        assert self.places is not None
        self._open_files_of(wanted)
        if flags:
            self.check(self.places.dealt(flags, rank, count))

    def check(self, entries: Iterable[TensorEntry]) -> None:
        """Compare whole records with their checksums. Not collective.

        Raises:
            CorruptCheckpointError: The checksum of a record differs.
        """
        self._files.check(
            (entry.name, chunk.record) for entry in entries for chunk in entry.chunks() if chunk.record is not None
        )

    def fill(self, name: str, box: Bounds, target: memoryview) -> None:
        """Read a box of a tensor into memory. Not collective.

        Raises:
            CheckpointError: The data is damaged, or cannot be read.
        """
        entry = self._told.get((name, box)) or self.layout.tensors[name].within(box)
        self._files.fill(entry, box, target)

    def _open_files_of(self, wanted: Sequence[Wanted]) -> None:
        """Find boxes in their files; raise if one is missing or of another save, before anything is changed."""
        for item in wanted:
            self._told[item].chunks()
        self._files.expect((self._told[item], item[1]) for item in wanted)

    def _in_parts(
        self, requests: Sequence[Sequence[Wanted]], told: Sequence[tuple[TensorEntry, ...]]
    ) -> list[TensorEntry]:
        """Return the chunks that ranks read only in part and whose blocks have no checksums."""
        found: dict[tuple[str, Bounds], TensorEntry] = {}
        for wanted, entries in zip(requests, told, strict=True):
            for (name, box), entry in zip(wanted, entries, strict=True):
                for bounds, file, single in singles(entry, self.path, cut_by=box):
                    if (name, bounds) not in found and self._sums.of(file) is None:
                        found[name, bounds] = single
        return list(found.values())


def lazy_tensors(source: Source) -> dict[str, LazyTensor]:
    """Return a checkpoint's tensors by name; no data is read."""
    return {name: LazyTensor(name, entry.dtype, entry.shape, source) for name, entry in source.layout.tensors.items()}


def save_at(path: Path) -> str:
    """Return text that identifies the save at a path: its id, or size and time of the file that describes it.

    Raises:
        CheckpointNotFoundError: Nothing is at the path.
        CheckpointPermissionError: The user of this process may not read it.
    """
    try:
        if path.is_dir():
            manifest = path / MANIFEST_NAME
            if manifest.exists():
                with manifest.open("rb") as file:
                    match = _SAVE_ID.search(file.read(_HEAD))
                if match is not None:
                    return f"save {match[1].decode(errors='replace')}"
            marked = next((path / name for name in _MARKS if (path / name).exists()), None)
            if is_remote(path) and marked is None:
                return f"the directory {path}"  # its files are compared with themselves while they are read
            path = marked or path
        if is_remote(path):
            return identity(path)
        state = path.stat()
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"There is no checkpoint at {str(path)!r}.", file=str(path)) from error
    except PermissionError as error:
        raise not_permitted(path, error) from error
    return f"a file of {state.st_size} bytes, written at {state.st_mtime_ns / 1e9:.6f}"
