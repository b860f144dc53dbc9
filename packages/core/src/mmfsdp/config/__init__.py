"""The settings: frozen, validated, torch-free."""

from mmfsdp.config.activation import ActivationCheckpointingConfig
from mmfsdp.config.precision import PrecisionConfig, PrecisionOverride
from mmfsdp.config.schema import CpuOffloadConfig, InitConfig, PrefetchConfig, ShardConfig, ShardingConfig
from mmfsdp.config.wrap import (
    AllOf,
    AnyOf,
    AutoWrap,
    ModuleClassWrap,
    ModuleNameWrap,
    NoWrap,
    ReferenceWrap,
    SizeWrap,
    Wrap,
)

__all__ = [
    "ActivationCheckpointingConfig",
    "AllOf",
    "AnyOf",
    "AutoWrap",
    "CpuOffloadConfig",
    "InitConfig",
    "ModuleClassWrap",
    "ModuleNameWrap",
    "NoWrap",
    "PrecisionConfig",
    "PrecisionOverride",
    "PrefetchConfig",
    "ReferenceWrap",
    "ShardConfig",
    "ShardingConfig",
    "SizeWrap",
    "Wrap",
]
