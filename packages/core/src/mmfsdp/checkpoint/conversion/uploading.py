"""Writes a conversion to a store as it is produced: nothing of it is kept on this machine."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from pathlib import Path

from mmfsdp.checkpoint.conversion.selection import Intent
from mmfsdp.checkpoint.conversion.settings import Conversion
from mmfsdp.checkpoint.files.atomic import TargetExistsError
from mmfsdp.checkpoint.files.copying import Copier
from mmfsdp.checkpoint.files.expecting import copied_extents
from mmfsdp.checkpoint.files.writing import Progress, Tracker, joined_crc
from mmfsdp.checkpoint.integrity import crc32
from mmfsdp.checkpoint.layout import PlannedFile
from mmfsdp.checkpoint.manifest import MANIFEST_NAME, FileEntry, manifest_bytes
from mmfsdp.checkpoint.remote.paths import RemotePath
from mmfsdp.checkpoint.remote.s3_uploads import S3Folder
from mmfsdp.errors import ConfigError

__all__ = ["check_target", "upload"]


def check_target(target: Path, intent: Intent, chosen: Conversion, *, directory: bool) -> S3Folder:
    """Return where to write to, if this can be written there as it is produced.

    Raises:
        ConfigError: The store or the format cannot do that, or a setting asks for what only disks can do.
        TargetExistsError: The target exists, and ``overwrite`` is false.
        CheckpointError: The store does not answer.
    """
    assert isinstance(target, RemotePath)
    url, folder = target.url, S3Folder(target.url)
    for name in ("publish", "resume"):
        if getattr(chosen, name):
            raise ConfigError(f"Conversion.{name}: works only for targets on this machine, and not for {str(url)!r}.")
    for file in intent.planned:
        first = min((piece.at for piece in file.pieces if piece.entry.nbytes), default=file.size)
        if any(offset + len(block) > first for offset, block in file.blocks([0] * len(file.pieces))):
            raise ConfigError(
                f"{intent.format!r} has checksums among its data, and so it cannot be sent as it is produced. Write "
                f"safetensors to {str(url)!r}, or write to a path on this machine and copy the result.",
                file=str(url),
            )
    if folder.exists() and (directory or not chosen.overwrite):
        raise TargetExistsError(
            f"{str(url)!r} exists already. Choose another name"
            + (", or remove it first." if directory else ", or pass overwrite=True to replace this file."),
            file=str(url),
        )
    return folder


def upload(
    folder: S3Folder,
    intent: Intent,
    chosen: Conversion,
    *,
    directory: bool,
    beside: Mapping[str, Path],
    progress: Progress | None = None,
) -> None:
    """Write all files; those without tensors and the manifest come last.

    Args:
        folder: Where, as `check_target` returned it.
        intent: What.
        chosen: The settings.
        directory: Whether a manifest is written.
        beside: Files of this machine that are written too, by name.
        progress: Called with the bytes of tensor data so far and their total.

    Raises:
        CorruptCheckpointError: Source data does not match its checksum, or a file of the source ends too early.
        CheckpointError: The store does not take it. Everything that was written is removed.
    """
    tracker = Tracker(sum(file.nbytes for file in intent.planned), progress)
    written: dict[str, FileEntry] = {}
    verified: set[tuple[Path, int, int]] | None = set() if chosen.verify else None
    order = sorted(intent.planned, key=lambda file: not file.pieces)
    try:
        for file in order:
            written[file.name] = _upload(folder, file, tracker, verified, chosen.verify)
        for name, path in beside.items():
            folder.put(name, path.read_bytes())
            written[name] = FileEntry.of(path)
        if directory:
            entries = {file.name: written[file.name] for file in intent.planned}
            text = manifest_bytes(save_id=intent.save_id, world_size=intent.world_size, files=entries)
            folder.put(MANIFEST_NAME, text)
    except BaseException:
        for name in written:
            folder.remove(name)
        raise


def _upload(
    folder: S3Folder,
    file: PlannedFile,
    tracker: Tracker,
    verified: set[tuple[Path, int, int]] | None,
    verify: bool,
) -> FileEntry:
    upload = folder.upload(file.name, file.size)
    try:
        pieces = sorted(file.pieces, key=lambda piece: piece.at)
        upload.held_back = min((piece.at for piece in pieces), default=file.size)
        with Copier(tracker.advance, upload, verified=verified) as copier:
            copier.expect(copied_extents(pieces, verify=verify))
            found = {piece.at: copier.copy_tensor(piece.entry, piece.at) for piece in pieces if piece.entry.nbytes}
        crcs = [found.get(piece.at, 0) if piece.entry.nbytes else 0 for piece in file.pieces]
        blocks = [*file.blocks(crcs)]
        for offset, block in blocks:
            upload.write(block, offset)
        upload.finish()
    except BaseException:
        upload.abort()
        raise
    return FileEntry(file.size, _whole(file, crcs, blocks))


def _whole(file: PlannedFile, crcs: Sequence[int], blocks: Sequence[tuple[int, bytes]]) -> int:
    pieces = sorted((piece.at, piece.entry.nbytes, crc) for piece, crc in zip(file.pieces, crcs, strict=True))
    around = [(offset, len(block), crc32(block)) for offset, block in blocks]
    return joined_crc(heapq.merge(pieces, around), file.size)
