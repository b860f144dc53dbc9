"""The interface of an engine, which carries out a plan or reports beforehand what it cannot do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from mmfsdp.planning.plan_records import ShardUnit
from mmfsdp.planning.schema import ShardPlan

__all__ = ["Engine", "PrepareUnit", "WrapRoot"]

PrepareUnit = Callable[[ShardUnit], None]
"""Called by the engine right before it shards a unit; then its weights are on the device and equal on all ranks."""

WrapRoot = Callable[[nn.Module, Mapping[str, Any]], nn.Module]
"""Makes FSDP1's wrapper around the root from its arguments."""


class Engine(Protocol):
    """Shards a model according to a plan."""

    name: str

    def unsupported(self, plan: ShardPlan, device_type: str) -> list[str]:
        """Return what this engine cannot do of ``plan``, as sentences that say what to write instead."""
        ...

    def apply(
        self,
        model: nn.Module,
        plan: ShardPlan,
        mesh: DeviceMesh,
        prepare: PrepareUnit,
        wrap_root: WrapRoot | None = None,
    ) -> nn.Module:
        """Shard ``model`` and return the module to call. Collective: every rank of ``mesh``.

        Args:
            model: The model that the plan was made for; changed in place.
            plan: The plan to apply.
            mesh: ``('shard',)`` or ``('replicate', 'shard')``, of the plan's shape.
            prepare: Must be called for each unit, in the plan's order, right before sharding it.
            wrap_root: Only for FSDP1, whose root is an object around the model.
        """
        ...
