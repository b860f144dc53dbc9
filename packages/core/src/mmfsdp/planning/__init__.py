"""Deciding: from a model and a configuration to a plan, without touching either."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmfsdp.basics.lazy import lazy

if TYPE_CHECKING:
    from mmfsdp.planning.automatic import repeated_classes
    from mmfsdp.planning.fingerprints import fingerprint
    from mmfsdp.planning.memory import OPTIMIZERS, MemoryEstimate, estimate_memory, optimizer_named
    from mmfsdp.planning.policies import Match, resolve_policy, select_modules
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
    "Match",
    "MemoryEstimate",
    "MeshSpec",
    "Note",
    "ParamEntry",
    "ShardPlan",
    "ShardUnit",
    "UnitPrecision",
    "estimate_memory",
    "fingerprint",
    "optimizer_named",
    "plan",
    "repeated_classes",
    "resolve_policy",
    "select_modules",
]

_WHERE = {
    "fingerprint": "mmfsdp.planning.fingerprints",
    "plan": "mmfsdp.planning.resolve",
    "repeated_classes": "mmfsdp.planning.automatic",
    **dict.fromkeys(("MemoryEstimate", "OPTIMIZERS", "estimate_memory", "optimizer_named"), "mmfsdp.planning.memory"),
    **dict.fromkeys(("Match", "resolve_policy", "select_modules"), "mmfsdp.planning.policies"),
}

_NEEDS_TORCH = {"Match", "fingerprint", "plan", "repeated_classes", "resolve_policy", "select_modules"}


def __getattr__(name: str) -> Any:
    return lazy(__name__, __all__, _WHERE, name, default="mmfsdp.planning.schema", needs_torch=_NEEDS_TORCH)
