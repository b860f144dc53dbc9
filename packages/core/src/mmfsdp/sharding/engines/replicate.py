"""NO_SHARD: every rank holds everything and gradients are averaged, as with DDP.

It is ``fully_shard`` on a mesh whose shard groups have one rank each: public API, and mixed precision, clipping,
accumulation and state dicts work as they do when sharded.
"""

from __future__ import annotations

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from mmfsdp.planning.schema import ShardPlan
from mmfsdp.sharding.engines.engine import PrepareUnit, WrapRoot
from mmfsdp.sharding.engines.fsdp2 import Fsdp2Engine

__all__ = ["ReplicateEngine"]


class ReplicateEngine:
    """Replicates the model."""

    name = "replicate"

    def __init__(self) -> None:
        self._fsdp2 = Fsdp2Engine()

    def unsupported(self, plan: ShardPlan, device_type: str) -> list[str]:
        """See `Engine.unsupported`."""
        problems = self._fsdp2.unsupported(plan, device_type)
        if plan.mesh.shard != 1:
            problems.append(f"a mesh of {plan.mesh} shards; plan with strategy 'NO_SHARD'.")
        return problems

    def apply(
        self,
        model: nn.Module,
        plan: ShardPlan,
        mesh: DeviceMesh,
        prepare: PrepareUnit,
        wrap_root: WrapRoot | None = None,
    ) -> nn.Module:
        """See `Engine.apply`. Returns ``model`` itself."""
        return self._fsdp2.apply(model, plan, mesh, prepare)
