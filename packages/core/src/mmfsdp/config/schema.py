"""`ShardConfig`: all settings of how to shard a model, as plain data; torch is not imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, ValidationInfo, field_validator

from mmfsdp.config.activation import ActivationCheckpointing
from mmfsdp.config.base import ConfigModel, setting
from mmfsdp.config.compiling import Compile
from mmfsdp.config.fields import Accepted, Names, Reference, Strategy, as_mapping, is_word, one_of, read_strategy
from mmfsdp.config.optimizing import OptimizerConfig
from mmfsdp.config.parallel import Parallel
from mmfsdp.config.precision import Precision, PrecisionConfig
from mmfsdp.config.wrap import AutoWrap, Wrap

if TYPE_CHECKING:
    from mmfsdp.config.written import PrefetchSettings, ShardingSettings, ShardSettings

__all__ = ["CpuOffloadConfig", "InitConfig", "PrefetchConfig", "ShardConfig", "ShardingConfig"]

_Engine = Annotated[
    Literal["auto", "fsdp2", "fsdp1", "replicate"], BeforeValidator(one_of("auto", "fsdp2", "fsdp1", "replicate"))
]
_DEVICES = ("auto", "cpu", "cuda", "xpu", "npu", "hpu", "mps", "mtia", "mlu", "musa", "privateuseone")
_Device = Annotated[
    Literal["auto", "cpu", "cuda", "xpu", "npu", "hpu", "mps", "mtia", "mlu", "musa", "privateuseone"],
    BeforeValidator(one_of(*_DEVICES)),
]


def _backward_name(text: str) -> str:
    """Return ``'pre'`` for ``'BACKWARD_PRE'``, the name of torch's enum member."""
    return text.lower().rpartition(".")[2].removeprefix("backward_")


_read_backward = one_of("pre", "post", "none", spelling=_backward_name)
_Backward = Annotated[
    Literal["pre", "post", "none"], BeforeValidator(_read_backward), Accepted("BackwardPrefetch | str")
]


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _reshard(value: Any) -> Any:
    if value is None or isinstance(value, bool) or (isinstance(value, int) and value > 1):
        return value
    raise ValueError(f"expected true, false or a group size of at least 2, got {value!r}.")


class ShardingConfig(ConfigModel):
    """Section ``sharding``: how parameters are sharded over ranks."""

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[ShardingSettings]) -> None: ...

    strategy: Strategy = "FULL_SHARD"
    """``FULL_SHARD``: least memory. ``SHARD_GRAD_OP``: parameters stay gathered between forward and backward, one
    all-gather less. ``NO_SHARD``: every rank holds all, as DDP. ``HYBRID_SHARD``: sharded inside a group, replicated
    across groups. ``_HYBRID_SHARD_ZERO2``: the same with ``SHARD_GRAD_OP`` inside the group."""
    reshard_after_forward: Annotated[bool | int | None, BeforeValidator(_reshard)] = None
    """Overrides the strategy; an integer reshards to groups of that many ranks after forward."""
    shard_size: PositiveInt | None = None
    """Ranks per shard group of a hybrid strategy. Default: the ranks of one node."""
    use_orig_params: bool = True
    """``False`` keeps one flat parameter per unit, as FSDP1 did at first; only the ``fsdp1`` engine can."""
    ignored_modules: Names = ()
    """FQN patterns of modules that stay whole on every rank; their gradients are averaged over ranks."""
    ignored_parameters: Names = ()
    """FQN patterns of parameters that stay whole on every rank; their gradients are averaged over ranks."""
    forward_methods: Names = ()
    """Methods of shard units, besides ``forward``, that are called from outside and read weights themselves."""
    broadcast_buffers: bool = False
    """Give all ranks the first rank's buffers before each training forward, as DistributedDataParallel does: one
    broadcast. ``False``: each rank keeps what its own batches write, such as running statistics."""
    limit_all_gathers: bool = True
    """Accepted for compatibility with FSDP1: all-gathers are always limited."""


class CpuOffloadConfig(ConfigModel):
    """Section ``cpu_offload``: keep shards, gradients and optimizer states in CPU memory."""

    enabled: bool = False
    pin_memory: bool = True
    """Pin that memory where there is an accelerator: faster copies, not shared with other processes."""


class PrefetchConfig(ConfigModel):
    """Section ``prefetch``: when the next unit's parameters are gathered."""

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[PrefetchSettings]) -> None: ...

    backward: _Backward = "pre"
    """``pre``: before the current unit's gradients are computed (fastest, most memory); ``post``: after; ``none``."""
    forward: NonNegativeInt = 0
    """How many units ahead forward gathers explicitly; 0 leaves it to the order of kernels."""


class InitConfig(ConfigModel):
    """Section ``init``: how weights are initialised."""

    sync_states: bool = True
    """Broadcast parameters and buffers from rank 0: ranks with different weights silently train garbage."""
    seed: NonNegativeInt = 0
    """Seed of meta-device initialisation, the same on every rank and for every world size."""
    param_init_fn: Reference | None = None
    """Function ``(module) -> None`` that initialises a model on the meta device, called for every module."""
    device: _Device = "auto"
    """``auto``: the accelerator if there is one and the process group has a backend for it (gloo is not one), else the
    CPU. ``privateuseone`` is whatever device type an extension of torch has registered."""


class ShardConfig(ConfigModel):
    """A complete, frozen description of how to shard a model.

    Raises:
        ConfigError: A setting is unknown, misspelt or of the wrong type; the message names its path.

    Example:
        >>> ShardConfig(wrap={"kind": "module_class", "classes": "Block"}, precision="bf16").sharding.strategy
        'FULL_SHARD'
    """

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[ShardSettings]) -> None: ...

    engine: _Engine = "auto"
    """``auto`` takes ``fsdp2`` unless the strategy is ``NO_SHARD`` or a setting needs ``fsdp1``."""
    sharding: Annotated[
        ShardingConfig,
        as_mapping("strategy", read_strategy, is_word, expected="a strategy", schema=ShardingConfig | Strategy),
    ] = Field(default_factory=ShardingConfig)
    wrap: Wrap = Field(default_factory=AutoWrap)
    parallel: Parallel = None
    """How the axis ``tensor`` of the mesh divides modules: a style, or a `ParallelRule`, for each pattern of names; a
    later pattern wins. ``auto``: as a model of transformers says. ``null``: nothing is divided, or you divided it."""
    precision: Precision = Field(default_factory=PrecisionConfig)
    activation_checkpointing: ActivationCheckpointing = None
    compile: Compile = None
    """``true``, or the settings of `CompileConfig`: compile each shard unit below the root."""
    optimizer: OptimizerConfig | None = None
    """The optimizer that `build_optimizer` builds. ``null``: none; you build your own."""
    cpu_offload: Annotated[
        CpuOffloadConfig,
        as_mapping("enabled", bool, _is_bool, expected="true, false", schema=CpuOffloadConfig | bool),
    ] = Field(default_factory=CpuOffloadConfig)
    prefetch: Annotated[
        PrefetchConfig,
        as_mapping("backward", _read_backward, is_word, expected="a direction", schema=PrefetchConfig | _Backward),
    ] = Field(default_factory=PrefetchConfig)
    init: InitConfig = Field(default_factory=InitConfig)

    @field_validator("sharding")
    @classmethod
    def _replicated(cls, sharding: ShardingConfig, info: ValidationInfo) -> ShardingConfig:
        """Set the strategy of engine ``replicate``, unless the user set one, which may contradict the engine."""
        if info.data.get("engine") == "replicate" and "strategy" not in sharding.model_fields_set:
            return sharding.model_copy(update={"strategy": "NO_SHARD"})
        return sharding

    def check_together(self) -> None:
        """Raise for settings that contradict each other.

        Raises:
            ValueError: They do; validation turns it into a `ConfigError`.
        """
        hybrid = "HYBRID" in self.sharding.strategy
        if self.sharding.shard_size is not None and not hybrid:
            raise ValueError(
                f"sharding.shard_size={self.sharding.shard_size} needs a hybrid strategy, not "
                f"{self.sharding.strategy!r}. Set {setting('sharding.strategy')} to 'HYBRID_SHARD', or remove "
                "shard_size."
            )
        if hybrid and self.sharding.shard_size == 1:
            raise ValueError(
                "sharding.shard_size=1 shards nothing, and FSDP1 would not even average gradients. "
                "Use strategy 'NO_SHARD' to replicate."
            )
        fsdp1_only = [
            name
            for name, needed in (
                (f"{setting('sharding.use_orig_params')}=False", not self.sharding.use_orig_params),
                ("precision.keep_low_precision_grads=True", self.precision.keep_low_precision_grads),
            )
            if needed
        ]
        if fsdp1_only and self.engine in {"fsdp2", "replicate"}:
            raise ValueError(f"{' and '.join(fsdp1_only)} needs engine 'fsdp1', not {self.engine!r}.")
        if self.compile is not None:
            self._check_compiled()
        if self.optimizer is not None and (fsdp1_only or self.engine == "fsdp1"):
            raise ValueError(
                "optimizer needs parameters of their own shapes, which engine 'fsdp1' does not keep. Set engine to "
                f"'fsdp2'{' and remove ' + ' and '.join(fsdp1_only) if fsdp1_only else ''}, or leave optimizer out."
            )
        if self.engine == "replicate" and self.sharding.strategy != "NO_SHARD":
            raise ValueError(
                f"engine 'replicate' holds everything on every rank; {setting('sharding.strategy')} "
                f"{self.sharding.strategy!r} contradicts it. Set strategy 'NO_SHARD', or engine 'fsdp2'."
            )

    def _check_compiled(self) -> None:
        if not self.sharding.use_orig_params:
            raise ValueError(
                f"torch compiles nothing that has flat parameters ({setting('sharding.use_orig_params')}=False). Set "
                "use_orig_params to True, or remove compile."
            )
        recomputing = self.activation_checkpointing
        if recomputing is not None and (recomputing.offload or recomputing.use_reentrant):
            what = "offload" if recomputing.offload else "use_reentrant=True"
            raise ValueError(
                f"activation_checkpointing.{what} does not work in compiled units. Set it to False, or remove compile."
            )
