"""Writes one file from copies of shards that the first rank gathers, over a group that training does not use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from mmfsdp.basics.boxes import Bounds, sharded_box
from mmfsdp.checkpoint.integrity import crc32_combine
from mmfsdp.checkpoint.tree import leaves, map_leaves
from mmfsdp.collective.broadcasting import as_bytes
from mmfsdp.collective.channels import naming_lost_ranks
from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import broadcast_object, on_all_ranks
from mmfsdp.runtime.dtensors import placements_of
from mmfsdp.saving.writing.archives import write_whole
from mmfsdp.saving.writing.embedded_sums import embed_sums
from mmfsdp.saving.writing.skeletons import bytes_of, skeleton_of, stored_bytes
from mmfsdp.saving.writing.summed_files import summed_file
from mmfsdp.state.model import whole as gather

__all__ = ["WriteFile", "with_boxes", "write_gathered"]

WriteFile = Callable[[Path], None]
"""Writes a file to a path."""


def with_boxes(content: Mapping[str, Any], *, rows_only: bool, is_first: bool) -> dict[str, Any]:
    """Return content in which each shard is a box of its tensor. Collective: every rank of the tensors' meshes.

    Other tensors, such as those of tensor parallelism, are gathered at once over their own mesh.

    Args:
        content: Nested dicts and lists, with DTensors where tensors are sharded. Not changed.
        rows_only: Only boxes of whole rows count.
        is_first: Whether this is the first rank, which keeps what is gathered; others get a tensor without memory.
    """

    def gathered(_: str, leaf: Any) -> Any:
        if not isinstance(leaf, DTensor) or _is_box(leaf, rows_only):
            return leaf
        value = gather(leaf, is_first)
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if value is None else value

    return dict(map_leaves(dict(content), gathered))


def _is_box(tensor: DTensor, rows_only: bool) -> bool:
    if not all(type(placement) in (Shard, Replicate) for placement in tensor.placements):
        return False
    return not rows_only or (tensor.dim() > 0 and all(dim in (0, None) for dim in placements_of(tensor)))


def write_gathered(
    content: Mapping[str, Any], group: dist.ProcessGroup, scope: Scope, publish: Callable[[WriteFile], None]
) -> None:
    """Write one file with whole tensors on the first rank, as ``torch.save`` would. Collective: every rank.

    Each tensor goes from its ranks into the file, one shard at a time; the first rank holds no whole tensors, but for
    one at a time that is not divided by rows.

    Args:
        content: What `with_boxes` returned, in CPU memory.
        group: A group of the ranks with a CPU backend.
        scope: The same ranks.
        publish: Called on the first rank with a function that writes the file to a path, which it publishes.

    Raises:
        CheckpointError: The file cannot be written; raised on every rank.
        LostRankError: A rank is gone.
    """
    shards = {path: leaf for path, leaf in leaves(content) if isinstance(leaf, DTensor)}
    whole: dict[str, Any] = {}  # memory that is never touched, unless the file cannot be written in parts

    def plan() -> list[str]:
        if not scope.is_first:
            return []
        targets = {path: torch.empty(leaf.shape, dtype=leaf.dtype) for path, leaf in shards.items()}
        whole.update(map_leaves(dict(content), lambda path, leaf: targets.get(path, leaf)))
        paths = {id(target.untyped_storage()): path for path, target in targets.items()}
        found = skeleton_of(whole)
        if found is None:
            return [path for path, target in targets.items() if target.numel()]
        return [paths[id(storage)] for storage in found[1] if id(storage) in paths]

    order = broadcast_object(scope, on_all_ranks(plan, scope))
    failures: list[BaseException] = []
    with naming_lost_ranks("ranks sent their shards to the first one"):
        if scope.is_first:
            pieces = _received(shards, order, group)
            try:
                publish(lambda path: _write(path, whole, shards, pieces))
            except Exception as error:
                failures.append(error)
            for _ in pieces:  # otherwise the ranks that send never return
                pass
        else:
            _send(shards, order, group)

    def succeed() -> None:
        for failure in failures:
            raise failure

    on_all_ranks(succeed, scope)


def _write(
    path: Path, whole: dict[str, Any], shards: Mapping[str, DTensor], pieces: Iterator[tuple[str, Any, torch.Tensor]]
) -> None:
    targets = {name: leaf for name, leaf in leaves(whole) if name in shards}
    found = skeleton_of(whole)
    if found is None:
        for name, box, piece in pieces:
            targets[name][box].copy_(piece)
        write_whole(whole, path)
        return
    skeleton, storages = found
    names = {id(target.untyped_storage()): name for name, target in targets.items()}

    def fill(number: int) -> int:
        name = names.get(id(storages[number]))
        if name is None:
            return file.append(stored_bytes(storages[number]))
        crc = 0
        for data in _in_order(shards[name], pieces):
            crc = crc32_combine(crc, file.append(data), len(data))
        return crc

    with summed_file(path, direct=True, size=skeleton.size) as file:
        skeleton.write(file.append, fill)
    embed_sums(path, file.entry())


def _in_order(tensor: DTensor, pieces: Iterator[tuple[str, Any, torch.Tensor]]) -> Iterator[memoryview]:
    """Yield the bytes of a whole tensor from its pieces."""
    count = sum(1 for _, sizes in _boxes(tensor).values() if math.prod(sizes))
    if _is_box(tensor, rows_only=True):
        for _, _, piece in islice(pieces, count):
            yield bytes_of(piece)
        return
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for _, box, piece in islice(pieces, count):
        whole[box].copy_(piece)
    yield bytes_of(whole)


def _received(
    shards: Mapping[str, DTensor], order: Sequence[str], group: dist.ProcessGroup
) -> Iterator[tuple[str, Any, torch.Tensor]]:
    """Yield the pieces of all tensors: path, place in the whole tensor, and a tensor that the next piece overwrites."""
    own, memory = dist.get_rank(), torch.empty(0, dtype=torch.uint8)
    for path in order:
        leaf = shards[path]
        for rank, (offsets, sizes) in sorted(_boxes(leaf).items(), key=lambda item: item[1]):
            if not (count := math.prod(sizes)):
                continue
            if rank == own:
                piece = leaf.to_local().detach().contiguous()
            else:
                size = count * leaf.element_size()
                if size > len(memory):
                    memory = torch.empty(size, dtype=torch.uint8)
                dist.recv(memory[:size], rank, group=group)
                piece = memory[:size].view(leaf.dtype).reshape(sizes)
            yield path, tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True)), piece


def _send(shards: Mapping[str, DTensor], order: Sequence[str], group: dist.ProcessGroup) -> None:
    first, own = dist.get_global_rank(group, 0), dist.get_rank()
    for path in order:
        local = shards[path].to_local().detach()
        # Another mesh, such as that of replicas, has the same tensor.
        if first in shards[path].device_mesh.mesh and own in _boxes(shards[path]) and local.numel():
            dist.send(as_bytes(local.contiguous()), first, group=group)


def _boxes(tensor: DTensor) -> dict[int, Bounds]:
    """Return the box of each global rank that sends its part: of several with the same part, the first."""
    mesh, dims = tensor.device_mesh, placements_of(tensor)
    found = {}
    for number, rank in enumerate(mesh.mesh.flatten().tolist()):
        coordinates: list[int] = []
        for size in reversed(mesh.shape):
            number, coordinate = divmod(number, size)
            coordinates.insert(0, coordinate)
        if not any(at for at, dim in zip(coordinates, dims, strict=True) if dim is None):
            found[rank] = sharded_box(tensor.shape, mesh.shape, dims, tuple(coordinates))
    return found
