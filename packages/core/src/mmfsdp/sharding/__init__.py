"""Carrying out a plan: meshes, devices, initialisation, activation checkpointing and the engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmfsdp.basics.lazy import lazy
from mmfsdp.basics.torch_version import require_torch

if TYPE_CHECKING:
    from mmfsdp.sharding.activation.checkpointing import apply_activation_checkpointing
    from mmfsdp.sharding.activation.kept_operators import DEFAULT_SAVE_OPS

require_torch(__name__)

__all__ = [
    "DEFAULT_SAVE_OPS",
    "apply_activation_checkpointing",
]

_WHERE = {
    "apply_activation_checkpointing": "mmfsdp.sharding.activation.checkpointing",
    "DEFAULT_SAVE_OPS": "mmfsdp.sharding.activation.kept_operators",
}

if not TYPE_CHECKING:  # a type checker reports names that are not there
    __getattr__, __dir__ = lazy(__name__, __all__, _WHERE)
