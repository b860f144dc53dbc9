"""Recognises files that are only one rank's part of a checkpoint, and files that lie beside one and are no part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmfsdp.basics.descriptors import RemoteLike
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.errors import FormatError

__all__ = ["files_beside", "is_of_fairscale", "one_of_many"]

_OF_FAIRSCALE = {"param_metadata", "buffer_names"}


def files_beside(layout: Layout) -> list[str]:
    """Return the files of ``torch.save`` in a DCP directory that are no part of it, such as Lightning's ``meta.pt``."""
    if layout.format not in ("dcp", "dcp_flat", "megatron") or isinstance(layout.path, RemoteLike):
        return []
    names = {path.name for path in layout.path.iterdir() if path.suffix in (".pt", ".pth", ".bin", ".ckpt")}
    return sorted(names - {"common.pt"} if "common" in layout.tree else names)  # which may need trust to be read


def is_of_fairscale(value: Any) -> bool:
    """Tell whether a part of a file's content is what fairscale's ``local_metadata_dict()`` returns."""
    return isinstance(value, dict) and {*value} >= _OF_FAIRSCALE


def one_of_many(path: Path) -> FormatError:
    """Return the error for a file that is one rank's part."""
    return FormatError(
        f"{path.name} is one rank's part of a sharded checkpoint; open its directory {str(path.parent)!r} instead.",
        file=str(path),
    )
