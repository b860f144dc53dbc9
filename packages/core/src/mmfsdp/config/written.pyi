# Written by `python tools/settings_types.py`.
from collections.abc import Mapping, Sequence, Set
from typing import Any, Literal, Required, TypeAlias, TypedDict

import torch
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy

from mmfsdp.config import (
    ActivationCheckpointingConfig,
    AdamWConfig,
    CompileConfig,
    CpuOffloadConfig,
    InitConfig,
    OptimizerConfig,
    ParallelRule,
    PrecisionConfig,
    PrecisionOverride,
    PrefetchConfig,
    ShardingConfig,
)
from mmfsdp.config.base import ConfigModel

AnyNames: TypeAlias = str | type | Sequence[str | type] | Sequence[str] | Set[str] | Set[type]
AnyWrap: TypeAlias = ConfigModel | Mapping[str, Any] | AnyNames | None

class ActivationCheckpointingSettings(TypedDict, total=False):
    mode: Literal["full", "every_n", "selective", "ops"]
    n: int
    modules: AnyWrap | None
    check_fn: str | None
    save_ops: AnyNames
    offload: bool
    preserve_rng_state: bool
    use_reentrant: bool
    early_stop: bool
    determinism_check: Literal["default", "none"]

class AdamWSettings(TypedDict, total=False):
    lr: float
    betas: Sequence[float]
    eps: float
    weight_decay: float

class AllOfSettings(TypedDict, total=False):
    kind: Literal["all_of"]
    policies: Required[Sequence[AnyWrap]]

class AnyOfSettings(TypedDict, total=False):
    kind: Literal["any_of"]
    policies: Required[Sequence[AnyWrap]]

class ModuleClassWrapSettings(TypedDict, total=False):
    kind: Literal["module_class"]
    classes: Required[AnyNames]

class ModuleNameWrapSettings(TypedDict, total=False):
    kind: Literal["module_name"]
    patterns: Required[str | Sequence[str]]

class OptimizerSettings(TypedDict, total=False):
    muon: str | Sequence[str] | None
    exclude: str | Sequence[str]
    fused: Mapping[str, int]
    stacked: str | Sequence[str]
    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_coefficients: Sequence[float]
    eps: float
    ns_steps: int
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None
    bucket_mib: int
    adamw: AdamWConfig | Mapping[str, Any]

class ParallelRuleSettings(TypedDict, total=False):
    style: Required[Literal["colwise", "rowwise", "sequence", "replicate", "experts"]]
    input: Literal["replicate", "sequence", "heads", "features"] | None
    output: Literal["replicate", "sequence", "heads", "features"] | None
    head_by_head: bool

class PrecisionSettings(TypedDict, total=False):
    preset: torch.dtype | str
    param_dtype: torch.dtype | str | None
    reduce_dtype: torch.dtype | str | None
    buffer_dtype: torch.dtype | str | None
    output_dtype: torch.dtype | str | None
    storage_dtype: torch.dtype | str | None
    cast_forward_inputs: bool
    cast_root_forward_inputs: bool | None
    keep_low_precision_grads: bool
    ignore_classes: AnyNames
    overrides: Sequence[PrecisionOverride | Mapping[str, Any]]

class PrecisionOverrideSettings(TypedDict, total=False):
    modules: Required[AnyNames]
    param_dtype: torch.dtype | str | None
    reduce_dtype: torch.dtype | str | None
    cast_forward_inputs: bool

class PrefetchSettings(TypedDict, total=False):
    backward: BackwardPrefetch | str
    forward: int

class ReferenceWrapSettings(TypedDict, total=False):
    kind: Literal["reference", "lambda"]
    target: Required[str]
    kwargs: Mapping[str, Any]

class ShardSettings(TypedDict, total=False):
    engine: Literal["auto", "fsdp2", "fsdp1", "replicate"]
    sharding: ShardingConfig | Mapping[str, Any] | ShardingStrategy | str
    wrap: AnyWrap
    parallel: Mapping[str, ParallelRule | Mapping[str, Any] | str] | Literal["auto"] | None
    precision: PrecisionConfig | Mapping[str, Any] | torch.dtype | str
    activation_checkpointing: (
        ActivationCheckpointingConfig | Mapping[str, Any] | Literal["full", "every_n", "selective", "ops"] | bool | None
    )
    compile: CompileConfig | Mapping[str, Any] | bool | None
    optimizer: OptimizerConfig | Mapping[str, Any] | None
    cpu_offload: CpuOffloadConfig | Mapping[str, Any] | bool
    prefetch: PrefetchConfig | Mapping[str, Any] | BackwardPrefetch | str
    init: InitConfig | Mapping[str, Any]

class ShardingSettings(TypedDict, total=False):
    strategy: ShardingStrategy | str
    reshard_after_forward: bool | int | None
    shard_size: int | None
    use_orig_params: bool
    ignored_modules: AnyNames
    ignored_parameters: AnyNames
    forward_methods: AnyNames
    broadcast_buffers: bool
    limit_all_gathers: bool

class SizeWrapSettings(TypedDict, total=False):
    kind: Literal["size"]
    min_num_params: int
    exclude_classes: AnyNames | None
    force_leaf_classes: AnyNames | None
