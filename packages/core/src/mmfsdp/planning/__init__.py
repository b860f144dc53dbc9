"""Computes a plan from a model and a configuration, and changes neither."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmfsdp.basics.lazy import lazy

if TYPE_CHECKING:
    from mmfsdp.planning.automatic import repeated_classes
    from mmfsdp.planning.memory import OPTIMIZERS, MemoryEstimate, estimate_memory, optimizer_named
    from mmfsdp.planning.patterns import match_classes
    from mmfsdp.planning.resolve import plan
    from mmfsdp.planning.schema import (
        ActivationPlan,
        BufferEntry,
        MeshSpec,
        Note,
        ParamEntry,
        ShardPlan,
        ShardUnit,
        UnitPrecision,
    )

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
    **dict.fromkeys(("OPTIMIZERS", "MemoryEstimate", "estimate_memory", "optimizer_named"), "mmfsdp.planning.memory"),
    "match_classes": "mmfsdp.planning.patterns",
    "plan": "mmfsdp.planning.resolve",
}

_NEEDS_TORCH = {"Match", "fingerprint", "plan", "repeated_classes", "resolve_policy", "select_modules"}


def __getattr__(name: str) -> Any:
    return lazy(__name__, __all__, _WHERE, name, default="mmfsdp.planning.schema", needs_torch=_NEEDS_TORCH)
