"""The records that a plan consists of: mesh, parameters, buffers, units and notes."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict

from mmfsdp.basics.boxes import sharded_box
from mmfsdp.basics.dtypes import itemsize
from mmfsdp.errors import MeshError

__all__ = [
    "ActivationPlan",
    "BufferEntry",
    "CompilePlan",
    "MeshSpec",
    "Note",
    "ParamEntry",
    "Record",
    "ShardUnit",
    "UnitPrecision",
]


class Record(BaseModel):
    """A frozen record that accepts only its own fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class MeshSpec(Record):
    """The shape of a mesh: ``replicate`` groups of ``shard`` ranks each. Rank ``r`` is at (r // shard, r % shard)."""

    replicate: int = 1
    shard: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks in the mesh."""
        return self.replicate * self.shard

    def shard_coordinate(self, rank: int) -> int:
        """Return the index of ``rank`` within its shard group.

        Raises:
            MeshError: There is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise MeshError(f"Rank {rank} is not in {self}.")
        return rank % self.shard

    def __str__(self) -> str:
        if self.replicate == 1:
            return f"{self.shard} rank{'s' if self.shard != 1 else ''}"
        return f"{self.replicate} x {self.shard} ranks (replicate x shard)"


class ParamEntry(Record):
    """One parameter of a plan."""

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = True
    aliases: tuple[str, ...] = ()
    """Other FQNs of the same parameter, if it is tied."""
    place: int = 0
    """Position in ``named_parameters()`` of the unsharded model."""

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameter."""
        return self.numel * itemsize(self.dtype)

    def shard_nbytes(self, coordinate: int, shard: int) -> int:
        """Return the bytes that one rank holds when dimension 0 is sharded: see `mmfsdp.basics.boxes.sharded_box`.

        Args:
            coordinate: Index of the rank within its shard group.
            shard: Ranks in the shard group.
        """
        if not self.shape:
            return self.nbytes
        _, sizes = sharded_box(self.shape, [shard], [0], [coordinate])
        return math.prod(sizes) * itemsize(self.dtype)


class BufferEntry(Record):
    """One buffer of a plan; it is held whole on every rank."""

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    persistent: bool = True


class UnitPrecision(Record):
    """Dtypes of one shard unit; ``None`` keeps the parameters' own."""

    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    cast_forward_inputs: bool = True
    full_precision: bool = False
    """Compute in float32: inputs are cast to it, and outputs back to the dtype of the inputs."""

    def __str__(self) -> str:
        if self.full_precision:
            return "full"
        if self.param_dtype is None and self.reduce_dtype is None:
            return "-"
        return f"{self.param_dtype or 'own'}/{self.reduce_dtype or 'own'}"


class ShardUnit(Record):
    """Modules whose parameters are gathered, used and reduced together."""

    fqns: tuple[str, ...]
    """FQNs of the unit's modules; several if they share parameters. ``''`` is the root."""
    class_name: str
    matched_by: str
    """Reason for the unit."""
    params: tuple[ParamEntry, ...]
    """Parameters that the unit manages: those below its modules that no unit below it manages."""
    reshard_after_forward: bool | int
    precision: UnitPrecision = UnitPrecision()
    forward_methods: tuple[str, ...] = ()

    @property
    def fqn(self) -> str:
        """The first of `fqns`."""
        return self.fqns[0]

    @property
    def is_root(self) -> bool:
        """Whether this is the whole model's own unit."""
        return "" in self.fqns

    @property
    def numel(self) -> int:
        """Elements of all parameters of the unit, unsharded."""
        return sum(param.numel for param in self.params)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters of the unit, unsharded, in their stored dtype."""
        return sum(param.nbytes for param in self.params)


class ActivationPlan(Record):
    """The modules that recompute their forward in backward; other fields repeat the configuration."""

    fqns: tuple[str, ...]
    mode: Literal["full", "ops"] = "full"
    save_ops: tuple[str, ...] = ()
    offload: bool = False
    preserve_rng_state: bool = True
    use_reentrant: bool = False
    early_stop: bool = True
    determinism_check: Literal["default", "none"] = "default"


class CompilePlan(Record):
    """The shard units that are compiled in place; other fields are arguments of ``module.compile()``."""

    fqns: tuple[str, ...]
    backend: str = "inductor"
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool | None = None


class Note(Record):
    """A decision of the plan that the configuration does not state, or another remark for its reader."""

    kind: Literal[
        "engine",
        "compile",
        "buffers",
        "container",
        "tied",
        "scalar",
        "empty",
        "dtype",
        "precision",
        "ignored",
        "prefetch",
        "frozen",
        "device",
        "wrap",
        "torch",
        "other",
    ]
    text: str
    fqns: tuple[str, ...] = ()
