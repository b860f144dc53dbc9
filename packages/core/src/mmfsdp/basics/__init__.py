"""What every room may use: text, dtypes, references by name, boxes of tensors, and imports on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmfsdp.basics.lazy import lazy

if TYPE_CHECKING:
    from mmfsdp.basics.dtypes import canonical_dtype, to_torch
    from mmfsdp.basics.machines import boot_id
    from mmfsdp.basics.references import resolve_reference
    from mmfsdp.basics.tables import Column, format_table
    from mmfsdp.basics.text import human_bytes, name_list
    from mmfsdp.basics.torch_version import require_torch

__all__ = [
    "Column",
    "boot_id",
    "canonical_dtype",
    "format_table",
    "human_bytes",
    "name_list",
    "require_torch",
    "resolve_reference",
    "to_torch",
]

_WHERE = {
    **dict.fromkeys(("canonical_dtype", "to_torch"), "mmfsdp.basics.dtypes"),
    **dict.fromkeys(("Column", "format_table"), "mmfsdp.basics.tables"),
    **dict.fromkeys(("human_bytes", "name_list"), "mmfsdp.basics.text"),
    "boot_id": "mmfsdp.basics.machines",
    "require_torch": "mmfsdp.basics.torch_version",
    "resolve_reference": "mmfsdp.basics.references",
}


def __getattr__(name: str) -> Any:
    return lazy(__name__, __all__, _WHERE, name)
