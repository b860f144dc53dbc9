"""Writes a conversion to a store as it is produced: nothing of it is kept on this machine."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import cast, overload

from mmfsdp.basics.arguments import argument
from mmfsdp.basics.text import name_list
from mmfsdp.checkpoint.conversion.output import check_output
from mmfsdp.checkpoint.conversion.selection import Intent
from mmfsdp.checkpoint.conversion.settings import Conversion
from mmfsdp.checkpoint.conversion.targets import Companion, ConversionTarget, part_of_source, paths_of
from mmfsdp.checkpoint.files.atomic import TargetExistsError
from mmfsdp.checkpoint.files.copying import Copier, RecordKey, write_at
from mmfsdp.checkpoint.files.disk import checkpoint_path, present, write_errors
from mmfsdp.checkpoint.files.expected_reads import copied_extents
from mmfsdp.checkpoint.files.planned_files import Progress, Tracker, joined_crc
from mmfsdp.checkpoint.integrity import crc32
from mmfsdp.checkpoint.layout import Layout, Piece, PlannedFile
from mmfsdp.checkpoint.manifest import MANIFEST_NAME, FileEntry, manifest_bytes
from mmfsdp.checkpoint.remote.paths import RemotePath
from mmfsdp.checkpoint.remote.s3_uploads import S3Folder
from mmfsdp.checkpoint.remote.upload_parts import UploadParts
from mmfsdp.errors import CheckpointError, ConfigError, MmfsdpError

__all__ = ["StoreTarget"]


class StoreTarget(ConversionTarget):
    """A target in a store, which is sent in parts as it is produced."""

    def refuse_source(self, layout: Layout) -> None:
        with write_errors(self.path):
            if not present(self.path):
                return
            urls, target = {*map(str, paths_of(layout, remote=True))}, str(self.path)
            if target in urls or any(target.startswith(f"{url}/") for url in urls):
                raise part_of_source(self.path)

    def check(self, intent: Intent, beside: Mapping[str, Companion]) -> int:
        names = {*beside, *(file.name for file in intent.planned)}
        _check(self._folder, str(self.path), names, self.chosen, directory=self.format.directory)
        return 0

    @property
    def _folder(self) -> S3Folder:
        return S3Folder(cast(RemotePath, self.path).url)

    def write(self, intent: Intent, beside: Mapping[str, Companion], progress: Progress | None) -> Path:
        contents = {name: file if isinstance(file, bytes) else file.read_bytes() for name, file in beside.items()}
        directory, chosen = self.format.directory, self.chosen
        _upload(self._folder, intent, chosen, directory=directory, beside=contents, progress=progress)
        if chosen.verify_output:
            check_output(checkpoint_path(str(self.path)), intent.written, trust=chosen.trust, progress=progress)
        return self.path


def _check(folder: S3Folder, url: str, names: Collection[str], chosen: Conversion, *, directory: bool) -> None:
    """Check that a target may be written.

    Args:
        folder: Where to write to.
        url: The same, for messages.
        names: The names of all files that will be written below it.
        chosen: The settings.
        directory: Whether it is a folder with a manifest.

    Raises:
        ConfigError: The store cannot be written as data is produced, or a setting asks for what only disks can do.
        TargetExistsError: The target exists, and is not what an interrupted conversion has left.
        CheckpointError: The store does not answer.
    """
    if chosen.publish:
        raise ConfigError(
            f"{argument('publish', python='Conversion.publish')}: works only for targets on this machine, and not for "
            f"{url!r}."
        )
    if not folder.exists() or (chosen.overwrite and not directory):
        return
    if directory and chosen.resume and {*folder.names()} <= {*names}:  # the manifest, which comes last, is missing
        return
    raise TargetExistsError(
        f"{url!r} exists already. Choose another name"
        + (", or remove it first." if directory else f", or pass {argument('overwrite', True)} to replace this file."),
        file=url,
    )


def _upload(
    folder: S3Folder,
    intent: Intent,
    chosen: Conversion,
    *,
    directory: bool,
    beside: Mapping[str, bytes],
    progress: Progress | None = None,
) -> None:
    """Write all files; those without tensors and the manifest come last.

    With ``resume``, what S3 has already is not sent again. Nothing but S3 itself records what that is: all bytes are
    made anew from the source, and each part is compared with the MD5 of what S3 has.

    Args:
        folder: Where.
        intent: What.
        chosen: The settings.
        directory: Whether a manifest is written.
        beside: What is written too, by name.
        progress: Called with the bytes of tensor data so far and their total.

    Raises:
        CorruptCheckpointError: Source data does not match its checksum, or a file of the source ends too early.
        CheckpointError: The store does not take it. Without ``resume``, everything that was written is removed; the
            error names what the store does not let be removed.
    """
    tracker = Tracker(sum(file.nbytes for file in intent.planned), progress)
    written: dict[str, FileEntry] = {}
    verified: set[RecordKey] | None = set() if chosen.verify else None
    order = sorted(intent.planned, key=lambda file: not file.pieces)
    try:
        for file in order:
            found = _compared(folder, file, tracker, verified) if directory and chosen.resume else None
            written[file.name] = found or _uploaded(folder, file, tracker, verified, resume=chosen.resume)
        for name, content in beside.items():
            folder.put(name, content)
            written[name] = FileEntry(len(content), crc32(content))
        if directory:
            entries = {file.name: written[file.name] for file in intent.planned}
            text = manifest_bytes(save_id=intent.save_id, world_size=intent.world_size, files=entries)
            folder.put(MANIFEST_NAME, text)
    except BaseException as error:
        if chosen.resume:
            raise
        raise _undone(error, {name: partial(folder.remove, name) for name in written}) from error.__cause__


def _uploaded(
    folder: S3Folder, file: PlannedFile, tracker: Tracker, verified: set[RecordKey] | None, *, resume: bool
) -> FileEntry:
    upload = folder.upload(file.name, file.size, _stretches(file), resume=resume)
    try:
        entry = _written(file, upload, tracker.advance, verified)
        upload.complete()
    except BaseException as error:
        if resume:
            upload.stop()  # S3 keeps the parts
            raise
        raise _undone(
            error, {f"the parts of {file.name}" if file.name else "its parts": upload.abort}
        ) from error.__cause__
    return entry


def _undone(error: BaseException, steps: Mapping[str, Callable[[], None]]) -> BaseException:
    """Undo what was written; return the error that made it necessary, and which says what could not be undone."""
    left = [*steps]
    with suppress(CheckpointError):  # a store that does not answer once is not asked for the rest
        for step in steps.values():
            step()
            del left[0]
    if not left:
        return error
    text = f"S3 did not remove what was written before: {name_list(left, 5)}. Remove it yourself."
    if isinstance(error, MmfsdpError):
        return type(error)(f"{error.message} {text}", **error.context)
    error.add_note(text)
    return error


def _compared(
    folder: S3Folder, file: PlannedFile, tracker: Tracker, verified: set[RecordKey] | None
) -> FileEntry | None:
    """Return size and checksum of a file that an interrupted conversion has finished, or ``None``."""
    comparison = folder.comparison(file.name, file.size, _stretches(file))
    if comparison is None:
        return None
    try:
        entry = _written(file, comparison, lambda _: tracker.advance(0), verified)
        same = comparison.same()
    finally:
        comparison.stop()
    if same:
        tracker.advance(file.nbytes)
    return entry if same else None


def _stretches(file: PlannedFile) -> Iterator[tuple[int, int]]:
    """Yield offset and length of everything that a file will hold."""
    yield from ((piece.at, piece.entry.nbytes) for piece in file.pieces)
    yield from ((offset, len(block)) for offset, block in file.blocks([0] * len(file.pieces)))


def _written(
    file: PlannedFile, parts: UploadParts, advance: Callable[[int], None], verified: set[RecordKey] | None
) -> FileEntry:
    """Copy a file into parts, and return its size and its checksum."""
    with Copier(advance, parts, verified=verified) as copier:
        copier.expect(copied_extents(file.pieces, verify=verified is not None))
        crcs = _Copied(copier, file.pieces)
        written = []
        for offset, block in file.blocks(crcs):
            write_at(parts, block, offset)
            written.append((offset, len(block), crc32(block)))
        pieces = [(piece.at, piece.entry.nbytes, crc) for piece, crc in zip(file.pieces, crcs, strict=True)]
    return FileEntry(file.size, joined_crc(heapq.merge(sorted(pieces), sorted(written)), file.size))


class _Copied(Sequence[int]):
    """The CRC-32 of each piece of a file, which is copied when its checksum is asked for, after those before it.

    So a format whose headers hold checksums yields each header right after the tensor that it describes.
    """

    def __init__(self, copier: Copier, pieces: Sequence[Piece]) -> None:
        self._copier, self._pieces = copier, pieces
        self._crcs: list[int] = []

    def __len__(self) -> int:
        return len(self._pieces)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        wanted = range(len(self))[index]  # checks it
        last = max(wanted, default=-1) if isinstance(wanted, range) else wanted
        for piece in self._pieces[len(self._crcs) : last + 1]:
            empty = not piece.entry.nbytes
            self._crcs.append(0 if empty else self._copier.copy_tensor(piece.entry, piece.at))
        return self._crcs[index]
