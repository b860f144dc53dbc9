"""What every room may use: text, dtypes, references by name, boxes of tensors, and imports on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmfsdp.basics.lazy import lazy

if TYPE_CHECKING:
    from mmfsdp.basics.dtypes import canonical_dtype, to_torch
    from mmfsdp.basics.installing import pip_install
    from mmfsdp.basics.machines import boot_id
    from mmfsdp.basics.masking import hide_secrets, mask_secrets, mask_url
    from mmfsdp.basics.references import resolve_reference
    from mmfsdp.basics.tables import Column, format_table
    from mmfsdp.basics.text import human_bytes, name_list
    from mmfsdp.basics.torch_version import require_torch

__all__ = [
    "Column",
    "boot_id",
    "canonical_dtype",
    "format_table",
    "hide_secrets",
    "human_bytes",
    "mask_secrets",
    "mask_url",
    "name_list",
    "pip_install",
    "require_torch",
    "resolve_reference",
    "to_torch",
]

_WHERE = {
    **dict.fromkeys(("canonical_dtype", "to_torch"), "mmfsdp.basics.dtypes"),
    **dict.fromkeys(("Column", "format_table"), "mmfsdp.basics.tables"),
    **dict.fromkeys(("human_bytes", "name_list"), "mmfsdp.basics.text"),
    **dict.fromkeys(("hide_secrets", "mask_secrets", "mask_url"), "mmfsdp.basics.masking"),
    "boot_id": "mmfsdp.basics.machines",
    "pip_install": "mmfsdp.basics.installing",
    "require_torch": "mmfsdp.basics.torch_version",
    "resolve_reference": "mmfsdp.basics.references",
}

if not TYPE_CHECKING:  # a type checker reports names that are not there
    __getattr__, __dir__ = lazy(__name__, __all__, _WHERE)
