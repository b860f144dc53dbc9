"""What ranks do together: a step succeeds on every rank or raises on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmfsdp.basics.lazy import lazy
from mmfsdp.basics.torch_version import require_torch

if TYPE_CHECKING:
    from mmfsdp.collective.channels import wait_timeout
    from mmfsdp.collective.scopes import Scope, place_in, scope_of
    from mmfsdp.collective.steps import (
        all_equal,
        broadcast_object,
        gather_objects,
        gather_to_first,
        on_all_ranks,
        shared,
    )

require_torch(__name__)

__all__ = [
    "Scope",
    "all_equal",
    "broadcast_object",
    "gather_objects",
    "gather_to_first",
    "on_all_ranks",
    "place_in",
    "scope_of",
    "shared",
    "wait_timeout",
]

_WHERE = {
    **dict.fromkeys(("Scope", "place_in", "scope_of"), "mmfsdp.collective.scopes"),
    "wait_timeout": "mmfsdp.collective.channels",
}

if not TYPE_CHECKING:  # a type checker reports names that are not there
    __getattr__, __dir__ = lazy(__name__, __all__, _WHERE, default="mmfsdp.collective.steps")
