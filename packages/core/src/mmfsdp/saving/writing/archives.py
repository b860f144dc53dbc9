"""Writes files as ``torch.save`` does, a rank's part or a whole checkpoint, and takes their checksums on the way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mmfsdp.checkpoint.manifest import FileEntry
from mmfsdp.checkpoint.tree import map_leaves
from mmfsdp.errors import StateDictError
from mmfsdp.runtime.dtensors import box_of, placements_of
from mmfsdp.saving.directory.errors import as_checkpoint_error
from mmfsdp.saving.writing.embedded_sums import embed_sums
from mmfsdp.saving.writing.publishing import DirectorySave, Files
from mmfsdp.saving.writing.replica_shares import share_of
from mmfsdp.saving.writing.skeletons import skeleton_of, stored_bytes
from mmfsdp.saving.writing.summed_files import summed_file

__all__ = ["write_archive", "write_own_part", "write_rank_file", "write_whole"]


def write_archive(content: Mapping[str, Any], path: Path, *, direct: bool = False) -> FileEntry:
    """Save as ``torch.save`` does, wait until all data is on disk, and return the checksums. Not collective.

    Args:
        content: What to save.
        path: The file.
        direct: Write past the page cache, where that helps.
    """
    found = skeleton_of(dict(content))
    if found is None:
        with summed_file(path, direct=direct) as file:
            torch.save(dict(content), file)  # type: ignore[arg-type]
        return file.entry()
    skeleton, storages = found
    with summed_file(path, direct=direct, size=skeleton.size) as file:
        skeleton.write(file.write, lambda number: file.append(stored_bytes(storages[number])))
    return file.entry()


def write_whole(content: Mapping[str, Any], path: Path) -> None:
    """Save as ``torch.save`` does, and store checksums of blocks in the file. Not collective; the caller syncs it."""
    embed_sums(path, write_archive(content, path))


def write_rank_file(
    save: DirectorySave, content: Mapping[str, Any], mesh: DeviceMesh, *, direct: bool = False
) -> Files:
    """Write this rank's file of a ``local`` checkpoint: its part of each tensor, and which box of the whole that is.

    If several ranks hold the same box, one of them writes it. Not collective.

    Args:
        save: The save that the file belongs to.
        content: Nested dicts and lists, with DTensors where tensors are sharded.
        mesh: The ranks that save.
        direct: See `write_archive`.
    """
    path = save.temporary / f"rank{save.rank}.pth"
    with as_checkpoint_error(save.target / path.name):
        return {path.name: write_archive(_localised(content, save, mesh), path, direct=direct)}


def write_own_part(path: Path, content: Mapping[str, Any], mesh: DeviceMesh, save_id: str, rank: int) -> FileEntry:
    """Write all that a rank holds, also what other ranks hold as well; return the checksums. Not collective.

    Args:
        path: The file.
        content: Nested dicts and lists, with DTensors of the mesh where tensors are sharded.
        mesh: The ranks that save.
        save_id: Identifies the save.
        rank: This rank's place.

    Raises:
        StateDictError: A tensor lies on other ranks than the mesh.
    """
    save = DirectorySave(path, path, save_id, rank, mesh.size(), overwrite=True)
    return write_archive(_localised(content, save, mesh, own_all=True), path, direct=True)


def _localised(
    content: Mapping[str, Any], save: DirectorySave, mesh: DeviceMesh, *, own_all: bool = False
) -> dict[str, Any]:
    boxes: dict[str, dict[str, Any]] = {}
    written: dict[int, dict[int, int]] = {}  # by number of replicas: the bytes that each replica writes

    def localise(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        is_own = own_all or save.rank == 0  # tensors that are not sharded are read from the first rank's file
        local = leaf
        if isinstance(leaf, DTensor):
            box: dict[str, Any] = {"shape": list(leaf.shape), "offsets": list(box_of(leaf).offsets)}
            local, is_own = leaf.to_local(), True
            if leaf.device_mesh == mesh:
                replica, mine = share_of(leaf, written)
                box |= {"placements": placements_of(leaf), "replica": replica}
                is_own = own_all or replica == mine
            elif own_all:
                raise StateDictError(
                    f"{path!r} lies on another mesh than the model: {leaf.device_mesh}. Checkpoints on the disks of "
                    "nodes need one mesh for all tensors; leave fast_directory out."
                )
            boxes[path] = box
        if not is_own and local.dim():
            return local.new_empty((0, *local.shape[1:]), device="cpu")
        local = local.detach().cpu()
        # A shard is a view into padded memory; torch.save would write all of it.
        if local.untyped_storage().nbytes() != local.numel() * local.element_size():
            local = local.clone()
        return local

    tree = map_leaves(dict(content), localise)
    header = {
        "format": "rank_local",
        "version": 1,
        "world_size": save.world_size,
        "rank": save.rank,
        "save_id": save.save_id,
        "mesh": list(mesh.shape),
        "tensors": boxes,
    }
    return {**tree, "mmfsdp": header}
