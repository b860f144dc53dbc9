"""Checksums of the blocks of a ``.pth`` file, in an entry of the file itself that other readers ignore.

A rank that needs some rows of a tensor can check them without reading the whole tensor.
"""

from __future__ import annotations

import json
import zipfile
from array import array
from pathlib import Path
from typing import Any

from mmfsdp.basics.descriptors import read_at
from mmfsdp.checkpoint.damage import damaged
from mmfsdp.checkpoint.files.disk import OpenFiles
from mmfsdp.checkpoint.formats.registry import format_of
from mmfsdp.checkpoint.formats.torch_files.zip_archive import ZipRecord, read_records
from mmfsdp.checkpoint.integrity import crc32
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.checkpoint.manifest import BLOCK, FileEntry

__all__ = ["embed_sums", "embedded_sums"]

_NAME = ".mmfsdp/crc32_blocks.json"


def embed_sums(path: Path, entry: FileEntry) -> None:
    """Add the checksums to a file that `torch.save` wrote.

    Args:
        path: The file.
        entry: The checksums of its blocks as it is now.
    """
    assert entry.blocks is not None
    with zipfile.ZipFile(path, "a", zipfile.ZIP_STORED) as archive:
        # The new entry takes the place of the directory, which is written anew behind it.
        end = archive.start_dir
        whole = end // BLOCK
        with path.open("rb") as file:
            file.seek(whole * BLOCK)
            rest = file.read(end - whole * BLOCK)
        blocks = [*entry.blocks[:whole], *([crc32(rest)] if rest else [])]
        content = {"block_size": BLOCK, "size": end, "crc32_blocks": "".join(f"{value:08x}" for value in blocks)}
        archive.writestr(f"{_root(archive)}{_NAME}", json.dumps(content))


def embedded_sums(layout: Layout) -> dict[Path, FileEntry]:
    """Return the checksums that a ``.pth`` file holds of its own blocks, by file; nothing for other formats.

    Raises:
        CorruptCheckpointError: They are damaged.
    """
    path = format_of(layout).mapped_file(layout)
    if path is None:
        return {}
    with OpenFiles() as files:
        source = files.descriptor(path)
        records = read_records(path, source=source)
        record = next((record for name, record in records.items() if name.endswith(_NAME)), None)
        if record is None:
            return {}
        data = read_at(source, record.nbytes, record.offset)
    try:
        if record.crc32 not in (None, crc32(data)):
            raise ValueError("its CRC-32 does not match")
        entry = _parsed(json.loads(data), record)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"Entry {record.name!r} of {path.name}"
        raise damaged(what, str(error), path, record.offset) from error
    return {} if entry is None else {path: entry}


def _root(archive: zipfile.ZipFile) -> str:
    return next(name for name in archive.namelist() if name.endswith("data.pkl")).removesuffix("data.pkl")


def _parsed(content: Any, record: ZipRecord) -> FileEntry | None:
    if content["block_size"] != BLOCK:
        return None
    size, text = content["size"], content["crc32_blocks"]
    blocks = array("I", (int(text[at : at + 8], 16) for at in range(0, len(text), 8)))
    if type(size) is not int or len(blocks) != -(-size // BLOCK) or size > record.header:
        raise ValueError("it does not fit the file")
    return FileEntry(size, None, blocks)
