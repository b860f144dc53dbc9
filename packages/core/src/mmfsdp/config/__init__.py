"""The configuration models: frozen, validated, torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmfsdp.basics.lazy import lazy

if TYPE_CHECKING:
    from mmfsdp.config.activation import ActivationCheckpointingConfig
    from mmfsdp.config.precision import PrecisionConfig, PrecisionOverride
    from mmfsdp.config.schema import CpuOffloadConfig, InitConfig, PrefetchConfig, ShardConfig, ShardingConfig
    from mmfsdp.config.settings_file import read_settings
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
    "read_settings",
]

_WHERE = {
    "ActivationCheckpointingConfig": "mmfsdp.config.activation",
    **dict.fromkeys(("PrecisionConfig", "PrecisionOverride"), "mmfsdp.config.precision"),
    **dict.fromkeys(
        ("CpuOffloadConfig", "InitConfig", "PrefetchConfig", "ShardConfig", "ShardingConfig"), "mmfsdp.config.schema"
    ),
    **dict.fromkeys(
        (
            "AllOf",
            "AnyOf",
            "AutoWrap",
            "ModuleClassWrap",
            "ModuleNameWrap",
            "NoWrap",
            "ReferenceWrap",
            "SizeWrap",
            "Wrap",
        ),
        "mmfsdp.config.wrap",
    ),
    "read_settings": "mmfsdp.config.settings_file",
}


def __getattr__(name: str) -> Any:
    return lazy(__name__, __all__, _WHERE, name)
