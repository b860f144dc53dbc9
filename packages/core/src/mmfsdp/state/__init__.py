"""The weights and optimizer state of a live sharded model as plain state dicts, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmfsdp.basics.lazy import lazy
from mmfsdp.basics.torch_version import require_torch

if TYPE_CHECKING:
    from mmfsdp.state.lazy_tensors import whole_value
    from mmfsdp.state.local_view import LocalView, exchanged
    from mmfsdp.state.report import LoadReport, compare_shapes

require_torch(__name__)

__all__ = [
    "LoadReport",
    "LocalView",
    "compare_shapes",
    "exchanged",
    "whole_value",
]

_WHERE = {
    "whole_value": "mmfsdp.state.lazy_tensors",
    **dict.fromkeys(("LocalView", "exchanged"), "mmfsdp.state.local_view"),
    **dict.fromkeys(("LoadReport", "compare_shapes"), "mmfsdp.state.report"),
}

if not TYPE_CHECKING:  # a type checker reports names that are not there
    __getattr__, __dir__ = lazy(__name__, __all__, _WHERE)
