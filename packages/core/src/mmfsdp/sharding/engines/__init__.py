"""The engines, which carry out a plan."""

from mmfsdp.runtime.engine import Engine
from mmfsdp.runtime.sharded_model import ShardedModel
from mmfsdp.sharding.engines.fsdp1 import Fsdp1Engine
from mmfsdp.sharding.engines.fsdp2 import Fsdp2Engine, ReplicateEngine

__all__ = ["ENGINES", "Fsdp1Engine", "Fsdp2Engine", "ReplicateEngine"]

_ALL: tuple[Engine[ShardedModel], ...] = (Fsdp2Engine(), Fsdp1Engine(), ReplicateEngine())
ENGINES = {engine.name: engine for engine in _ALL}
