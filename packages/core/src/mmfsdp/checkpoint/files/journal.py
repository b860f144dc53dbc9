"""Records which parts of a target are written, so that a conversion that was interrupted goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from mmfsdp.basics.arguments import argument
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.files.disk import identity
from mmfsdp.checkpoint.integrity import crc32_of_stretch, parse_json
from mmfsdp.checkpoint.layout import Piece, PlannedFile
from mmfsdp.errors import ConfigError

__all__ = ["Journal", "lasting_id"]

_FORMAT = "mmfsdp.journal"


class Journal:
    """The parts of a target that are written, one line of a file for each.

    A part is known by its file and its first piece. It counts as written only if its bytes have the checksums that the
    journal lists: after a power failure they may not be on disk.

    Args:
        path: The file; what an interrupted conversion left there is read.
        target: What is being written, for messages.
        files: What will be written.

    Raises:
        ConfigError: The interrupted conversion was another one, or its source has changed.
    """

    def __init__(self, path: Path, target: Path, files: Sequence[PlannedFile]) -> None:
        self._path, self._lock = path, threading.Lock()
        self._written: dict[tuple[str, int], list[int]] = {}
        plan = {"format": _FORMAT, "version": 1, "plan": _fingerprint(files), "sources": _identities(_entries(files))}
        self.continues = path.exists() and self._read(target, plan)
        """Whether there is anything to resume from."""
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        if not self.continues:
            self._append(plan)

    def _read(self, target: Path, plan: dict[str, object]) -> bool:
        lines = self._path.read_bytes().split(b"\n")[:-1]  # the last one may be torn
        try:
            found, *parts = map(parse_json, lines)
            self._written = {(file, first): list(map(int, crcs)) for file, first, crcs in parts}
        except (ValueError, TypeError, RecursionError):
            return False
        if found == plan:
            return True
        anew = (
            f"Give back what was given then, or leave out {argument('resume', True)} to begin anew, which removes what "
            "was written."
        )
        if not isinstance(found, dict) or found.get("plan") != plan["plan"]:
            raise ConfigError(
                f"The conversion to {target.name} that was interrupted had other settings, or a source with other "
                f"content. {anew}",
                file=str(target),
            )
        before, now = found.get("sources", {}), _identities_of(plan)
        changed = next((name for name in now if before.get(name) != now[name]), "a file")
        raise ConfigError(
            f"{changed!r} has changed since the conversion to {target.name} was interrupted. {anew}", file=changed
        )

    def kept(self, path: Path, file: str, first: int, pieces: Sequence[Piece]) -> list[int] | None:
        """Return the CRC-32 of each piece of a part that is written, or ``None`` if it must be written.

        Args:
            path: The file that is being written.
            file: Its name in the target.
            first: The number of the part's first piece in the file.
            pieces: The pieces.
        """
        crcs = self._written.get((file, first))
        if crcs is None or len(crcs) != len(pieces):
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for piece, crc in zip(pieces, crcs, strict=True):
                end = piece.at + piece.entry.nbytes
                if crc32_of_stretch(descriptor, piece.at, end) != (crc, end):
                    return None
        finally:
            os.close(descriptor)
        return crcs

    def note(self, file: str, first: int, crcs: Sequence[int]) -> None:
        """Record that a part is written. Threads may call this at the same time."""
        self._append([file, first, [*crcs]])

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _append(self, value: object) -> None:
        line = json.dumps(value).encode() + b"\n"
        with self._lock:
            while line:
                line = line[os.write(self._descriptor, line) :]


def lasting_id(tensors: Mapping[str, TensorEntry], form: str) -> str:
    """Return an id of what is written of some tensors, which stays the same as long as their files do not change.

    So the files that an interrupted conversion has finished are those that the next one would write.

    Args:
        tensors: The tensors by name.
        form: What else decides what is written.
    """
    digest = hashlib.sha256(form.encode())
    for name, entry in tensors.items():
        for line in (name, *entry.describe_source()):
            digest.update(f"{line}\n".encode())
    digest.update(repr(_identities(tensors.values())).encode())
    return digest.hexdigest()[:16]


def _fingerprint(files: Iterable[PlannedFile]) -> str:
    """Return a hash of the files to be written, and of the sources of their bytes."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(repr((file.name, file.size)).encode())
        for piece in file.pieces:
            for line in piece.entry.describe_source():
                digest.update(f"{piece.at} {line}\n".encode())
    return digest.hexdigest()


def _identities(entries: Iterable[TensorEntry]) -> dict[str, str]:
    """Return values, by path, that change when a file of the source changes."""
    paths = {chunk.file for entry in entries for chunk in entry.chunks()}
    return {str(path): identity(path) for path in sorted(paths, key=str)}


def _entries(files: Iterable[PlannedFile]) -> Iterator[TensorEntry]:
    return (piece.entry for file in files for piece in file.pieces)


def _identities_of(plan: dict[str, object]) -> dict[str, str]:
    sources = plan["sources"]
    assert isinstance(sources, dict)
    return sources
