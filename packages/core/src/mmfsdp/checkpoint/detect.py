"""Opens a checkpoint of any format: what it is, is decided by its content and never by its name."""

from __future__ import annotations

import os
from pathlib import Path

from mmfsdp.checkpoint.formats.rank_local import is_rank_local, read_rank_local
from mmfsdp.checkpoint.formats.safetensors_file import looks_like_safetensors, read_safetensors
from mmfsdp.checkpoint.formats.torch_zip import read_torch_zip
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatError, closest

__all__ = ["open_layout"]

# The magic number that torch.save wrote before version 1.6, pickled (torch/serialization.py, MAGIC_NUMBER).
_LEGACY_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def open_layout(path: str | os.PathLike[str], *, trust: bool = False) -> Layout:
    """Read the layout of a checkpoint: its tensors, where their bytes lie, and everything else that it holds.

    Only metadata is read; torch is not imported, and nothing that a pickle names is imported or run.

    Args:
        path: A ``.pth``/``.pt`` file of ``torch.save``, a safetensors file, or a directory of ``rank{i}.pth`` files.
        trust: Keep pickled objects that are not on the list of safe names as opaque placeholders instead of refusing
            the file. They are not imported even then.

    Raises:
        CheckpointNotFoundError: There is nothing at ``path``, or a directory without a checkpoint.
        FormatError: It is of a format that is not known or not supported.
        UnsafePickleError: It names something that is not on the list of safe names.
        IncompleteCheckpointError: Parts of it are missing.
        CorruptCheckpointError: It is damaged.
    """
    path = Path(path)
    if path.is_dir():
        return _open_directory(path, trust)
    if not path.exists():
        raise CheckpointNotFoundError(f"There is no checkpoint at {str(path)!r}.{_nearest(path)}", file=str(path))
    with path.open("rb") as file:
        head = file.read(16)
    if not head:
        raise CorruptCheckpointError(f"{path.name} is empty.", file=str(path))
    if head.startswith(b"PK\x03\x04"):
        return read_torch_zip(path, trust=trust)
    if looks_like_safetensors(head):
        return read_safetensors(path)
    if head.startswith(_LEGACY_TORCH):
        raise FormatError(
            f"{path.name} is in the format of torch before version 1.6, which is not supported. Load it with "
            "torch.load and save it again with torch.save.",
            file=str(path),
        )
    raise FormatError(
        f"{path.name} is not a checkpoint of a known format: it begins with {head[:8]!r}. Known are the zip files of "
        "torch.save (.pth, .pt), safetensors files and directories of rank{i}.pth files.",
        file=str(path),
    )


def _open_directory(path: Path, trust: bool) -> Layout:
    if is_rank_local(path):
        return read_rank_local(path, trust=trust)
    names = sorted(entry.name for entry in path.iterdir())
    if ".metadata" in names:
        raise FormatError(
            f"{path.name} is a distributed checkpoint of torch (DCP), which cannot be read yet.", file=str(path)
        )
    if any(name.endswith(".safetensors.index.json") for name in names):
        raise FormatError(
            f"{path.name} holds safetensors in several files with an index, which cannot be read yet; its single files "
            "can.",
            file=str(path),
        )
    shown = ", ".join(repr(name) for name in names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    raise CheckpointNotFoundError(
        f"The directory {str(path)!r} is not a checkpoint: it has no rank{{i}}.pth. It holds "
        f"{shown or 'nothing'}.",
        file=str(path),
    )


def _nearest(path: Path) -> str:
    parent = path.absolute().parent
    if not parent.is_dir():
        return f" Its directory {str(parent)!r} does not exist either."
    return closest(path.name, [entry.name for entry in parent.iterdir() if not entry.name.startswith(".")])
