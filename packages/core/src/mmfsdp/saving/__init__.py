"""Ranks and checkpoint files together: saving, loading, and saving in the background."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmfsdp.basics.lazy import lazy
from mmfsdp.basics.torch_version import require_torch

if TYPE_CHECKING:
    from mmfsdp.saving.archives import write_archive
    from mmfsdp.saving.load import reference_of
    from mmfsdp.saving.reading import open_shared, read_checkpoint, read_verified, read_whole
    from mmfsdp.saving.save import write_checkpoint

require_torch(__name__)

__all__ = [
    "open_shared",
    "read_checkpoint",
    "read_verified",
    "read_whole",
    "reference_of",
    "write_archive",
    "write_checkpoint",
]

_WHERE = {
    **dict.fromkeys(("open_shared", "read_checkpoint", "read_verified", "read_whole"), "mmfsdp.saving.reading"),
    "reference_of": "mmfsdp.saving.load",
    "write_archive": "mmfsdp.saving.archives",
    "write_checkpoint": "mmfsdp.saving.save",
}

if not TYPE_CHECKING:  # a type checker reports names that are not there
    __getattr__, __dir__ = lazy(__name__, __all__, _WHERE)
