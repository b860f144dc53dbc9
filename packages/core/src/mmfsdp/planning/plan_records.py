"""The records that a plan consists of: mesh, parameters, buffers, units and notes."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

from mmfsdp.basics.boxes import Bounds, rows_per_rank, sharded_box
from mmfsdp.basics.dtypes import itemsize
from mmfsdp.errors import MeshError

__all__ = [
    "AXES",
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


AXES = ("replicate", "shard", "context", "tensor")
"""The axes that a mesh is the product of, in their order: the last one has neighbouring ranks."""

_MODEL = ("context", "tensor", "expert")
"""Axes and divisions that earlier versions of the plan did not have: left out of JSON unless they are used."""


class MeshSpec(Record):
    """The sizes of a mesh's named axes. Ranks are numbered in row-major order of `AXES`.

    The ranks of ``replicate`` and ``shard`` get different batches. Those of ``context`` share a batch, each with its
    part of the sequences, and shard parameters as ``shard`` does. Those of ``tensor`` share one, and hold different
    parts of the tensors that tensor parallelism divides.

    ``expert`` divides the same ranks in another way: experts are divided over groups of so many neighbouring ranks of
    ``shard``, ``context`` and ``tensor``, and sharded over what is left of these.
    """

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @model_serializer(mode="wrap")
    def _serialise(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what models without model parallelism do not have, as earlier versions of the format did."""
        found: dict[str, Any] = handler(self)
        return {axis: size for axis, size in found.items() if axis not in _MODEL or size > 1}

    @property
    def world_size(self) -> int:
        """Number of ranks in the mesh."""
        return self.data_size * self.tensor

    @property
    def data_size(self) -> int:
        """Number of ranks over which gradients are averaged: those that see different tokens."""
        return self.replicate * self.shard_ranks

    @property
    def shard_ranks(self) -> int:
        """Number of ranks that shard what ``expert`` does not divide: shard x context."""
        return self.shard * self.context

    @property
    def axes(self) -> dict[str, int]:
        """The size of each axis, in their order."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def dimensions(self) -> dict[str, int]:
        """The axes that a DeviceMesh of these ranks has: those of more than one rank, and ``shard``."""
        return {axis: size for axis, size in self.axes.items() if size > 1 or axis == "shard"}

    @property
    def is_simple(self) -> bool:
        """Whether nothing but batches is divided: there are no axes beside ``replicate`` and ``shard``."""
        return self.context == self.tensor == self.expert == 1

    def sizes(self, divided: tuple[tuple[str, int], ...] = ()) -> dict[str, int]:
        """Return the axes of the ranks as a parameter sees them; ``shard`` is all that shards it.

        Args:
            divided: `ParamEntry.divided` of the parameter.
        """
        if "expert" in dict(divided):
            rest = self.shard_ranks * self.tensor // self.expert
            return {"replicate": self.replicate, "shard": rest, "expert": self.expert}
        return {"replicate": self.replicate, "shard": self.shard_ranks, "tensor": self.tensor}

    def coordinates(self, rank: int, divided: tuple[tuple[str, int], ...] = ()) -> dict[str, int]:
        """Return the index of a rank along each of the axes that `sizes` returns.

        Raises:
            MeshError: There is no such rank.
        """
        self._check_rank(rank)
        found = {}
        for axis, size in reversed(self.sizes(divided).items()):
            rank, found[axis] = divmod(rank, size)
        return found

    def shard_coordinate(self, rank: int) -> int:
        """Return the index of ``rank`` within its shard group.

        Raises:
            MeshError: There is no such rank.
        """
        self._check_rank(rank)
        return rank // self.tensor % self.shard_ranks

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise MeshError(f"Rank {rank} is not in {self}.")

    def __str__(self) -> str:
        if not self.is_simple:
            used = self.dimensions
            data = " x ".join(axis for axis in used if axis not in ("context", "tensor"))
            experts = f"; experts over {self.expert}" if self.expert > 1 else ""
            return f"{' x '.join(map(str, used.values()))} ranks ({' x '.join(used)}; batches over {data}{experts})"
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
    divided: tuple[tuple[str, int], ...] = ()
    """The axes that divide it before ``shard`` divides its dimension 0, each with the dimension, in their order."""

    @model_serializer(mode="wrap")
    def _serialise(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what models without tensor parallelism do not have, as earlier versions of the format did."""
        found: dict[str, Any] = handler(self)
        return found if self.divided else {name: value for name, value in found.items() if name != "divided"}

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameter."""
        return self.numel * itemsize(self.dtype)

    def box(self, mesh: MeshSpec, rank: int, *, gathered: bool = False) -> Bounds:
        """Return the box that a rank holds: see `mmfsdp.basics.boxes.sharded_box`.

        Args:
            mesh: The ranks.
            rank: One of them.
            gathered: The box while the shards are gathered, which ``shard`` does not divide.

        Raises:
            MeshError: There is no such rank.
        """
        at, sizes = mesh.coordinates(rank, self.divided), mesh.sizes(self.divided)
        steps = [*self.divided, *([("shard", 0)] if self.shape and not gathered else [])]
        axes, dims = [axis for axis, _ in steps], [dim for _, dim in steps]
        # An ignored parameter may be divided along axes of another mesh, whose sizes are not known here.
        return sharded_box(self.shape, [sizes.get(axis, 1) for axis in axes], dims, [at.get(axis, 0) for axis in axes])

    def shard_numel(self, mesh: MeshSpec, rank: int, *, gathered: bool = False) -> int:
        """Return the elements that a rank holds: see `box`."""
        if not self.divided:  # most are not, and plans of many ranks ask often
            if gathered or not self.shape:
                return self.numel
            rows = rows_per_rank(self.shape[0], mesh.shard_ranks)
            held = min(max(self.shape[0] - rows * mesh.shard_coordinate(rank), 0), rows)
            return math.prod(self.shape[1:], start=held)
        return math.prod(self.box(mesh, rank, gathered=gathered)[1])

    def shard_nbytes(self, mesh: MeshSpec, rank: int, *, gathered: bool = False) -> int:
        """Return the bytes that a rank holds: see `box`."""
        return self.shard_numel(mesh, rank, gathered=gathered) * itemsize(self.dtype)


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

    @property
    def has_experts(self) -> bool:
        """Whether the axis ``expert`` divides its parameters, which are then sharded over other ranks than the rest."""
        return any("expert" in dict(param.divided) for param in self.params)

    def shard_ranks(self, mesh: MeshSpec) -> int:
        """Return the number of ranks of a mesh that shard its parameters together."""
        return mesh.sizes(self.params[0].divided if self.has_experts else ())["shard"]


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
