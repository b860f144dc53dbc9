"""Types of settings as users write them, in every accepted form, for type checkers.

A field of a config model has the type that it is read as: ``ShardConfig(precision="bf16").precision`` is a
`PrecisionConfig`. The classes here list the same settings with what may be written for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Literal, Required, TypeAlias, TypedDict

if TYPE_CHECKING:
    import torch
    from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy

    from mmfsdp.config.activation import ActivationCheckpointingConfig
    from mmfsdp.config.base import ConfigModel
    from mmfsdp.config.compiling import CompileConfig
    from mmfsdp.config.optimizing import AdamWConfig, OptimizerConfig
    from mmfsdp.config.precision import PrecisionConfig, PrecisionOverride
    from mmfsdp.config.schema import CpuOffloadConfig, InitConfig, PrefetchConfig, ShardingConfig

__all__ = [
    "ActivationSettings",
    "AdamWSettings",
    "ClassWrapSettings",
    "CombinedWrapSettings",
    "CompileSettings",
    "NameWrapSettings",
    "OptimizerSettings",
    "OverrideSettings",
    "PrecisionSettings",
    "PrefetchSettings",
    "ReferenceWrapSettings",
    "ShardSettings",
    "ShardingSettings",
    "SizeWrapSettings",
]

AnyDtype: TypeAlias = "torch.dtype | str"
AnyNames: TypeAlias = "str | type | Sequence[str | type] | Sequence[str] | Set[str] | Set[type]"
AnyStrategy: TypeAlias = "ShardingStrategy | str"
AnyPrefetch: TypeAlias = "BackwardPrefetch | str"
AnyWrap: TypeAlias = "ConfigModel | Mapping[str, Any] | AnyNames | None"
Mode: TypeAlias = Literal["full", "every_n", "selective", "ops"]


class ShardSettings(TypedDict, total=False):
    """The settings of `ShardConfig`; `shard` and `plan` also take them as keywords."""

    engine: Literal["auto", "fsdp2", "fsdp1", "replicate"]
    sharding: ShardingConfig | Mapping[str, Any] | AnyStrategy
    wrap: AnyWrap
    precision: PrecisionConfig | Mapping[str, Any] | AnyDtype
    activation_checkpointing: ActivationCheckpointingConfig | Mapping[str, Any] | Mode | bool | None
    compile: CompileConfig | Mapping[str, Any] | bool | None
    optimizer: OptimizerConfig | Mapping[str, Any] | None
    cpu_offload: CpuOffloadConfig | Mapping[str, Any] | bool
    prefetch: PrefetchConfig | Mapping[str, Any] | AnyPrefetch
    init: InitConfig | Mapping[str, Any]


class ShardingSettings(TypedDict, total=False):
    """The settings of `ShardingConfig`."""

    strategy: AnyStrategy
    reshard_after_forward: bool | int | None
    shard_size: int | None
    use_orig_params: bool
    ignored_modules: AnyNames
    ignored_parameters: AnyNames
    forward_methods: AnyNames
    broadcast_buffers: bool
    limit_all_gathers: bool


class PrefetchSettings(TypedDict, total=False):
    """The settings of `PrefetchConfig`."""

    backward: AnyPrefetch
    forward: int


class PrecisionSettings(TypedDict, total=False):
    """The settings of `PrecisionConfig`."""

    preset: AnyDtype
    param_dtype: AnyDtype | None
    reduce_dtype: AnyDtype | None
    buffer_dtype: AnyDtype | None
    output_dtype: AnyDtype | None
    storage_dtype: AnyDtype | None
    cast_forward_inputs: bool
    cast_root_forward_inputs: bool | None
    keep_low_precision_grads: bool
    ignore_classes: AnyNames
    overrides: Sequence[PrecisionOverride | Mapping[str, Any]]


class OverrideSettings(TypedDict, total=False):
    """The settings of `PrecisionOverride`."""

    modules: Required[AnyNames]
    param_dtype: AnyDtype | None
    reduce_dtype: AnyDtype | None
    cast_forward_inputs: bool


class ActivationSettings(TypedDict, total=False):
    """The settings of `ActivationCheckpointingConfig`."""

    mode: Mode
    n: int
    modules: AnyWrap
    check_fn: str | None
    save_ops: AnyNames
    offload: bool
    preserve_rng_state: bool
    use_reentrant: bool
    early_stop: bool
    determinism_check: Literal["default", "none"]


class CompileSettings(TypedDict, total=False):
    """The settings of `CompileConfig`."""

    fullgraph: bool
    backend: str
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None
    dynamic: bool | None
    root: bool


class AdamWSettings(TypedDict, total=False):
    """The settings of `AdamWConfig`."""

    lr: float
    betas: tuple[float, float] | Sequence[float]
    eps: float
    weight_decay: float


class OptimizerSettings(TypedDict, total=False):
    """The settings of `OptimizerConfig`."""

    muon: str | Sequence[str] | None
    exclude: str | Sequence[str]
    fused: Mapping[str, int]
    stacked: str | Sequence[str]
    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_coefficients: tuple[float, float, float] | Sequence[float]
    eps: float
    ns_steps: int
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None
    bucket_mib: int
    adamw: AdamWConfig | Mapping[str, Any]


class SizeWrapSettings(TypedDict, total=False):
    """The settings of `SizeWrap`."""

    kind: Literal["size"]
    min_num_params: int
    exclude_classes: AnyNames | None
    force_leaf_classes: AnyNames | None


class ClassWrapSettings(TypedDict, total=False):
    """The settings of `ModuleClassWrap`."""

    kind: Literal["module_class"]
    classes: Required[AnyNames]


class NameWrapSettings(TypedDict, total=False):
    """The settings of `ModuleNameWrap`."""

    kind: Literal["module_name"]
    patterns: Required[str | Sequence[str]]


class ReferenceWrapSettings(TypedDict, total=False):
    """The settings of `ReferenceWrap`."""

    kind: Literal["reference", "lambda"]
    target: Required[str]
    kwargs: Mapping[str, Any]


class CombinedWrapSettings(TypedDict, total=False):
    """The settings of `AnyOf` and `AllOf`."""

    kind: Literal["any_of", "all_of"]
    policies: Required[Sequence[AnyWrap]]
