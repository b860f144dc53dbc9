"""The configuration models: frozen, validated, torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmfsdp.basics.lazy import lazy

if TYPE_CHECKING:
    from mmfsdp.config.activation import ActivationCheckpointingConfig
    from mmfsdp.config.compiling import CompileConfig
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
    "CompileConfig",
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
    "CompileConfig": "mmfsdp.config.compiling",
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

if not TYPE_CHECKING:  # a type checker reports names that are not there
    __getattr__, __dir__ = lazy(__name__, __all__, _WHERE)
