"""Reads Hugging Face's ``pytorch_model.bin.index.json`` and the files of ``torch.save`` that it names."""

from __future__ import annotations

from pathlib import Path

from mmfsdp.checkpoint.formats.shard_index import combined, read_index
from mmfsdp.checkpoint.formats.torch_legacy import looks_like_torch_legacy, read_torch_legacy
from mmfsdp.checkpoint.formats.torch_zip import read_torch_zip
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.errors import FormatError

__all__ = ["read_torch_index"]


def read_torch_index(index: Path, path: Path, *, trust: bool = False) -> Layout:
    """Read the layout of a checkpoint in several files of ``torch.save``.

    Args:
        index: The index.
        path: What was opened: the index, or the directory that holds it.
        trust: Keep unknown pickled objects as opaque placeholders instead of refusing them.

    Raises:
        IncompleteCheckpointError: A file or a tensor is missing; it is named.
        CorruptCheckpointError: The index and the files do not fit together, or a file is damaged.
        FormatError: A file is of another kind, or outside of the directory.
        UnsafePickleError: A file names something that is not on the list of safe names.
    """
    files = read_index(index)
    return combined(path, "torch_index", files, {file: _read(file, trust) for file in dict.fromkeys(files.values())})


def _read(file: Path, trust: bool) -> Layout:
    with file.open("rb") as opened:
        head = opened.read(16)
    if head.startswith(b"PK\x03\x04"):
        return read_torch_zip(file, trust=trust)
    if looks_like_torch_legacy(head):
        return read_torch_legacy(file, trust=trust)
    raise FormatError(f"{file.name} is not a file of torch.save: it begins with {head[:8]!r}.", file=str(file))
