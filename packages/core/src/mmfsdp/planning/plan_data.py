"""The content of a plan for a model, and the bytes that follow from it. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import SerializerFunctionWrapHandler, model_serializer

from mmfsdp.basics.dtypes import itemsize
from mmfsdp.planning.division.records import ModuleDivision
from mmfsdp.planning.optimizer_groups import OptimizerPlan
from mmfsdp.planning.plan_records import (
    ActivationPlan,
    BufferEntry,
    CompilePlan,
    MeshSpec,
    Note,
    ParamEntry,
    Record,
    ShardUnit,
)

__all__ = ["PlanData"]


class PlanData(Record):
    """The fields of a `mmfsdp.ShardPlan`."""

    schema_version: Literal[1] = 1
    engine: Literal["fsdp2", "fsdp1", "replicate"]
    engine_reason: str
    strategy: str
    mesh: MeshSpec
    fingerprint: str
    """Hash of names, shapes, dtypes and ``requires_grad`` of all parameters and buffers, and of module classes."""
    units: tuple[ShardUnit, ...]
    """In the order of application: children before parents, the root last."""
    parallel: tuple[ModuleDivision, ...] = ()
    """How rules divide modules along the axis ``tensor``; empty if nothing is divided, or the user has divided it."""
    ignored_params: tuple[ParamEntry, ...] = ()
    """Held whole on every rank; gradients are averaged over ranks."""
    buffers: tuple[BufferEntry, ...] = ()
    broadcast_buffers: bool = False
    """Whether all ranks get the first rank's buffers before each training forward."""
    buffer_dtype: str | None = None
    storage_dtype: str | None = None
    use_orig_params: bool = True
    keep_low_precision_grads: bool = False
    activation_checkpointing: ActivationPlan | None = None
    compile: CompilePlan | None = None
    compiled_already: tuple[str, ...] = ()
    """FQNs of units that were compiled before the plan was made, which keep what they were compiled with."""
    optimizer: OptimizerPlan | None = None
    cpu_offload: bool = False
    pin_memory: bool = True
    backward_prefetch: Literal["pre", "post", "none"] = "pre"
    forward_prefetch: int = 0
    sync_states: bool = True
    seed: int = 0
    device: str = "auto"
    """Device type that the ranks compute on; ``'auto'`` until the plan is applied."""
    param_init_fn: str | None = None
    notes: tuple[Note, ...] = ()

    @model_serializer(mode="wrap")
    def _serialise(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what plans without rules do not have, as earlier versions of the format did."""
        found: dict[str, Any] = handler(self)
        return found if self.parallel else {name: value for name, value in found.items() if name != "parallel"}

    @property
    def root(self) -> ShardUnit:
        """The unit of the whole model."""
        return self.units[-1]

    @property
    def needs_grad_scaler(self) -> bool:
        """Whether any unit computes in float16, where small gradients become zero unless the loss is scaled."""
        return any(unit.precision.param_dtype == "float16" for unit in self.units)

    @property
    def param_numel(self) -> int:
        """Elements of all parameters; tied ones count once."""
        return sum(param.numel for param in self.all_params())

    def all_params(self) -> Iterator[ParamEntry]:
        """Yield every parameter once, including ignored ones."""
        for unit in self.units:
            yield from unit.params
        yield from self.ignored_params

    def params_in_order(self) -> list[ParamEntry]:
        """Return every parameter once, in the order of ``named_parameters()`` of the unsharded model."""
        return sorted(self.all_params(), key=lambda param: param.place)

    def param_bytes(self, rank: int = 0) -> int:
        """Return the bytes of parameters that ``rank`` holds between steps.

        Raises:
            MeshError: The mesh has no such rank.
        """
        ignored = sum(param.shard_nbytes(self.mesh, rank, gathered=True) for param in self.ignored_params)
        return ignored + sum(self.unit_param_bytes(unit, rank) for unit in self.units)

    def unit_param_bytes(self, unit: ShardUnit, rank: int = 0) -> int:
        """Return the bytes of one unit's parameters that ``rank`` holds between steps."""
        if self.engine == "fsdp1":
            return flat_shard_bytes(
                unit.params,
                self.mesh,
                aligned=self.use_orig_params,
                compute_dtype=unit.precision.param_dtype if self.use_orig_params else None,
            )
        return sum(param.shard_nbytes(self.mesh, rank) for param in unit.params)


def flat_shard_bytes(
    params: tuple[ParamEntry, ...], mesh: MeshSpec, *, aligned: bool, compute_dtype: str | None = None
) -> int:
    """Return the bytes of one rank's piece of an FSDP1 flat parameter, with padding; equal on all ranks.

    Rule (torch/distributed/fsdp/_flat_param.py): with original parameters exposed, each parameter starts at a
    multiple of 16 bytes and the total is padded to a multiple of the ranks; either way a rank holds
    ``ceil(total / ranks)`` elements, or all of them where nothing is sharded.

    Args:
        params: Parameters of one dtype, in the order in which modules register them.
        mesh: Ranks that shard and replicate.
        aligned: Whether original parameters are exposed (``use_orig_params=True``).
        compute_dtype: Dtype that parameters are gathered in; the 16 bytes are counted in it. Default: their own.
    """
    if not params:
        return 0
    size = itemsize(params[0].dtype)
    alignment = max(16 // itemsize(compute_dtype or params[0].dtype), 1) if aligned else 1
    total = 0
    for param in params:
        total += -total % alignment + param.numel
    if mesh.shard_ranks == 1 and aligned:
        total += -total % mesh.replicate
    return -(-total // mesh.shard_ranks) * size
