"""Verifies a checkpoint of any format, and lists what could not be checked."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mmfsdp.basics.arguments import argument
from mmfsdp.basics.descriptors import is_remote
from mmfsdp.basics.text import human_bytes
from mmfsdp.checkpoint.empty_weights import refuse_empty_weights
from mmfsdp.checkpoint.failed_downloads import stand_in
from mmfsdp.checkpoint.files.disk import checkpoint_path, present
from mmfsdp.checkpoint.files.planned_files import Progress, Tracker
from mmfsdp.checkpoint.formats.opening import opened
from mmfsdp.checkpoint.formats.registry import format_of
from mmfsdp.checkpoint.formats.torch_files.zip_archive import read_records
from mmfsdp.checkpoint.geometry import check_coverage
from mmfsdp.checkpoint.integrity import Extent, Scanned, scan_file
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest, damaged_file, read_manifest
from mmfsdp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointPermissionError,
    ConfigError,
    MmfsdpError,
    UnknownDtypeError,
    UnsafePickleError,
)

__all__ = ["Check", "Mark", "Problem", "VerifyReport", "planned_checks", "verify"]


@dataclass(frozen=True, slots=True)
class Problem:
    """A defect of a checkpoint."""

    message: str
    """What, in a sentence or more; it names the tensor or file."""
    file: str | None
    """Path of the file, where there is one to name."""
    offset: int | None = None
    """Where in the file, in bytes."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of a verification: problems, and what could not be checked."""

    path: str
    """The checkpoint."""
    format: str | None
    """Its format; ``None`` if it could not be opened."""
    tensors: int
    """Number of tensors whose coverage was proven or disproven."""
    bytes: int
    """Bytes that were read and compared with a checksum; a byte under two checksums counts once."""
    manifest: bool
    """Whether there is a manifest."""
    problems: tuple[Problem, ...]
    """The defects that were found."""
    unchecked: tuple[str, ...]
    """Parts that could not be checked, and why."""
    seconds: float
    """Wall time."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, as far as it could be checked."""
        return not self.problems

    def describe(self) -> dict[str, Any]:
        """Return what ``verify --json`` prints: plain values only; counts are ``num_tensors`` and ``checked_bytes``."""
        content = asdict(self)
        counts = {"num_tensors": content.pop("tensors"), "checked_bytes": content.pop("bytes")}
        return {"ok": self.ok, **counts, **content}


def verify(
    path: str | os.PathLike[str] | Layout,
    *,
    trust: bool = False,
    jobs: int = 1,
    progress: Progress | None = None,
    reference: str | os.PathLike[str] | Layout | None = None,
) -> VerifyReport:
    """Check a checkpoint: its structure, that every tensor is whole, and every checksum that there is.

    It checks that the metadata can be read and is consistent, that all files of one save are present and no others;
    that the chunks of each tensor cover it without gap or overlap and lie within their files; the CRC-32 of every
    record; and, if there is a manifest, the size and the CRC-32 of every file that it lists.

    Args:
        path: A checkpoint of any format that ``open_layout`` reads, or the layout that it returned.
        trust: Accept pickled objects that are not on the list of safe names. They are not imported even then.
        jobs: Number of files, or parts of a file, to read at the same time. A server is read by many threads anyway.
        progress: Called with the bytes read so far and the bytes to read. What it raises stops the check.
        reference: A whole checkpoint of the same model, where ``path`` does not say all shapes; see ``open_layout``.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at ``path``.
        CheckpointPermissionError: The user of this process may not read it.
        UnsafePickleError: It names something that is not on the list of safe names.
        UnknownDtypeError: A file holds a dtype that this version does not know, which is no damage.
        ConfigError: ``jobs`` is not positive.
    """
    if jobs < 1:
        raise ConfigError(f"{argument('jobs', jobs)} is not a number of threads; use 1 or more.")
    began = time.perf_counter()
    problems: list[Problem] = []
    root = path.path if isinstance(path, Layout) else checkpoint_path(path)
    layout: Layout | None = None
    try:
        layout = opened(path, trust=trust, reference=reference)
    except (CheckpointNotFoundError, CheckpointPermissionError, UnknownDtypeError, UnsafePickleError):
        raise
    except CheckpointError as error:
        problems.append(_problem(error))
    if layout is not None:
        layout = _located(layout, problems)
    directory = root if root.is_dir() else root.parent
    manifest = _manifest(directory, root, layout, problems)
    listed = _listed(directory, manifest, problems)
    unchecked: list[str] = []
    checks: list[Check] = []
    if layout is not None:
        try:
            checks, unchecked = planned_checks(layout, listed)
        except CheckpointError as error:
            problems.append(_problem(error))
    if not checks:
        checks = [Check(file, (), entry) for file, entry in listed.items()]
    read = _run(checks, jobs, progress, problems)
    unchecked += layout.notes if layout is not None else ()
    if layout is None:
        unchecked.append("the tensors, since the checkpoint cannot be opened")
    return VerifyReport(
        str(root),
        layout.format if layout else None,
        len(layout.tensors) if layout else 0,
        read,
        manifest is not None,
        tuple(dict.fromkeys(_explained(problems))),
        tuple(unchecked),
        time.perf_counter() - began,
    )


def _problem(error: MmfsdpError) -> Problem:
    file, offset = error.context.get("file"), error.context.get("offset")
    return Problem(error.message, None if file is None else str(file), offset if isinstance(offset, int) else None)


def _explained(problems: list[Problem]) -> Iterator[Problem]:
    """Yield the problems; if something else stands instead of a file, only that."""
    found: dict[str | None, CheckpointError | None] = {None: None}
    for problem in problems:
        if problem.file is not None and problem.file not in found:
            found[problem.file] = stand_in(Path(problem.file))
        error = found[problem.file]
        yield problem if error is None else Problem(error.message, problem.file)


def _manifest(directory: Path, root: Path, layout: Layout | None, problems: list[Problem]) -> Manifest | None:
    # A manifest beside a single file describes its directory, which is another checkpoint, unless an index was opened.
    several = layout is not None and any(file != root for file in layout.files())
    if not (root.is_dir() or several) or not present(directory / MANIFEST_NAME):
        return None
    try:
        return read_manifest(directory)
    except CheckpointError as error:
        problems.append(_problem(error))
        return None


def _listed(directory: Path, manifest: Manifest | None, problems: list[Problem]) -> dict[Path, FileEntry]:
    """Return the files of the manifest that are there and of the right size."""
    listed = {}
    for name, entry in manifest.files.items() if manifest is not None else ():
        path = directory / name
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            problems.append(Problem(f"{name} is missing, which {MANIFEST_NAME} lists.", str(path)))
        elif size != entry.size:
            problems.append(Problem(f"{name} has {size} bytes (expected {entry.size} by {MANIFEST_NAME}).", str(path)))
        else:
            listed[path] = entry
    return listed


def _located(layout: Layout, problems: list[Problem]) -> Layout:
    """Return the layout without the tensors that cannot be located; check that the chunks of the others cover them."""
    found = {}
    for name, entry in layout.tensors.items():
        try:
            entry.chunks()
            found[name] = entry
            check_coverage(layout, [name])
        except UnsafePickleError:
            raise
        except CheckpointError as error:
            problems.append(_problem(error))
    try:
        refuse_empty_weights(found, layout.path)
    except CheckpointError as error:
        problems.append(_problem(error))
    return replace(layout, tensors=found)


def _run(checks: list[Check], jobs: int, progress: Progress | None, problems: list[Problem]) -> int:
    tracker = Tracker(sum(check.nbytes for check in checks), progress)
    if any(is_remote(check.file) for check in checks):
        jobs = 1  # many threads read ahead for one, each of several would hold as much memory

    def run(check: Check) -> list[Problem]:
        extents = [mark.extent for mark in check.marks]
        try:
            scanned = scan_file(check.file, extents, whole=check.whole, advance=tracker.advance)
        except OSError as error:
            return [Problem(f"{check.file.name} cannot be read: {error.strerror or error}.", str(check.file))]
        return [*check.compare(scanned)]

    with ThreadPoolExecutor(jobs, thread_name_prefix="mmfsdp-verify") as pool, tracker.stopping(pool):
        for found in pool.map(run, checks):
            problems += found
    return tracker.done


_BATCH = 128 << 20  # bytes of records that are one piece of work


@dataclass(frozen=True, slots=True)
class Mark:
    """An extent of a file and the CRC-32 that it should have."""

    extent: Extent
    """Offset and length in bytes."""
    crc32: int
    """The stored checksum."""
    what: str
    """Its content, for messages."""


@dataclass(frozen=True, slots=True)
class Check:
    """A piece of work: checksums to compare within one file."""

    file: Path
    """The file."""
    marks: tuple[Mark, ...]
    """Its extents with checksums."""
    entry: FileEntry | None = None
    """The manifest's entry of the whole file."""

    @property
    def whole(self) -> bool:
        """Whether all of the file is read."""
        return self.entry is not None and self.entry.crc32 is not None

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        if self.entry is not None and self.entry.crc32 is not None:
            return self.entry.size
        return sum(mark.extent[1] for mark in self.marks)

    def compare(self, scanned: Scanned) -> Iterator[Problem]:
        """Yield a problem for each checksum that does not match."""
        file = str(self.file)
        for mark, found in zip(self.marks, scanned.crcs, strict=True):
            if found is None:
                yield Problem(f"{self.file.name} is truncated within {mark.what}.", file, mark.extent[0])
            elif found != mark.crc32:
                wrong = f"its CRC-32 is {found:08x} (expected {mark.crc32:08x})"
                yield Problem(f"{mark.what} in {self.file.name} is damaged: {wrong}.", file, mark.extent[0])
        expected = None if self.entry is None else self.entry.crc32
        if expected is not None and scanned.whole != expected:
            yield Problem(damaged_file(self.file, scanned.whole, expected), file)


def planned_checks(layout: Layout, listed: Mapping[Path, FileEntry]) -> tuple[list[Check], list[str]]:
    """Return the checksums to compare, and what cannot be checked.

    Args:
        layout: The checkpoint.
        listed: Files that a manifest lists, with their entries.

    Raises:
        CorruptCheckpointError, FormatError: An archive's directory cannot be read.
    """
    kind = format_of(layout)
    marks: dict[Path, dict[Extent, Mark]] = {}
    unchecked_tensors, unchecked_bytes = 0, 0
    whole = {file for file, entry in listed.items() if entry.crc32 is not None}
    for name, entry in layout.tensors.items():
        blind = 0
        for chunk in entry.chunks():
            record = chunk.record
            if record is not None and record.crc32 is not None:
                extent = record.offset, record.nbytes
                what = f"The data of tensor {name!r}"
                marks.setdefault(record.file, {}).setdefault(extent, Mark(extent, record.crc32, what))
            elif chunk.file not in whole:
                blind += chunk.nbytes
        unchecked_tensors, unchecked_bytes = unchecked_tensors + (blind > 0), unchecked_bytes + blind
    # The pickle, and what other ranks hold a copy of, is in no tensor of the layout.
    for file in kind.archives(layout):
        for item in read_records(file).values():
            extent = item.offset, item.nbytes
            if item.crc32 is not None:
                mark = Mark(extent, item.crc32, f"Entry {item.name!r}")
                marks.setdefault(file, {}).setdefault(extent, mark)
    checks = [check for file in {**marks, **listed} for check in _checks(file, marks.get(file, {}), listed.get(file))]
    unchecked = []
    if unchecked_tensors:
        unchecked.append(
            f"the data of {unchecked_tensors} of {len(layout.tensors)} tensors ({human_bytes(unchecked_bytes)}): "
            f"{layout.format} stores no checksum for it, and no {MANIFEST_NAME} has one"
        )
    if not listed and kind.may_mix_saves(layout):
        unchecked.append(f"whether all files are of one save: there is no {MANIFEST_NAME}")
    return checks, [*unchecked, *kind.unchecked(layout)]


def _checks(file: Path, marks: Mapping[Extent, Mark], entry: FileEntry | None) -> Iterator[Check]:
    if entry is not None and entry.crc32 is not None:
        yield Check(file, tuple(marks.values()), entry)
        return
    batch: list[Mark] = []
    size = 0
    for mark in sorted(marks.values(), key=lambda mark: mark.extent):
        batch.append(mark)
        size += mark.extent[1]
        if size >= _BATCH:
            yield Check(file, tuple(batch))
            batch, size = [], 0
    if batch:
        yield Check(file, tuple(batch))
