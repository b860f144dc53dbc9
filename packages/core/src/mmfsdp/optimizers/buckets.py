"""Groups the parameters of a matrix optimizer into buckets, each with its owners and its two messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mmfsdp.collective.scopes import World, count_groups_alike, rank_in, scope_of
from mmfsdp.collective.steps import check_same_arguments
from mmfsdp.errors import PlanError
from mmfsdp.optimizers.functions import MatrixFunction
from mmfsdp.optimizers.matrices import Matrix, assign_owners, matrices_of
from mmfsdp.optimizers.routes import Route, route_of
from mmfsdp.optimizers.shards import TensorDivision, division_of
from mmfsdp.planning.matrix_steps import divide_into_buckets
from mmfsdp.runtime.refusals.guards import are_watching

__all__ = ["Bucket", "Member", "buckets_of"]

_made: dict[tuple[int, ...], tuple[World, dist.ProcessGroup]] = {}


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter that a matrix optimizer updates."""

    name: str
    param: torch.Tensor
    settings: Mapping[str, Any]
    """Its param group."""
    mesh: DeviceMesh | None
    """The ranks that train it; None if only this one does."""
    division: TensorDivision
    matrices: tuple[Matrix, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters whose matrices travel together."""

    members: list[tuple[Member, range]]
    """The parameters, each with the indices of its matrices."""
    matrices: list[tuple[Member, Matrix]]
    owners: list[int]
    """The rank that owns each matrix, in the row-major order of the mesh."""
    rank: int
    """This rank in that order."""
    route: Route
    group: dist.ProcessGroup | None
    dtype: torch.dtype
    """Dtype of its messages."""
    device: torch.device
    """Where its messages and whole matrices are."""


def buckets_of(
    groups: Sequence[Mapping[str, Any]],
    names: Mapping[int, str],
    function: MatrixFunction,
    mesh: DeviceMesh | None,
    most_bytes: int,
) -> list[Bucket]:
    """Return the buckets of all parameters of some param groups. Collective: every rank of their meshes.

    Args:
        groups: Param groups. ``parts`` and ``is_stack`` say how a parameter consists of matrices.
        names: The names of parameters by ``id()``.
        function: What is done with each matrix.
        mesh: The ranks that plain parameters are on, which each holds whole.
        most_bytes: Bytes of a bucket's matrices in its messages; a larger parameter is a bucket of its own.

    Raises:
        RankMismatchError: The ranks have different parameters or settings.
        ShardStateError: A parameter is not divided by rows.
        PlanError: A parameter does not consist of matrices.
    """
    found: dict[Any, list[Member]] = {}
    for settings in groups:
        for param in settings["params"]:
            member = _member(param, settings, names.get(id(param), "a parameter"), mesh)
            dtype = function.dtype or param.dtype
            found.setdefault((member.mesh, dtype, _device(member)), []).append(member)
    return [
        bucket
        for (own_mesh, dtype, device), members in found.items()
        for bucket in _on_mesh(members, function, own_mesh, dtype, device, most_bytes)
    ]


def _member(param: torch.Tensor, settings: Mapping[str, Any], name: str, mesh: DeviceMesh | None) -> Member:
    own_mesh = param.device_mesh if isinstance(param, DTensor) else mesh
    division = division_of(param, mesh, name)
    try:
        matrices = matrices_of(param.shape, parts=settings["parts"], is_stack=settings["is_stack"])
    except PlanError as error:
        raise PlanError(f"{name!r}: {error.message} Give it to another optimizer.", fqn=name) from error
    return Member(name, param, settings, own_mesh, division, tuple(matrices))


def _device(member: Member) -> torch.device:
    """Return where matrices are whole: parameters that are offloaded to the CPU travel on the device."""
    if member.mesh is None or member.mesh.device_type == "cpu":
        return member.param.device
    return torch.device(member.mesh.device_type, torch.get_device_module(member.mesh.device_type).current_device())


def _on_mesh(
    members: list[Member],
    function: MatrixFunction,
    mesh: DeviceMesh | None,
    dtype: torch.dtype,
    device: torch.device,
    most_bytes: int,
) -> list[Bucket]:
    ranks, rank, group = 1, 0, None
    if mesh is not None and mesh.size() > 1:
        if are_watching():
            said = [(m.name, *m.division.shape, m.settings["parts"], m.settings["is_stack"]) for m in members]
            check_same_arguments(scope_of(mesh), "an optimizer's step()", {"params": said})
        ranks, rank, group = mesh.size(), rank_in(mesh), _group_of(mesh)
    loads = [0.0] * ranks
    buckets = []
    for indices in divide_into_buckets([m.param.numel() * dtype.itemsize for m in members], most_bytes, ranks):
        matrices: list[tuple[Member, Matrix]] = []
        chosen: list[tuple[Member, range]] = []
        for member in (members[index] for index in indices):
            chosen.append((member, range(len(matrices), len(matrices) + len(member.matrices))))
            matrices += [(member, matrix) for matrix in member.matrices]
        costs = [function.flops(matrix.rows, matrix.columns, member.settings) for member, matrix in matrices]
        owners = assign_owners(costs, ranks, loads)
        for owner, cost in zip(owners, costs, strict=True):
            loads[owner] += cost
        divisions = [member.division for member, _ in matrices]
        route = route_of([matrix for _, matrix in matrices], owners, divisions, rank, ranks)
        buckets.append(Bucket(chosen, matrices, owners, rank, route, group, dtype, device))
    return buckets


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return a process group of all ranks of a mesh, in its row-major order. Collective: every rank of the mesh.

    A mesh of several dimensions has a group per dimension. The first call for such a mesh makes one of all its ranks.
    """
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = tuple(int(rank) for rank in mesh.mesh.flatten())
    world = dist.group.WORLD
    assert world is not None  # there is a mesh
    if [*ranks] == dist.get_process_group_ranks(world):
        return world
    known = _made.get(ranks)
    if known is None or not known[0].is_current():
        count_groups_alike(mesh.get_all_groups())
        made = dist.new_group([*ranks], use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)  # this rank is in it
        _made[ranks] = known = World(), made
    return known[1]
