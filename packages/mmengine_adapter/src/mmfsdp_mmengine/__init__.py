"""mmfsdp for MMEngine: importing this package registers its classes in place of the stock ones."""

from mmfsdp_mmengine.amp import AmpOptimWrapper
from mmfsdp_mmengine.checkpoint_hook import CheckpointHook
from mmfsdp_mmengine.ddp import MMDistributedDataParallel
from mmfsdp_mmengine.ema import EMAHook
from mmfsdp_mmengine.patches import patch_mmengine
from mmfsdp_mmengine.registry import FSDP_WRAP_POLICIES
from mmfsdp_mmengine.resuming import DistSamplerSeedHook
from mmfsdp_mmengine.strategy import FSDPStrategy
from mmfsdp_mmengine.wrapper import MMFullyShardedDataParallel

__all__ = [
    "FSDP_WRAP_POLICIES",
    "AmpOptimWrapper",
    "CheckpointHook",
    "DistSamplerSeedHook",
    "EMAHook",
    "FSDPStrategy",
    "MMDistributedDataParallel",
    "MMFullyShardedDataParallel",
    "__version__",
]

__version__ = "0.1.0"

patch_mmengine()
