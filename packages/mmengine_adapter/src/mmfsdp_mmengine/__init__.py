"""mmfsdp for MMEngine: importing this package registers its classes in place of MMEngine's."""

from mmfsdp_mmengine.installed import MissingMMEngineError, check_mmengine

check_mmengine()  # before the first import of MMEngine fails, or half works

from mmfsdp_mmengine.hooks.checkpoint import CheckpointHook
from mmfsdp_mmengine.hooks.ema import EMAHook
from mmfsdp_mmengine.first_steps import RehearsalHook
from mmfsdp_mmengine.hooks.resuming import DistSamplerSeedHook
from mmfsdp_mmengine.hooks.watching import WatchHook
from mmfsdp_mmengine.optimizers.amp import AmpOptimWrapper
from mmfsdp_mmengine.optimizers.muon import MuonConstructor
from mmfsdp_mmengine.registry import FSDP_WRAP_POLICIES
from mmfsdp_mmengine.runners.patches import patch_mmengine
from mmfsdp_mmengine.strategy import FSDPStrategy
from mmfsdp_mmengine.wrappers.ddp import MMDistributedDataParallel
from mmfsdp_mmengine.wrappers.fsdp import MMFullyShardedDataParallel

__all__ = [
    "FSDP_WRAP_POLICIES",
    "AmpOptimWrapper",
    "CheckpointHook",
    "DistSamplerSeedHook",
    "EMAHook",
    "FSDPStrategy",
    "MMDistributedDataParallel",
    "MMFullyShardedDataParallel",
    "MissingMMEngineError",
    "MuonConstructor",
    "RehearsalHook",
    "WatchHook",
    "__version__",
]

__version__ = "0.1.0"

patch_mmengine()
