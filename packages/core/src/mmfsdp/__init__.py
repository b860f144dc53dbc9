"""Shard, train and checkpoint PyTorch models from a config: a validated config becomes a plan, the plan is applied."""

from __future__ import annotations

from mmfsdp.basics.lazy import lazy

__version__ = "0.1.0"

# The stub beside this file lists the public names.
__getattr__, __dir__, __all__ = lazy(__name__, __file__, without_torch={"ShardConfig", "ShardPlan", "compare"})
