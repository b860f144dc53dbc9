"""Finds one process group that spans a mesh."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mmfsdp.collective.scopes import World, count_groups_alike

__all__ = ["group_of"]

_made: dict[tuple[int, ...], tuple[World, dist.ProcessGroup]] = {}


def group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
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
