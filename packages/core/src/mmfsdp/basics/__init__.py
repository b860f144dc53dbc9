"""What every room may use: text, dtypes, references by name, boxes of tensors, and imports on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmfsdp.basics.lazy import lazy

if TYPE_CHECKING:
    from mmfsdp.basics.dtypes import canonical_dtype, to_torch
    from mmfsdp.basics.references import resolve_reference

__all__ = [
    "canonical_dtype",
    "resolve_reference",
    "to_torch",
]

_WHERE = {
    **dict.fromkeys(("canonical_dtype", "to_torch"), "mmfsdp.basics.dtypes"),
    "resolve_reference": "mmfsdp.basics.references",
}


def __getattr__(name: str) -> Any:
    return lazy(__name__, __all__, _WHERE, name)
