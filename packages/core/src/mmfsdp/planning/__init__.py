"""Computes a plan from a model and a configuration, and changes neither."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmfsdp.basics.lazy import lazy

if TYPE_CHECKING:
    from mmfsdp.planning.automatic import repeated_classes
    from mmfsdp.planning.memory import MemoryEstimate, estimate_memory
    from mmfsdp.planning.optimizer_memory import OPTIMIZERS, optimizer_named
    from mmfsdp.planning.patterns import match_classes
    from mmfsdp.planning.records import (
        ActivationPlan,
        BufferEntry,
        MeshSpec,
        Note,
        ParamEntry,
        ShardUnit,
        UnitPrecision,
    )
    from mmfsdp.planning.resolve import plan
    from mmfsdp.planning.schema import ShardPlan

__all__ = [
    "OPTIMIZERS",
    "ActivationPlan",
    "BufferEntry",
    "MemoryEstimate",
    "MeshSpec",
    "Note",
    "ParamEntry",
    "ShardPlan",
    "ShardUnit",
    "UnitPrecision",
    "estimate_memory",
    "match_classes",
    "optimizer_named",
    "plan",
    "repeated_classes",
]

_WHERE = {
    "repeated_classes": "mmfsdp.planning.automatic",
    **dict.fromkeys(("MemoryEstimate", "estimate_memory"), "mmfsdp.planning.memory"),
    **dict.fromkeys(("OPTIMIZERS", "optimizer_named"), "mmfsdp.planning.optimizer_memory"),
    "match_classes": "mmfsdp.planning.patterns",
    "plan": "mmfsdp.planning.resolve",
    "ShardPlan": "mmfsdp.planning.schema",
}

_NEEDS_TORCH = {"plan", "repeated_classes"}

if not TYPE_CHECKING:  # a type checker reports names that are not there
    __getattr__, __dir__ = lazy(__name__, __all__, _WHERE, default="mmfsdp.planning.records", needs_torch=_NEEDS_TORCH)
