"""Writes a directory of torch's distributed checkpoint (DCP), and takes the checksums of its files on the way."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.futures import Future

from mmfsdp.basics.boxes import Bounds
from mmfsdp.basics.dtypes import canonical_dtype
from mmfsdp.checkpoint.files.disk import not_written
from mmfsdp.checkpoint.formats.dcp.index import FILE, Item, Named, Rules, index_bytes
from mmfsdp.checkpoint.formats.dcp.items import Location
from mmfsdp.checkpoint.formats.dcp.metadata import TensorInfo
from mmfsdp.checkpoint.formats.dcp.names import Keys, NestedKinds, flatten_nested
from mmfsdp.checkpoint.formats.dcp.rules import rule_of
from mmfsdp.checkpoint.formats.dcp.writer import dcp_metadata
from mmfsdp.collective.channels import naming_lost_ranks
from mmfsdp.collective.lost_ranks import is_lost
from mmfsdp.errors import MmfsdpError, StateDictError
from mmfsdp.saving.directory.errors import as_checkpoint_error
from mmfsdp.saving.writing.publishing import DirectorySave, Files
from mmfsdp.saving.writing.replica_shares import share_of
from mmfsdp.saving.writing.skeletons import Skeleton, bytes_of, skeleton_of_tensor
from mmfsdp.saving.writing.summed_files import summed_file

__all__ = ["write_distributed"]

_METADATA = ".metadata"


def write_distributed(
    save: DirectorySave, content: Mapping[str, Any], group: dist.ProcessGroup, *, direct: bool = False
) -> Files:
    """Write with torch's distributed checkpoint (DCP). Collective: every rank of the group.

    Args:
        save: The save that the files belong to.
        content: Nested dicts and lists with DTensors, and tensors that are the same on every rank.
        group: A group of the ranks that save, with a CPU backend.
        direct: Write past the page cache, where that helps.

    Returns:
        This rank's files; on the group's first rank also ``.metadata``.

    Raises:
        CheckpointError: The files could not be written; raised on every rank.
    """
    writer = _Writer(save, direct=direct)
    try:
        with as_checkpoint_error(save.target), naming_lost_ranks("ranks wrote a checkpoint"):
            save_distributed(dict(content), storage_writer=writer, planner=_Planner(save), process_group=group)
    except CheckpointException as error:  # also lists what failed on other ranks
        rank, (first, _) = next(iter(sorted(error.failures.items())))
        with naming_lost_ranks("ranks wrote a checkpoint"):
            if is_lost(first):
                raise first from error
        if isinstance(first, MmfsdpError):
            raise type(first)(first.message, **{**first.context, "rank": rank}) from error
        raise not_written(save.target, first, rank=rank) from error
    return writer.files


class _Planner(DefaultSavePlanner):
    """torch's planner with our names.

    Values that are not sharded come from the first rank: buffers such as running statistics may differ between ranks.
    If several replicas hold a tensor, one of them writes all of it, so that a rule says where it is. Tensors on another
    mesh are left to torch, which gives each shard to the replica that has the least to write so far.

    Args:
        save: The save that the files belong to.
    """

    def __init__(self, save: DirectorySave) -> None:
        super().__init__()
        self._is_first, self._ranks = save.rank == 0, save.world_size

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """See torch's `SavePlanner`."""
        names = {
            name: found
            for name, found in _named_values(state_dict).items()
            if self._is_first or isinstance(found[1], DTensor)
        }
        self.is_coordinator = is_coordinator
        written: dict[int, dict[int, int]] = {}
        own = {name for name in sorted(names) if self._writes(names[name][1], written)}
        self.state_dict = {name: value for name, (_, value) in names.items() if name in own}
        self.mappings = {name: path for name, (path, _) in names.items()}

    def _writes(self, value: Any, written: dict[int, dict[int, int]]) -> bool:
        if not isinstance(value, DTensor) or value.device_mesh.size() != self._ranks:
            return True
        if any(type(placement) not in (Shard, Replicate) for placement in value.placements):
            return True
        replica, mine = share_of(value, written)
        return replica == mine or not value.dim()


class _Writer(StorageWriter):
    """Writes one file per rank. Its errors name the cause: one that travels to another rank loses its ``__cause__``.

    Args:
        save: The save that the files belong to.
        direct: Whether to write past the page cache, where that helps.
    """

    def __init__(self, save: DirectorySave, *, direct: bool) -> None:
        self.files: Files = {}
        self._save, self._direct = save, direct
        self._rules: Rules | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See torch's `StorageWriter`."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See torch's `StorageWriter`."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See torch's `StorageWriter`."""
        return replace(plan, storage_data=self._save.rank)  # where it stands in the group may differ

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """See torch's `StorageWriter`; called on the group's first rank."""
        if self._save.rank == 0:
            self._rules = _rules_of(plans)
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """See torch's `StorageWriter`."""
        return True

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """See torch's `StorageWriter`."""
        results: Future[list[WriteResult]] = Future()
        with as_checkpoint_error(self._save.target):
            results.set_result(self._write(plan, planner) if plan.items else [])
        return results

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        name = FILE.format(self._save.rank)
        found = [(item.index, planner.resolve_data(item)) for item in plan.items]
        ends = [0, *accumulate(_size(data) for _, data in found)]
        extents = [
            (_key(index), begin, end - begin) for (index, _), (begin, end) in zip(found, pairwise(ends), strict=True)
        ]
        tail = index_bytes(self._save.save_id, extents, self._rules)
        size = ends[-1] + len(tail)
        results: list[WriteResult] = []
        with summed_file(self._save.temporary / name, direct=self._direct, size=size) as file:
            for index, data in found:
                begin = file.end
                if isinstance(data, torch.Tensor):
                    memory = bytes_of(data.detach().cpu().contiguous())
                    _skeleton(data).write(file.append, lambda _, memory=memory: file.append(memory))  # type: ignore[misc]
                else:
                    file.append(data.getbuffer())
                location = Location(name, begin, file.end - begin)
                results.append(WriteResult(index, location.length, location))
            assert file.end == ends[-1], "an item is longer than was said"
            file.append(tail)
        self.files[name] = file.entry()
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """See torch's `StorageWriter`; called on the first rank."""
        stored = {_key(one.index): one.storage_data for written in results for one in written}
        tensors: dict[str, TensorInfo] = {}
        locations: dict[tuple[str, tuple[int, ...] | None], Location] = {}
        for name, found in metadata.state_dict_metadata.items():
            if not isinstance(found, TensorStorageMetadata):
                locations[name, None] = stored[name, None]
                continue
            boxes = tuple((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in found.chunks)
            tensors[name] = TensorInfo(canonical_dtype(found.properties.dtype), tuple(found.size), boxes)
            locations |= {(name, box[0]): stored[name, box[0]] for box in boxes}
        data = dcp_metadata(metadata.planner_data, tensors, locations)
        with (
            as_checkpoint_error(self._save.target),
            summed_file(self._save.temporary / _METADATA, direct=False) as file,
        ):
            file.append(data)
        self.files[_METADATA] = file.entry()


def _rules_of(plans: list[SavePlan]) -> Rules | None:
    """Return by which rules tensors are spread over the files of ranks; ``None`` if one follows none."""
    keys = {name: path for plan in reversed(plans) for name, path in plan.planner_data.items()}
    tensors: dict[str, tuple[str, tuple[int, ...], list[tuple[Bounds, int]]]] = {}
    for plan in plans:
        for item in plan.items:
            data = item.tensor_data
            if data is None and plan.storage_data != 0:
                return None
            if data is not None:
                box = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
                like = canonical_dtype(data.properties.dtype), tuple(data.size)
                tensors.setdefault(item.index.fqn, (*like, []))[2].append((box, plan.storage_data))
    names: dict[str, Named] = {}
    for name, path in {**plans[0].planner_data, **keys}.items():
        dtype, shape, boxes = tensors.get(name, ("", (), []))
        rule = rule_of(shape, boxes, len(plans)) if dtype else None
        if dtype and rule is None:
            return None
        names[name] = Named(path, dtype, rule)
    return Rules(len(plans), names)


def _key(index: MetadataIndex) -> Item:
    return index.fqn, None if index.offset is None else tuple(index.offset)


def _skeleton(tensor: torch.Tensor) -> Skeleton:
    return skeleton_of_tensor(tensor.dtype, tuple(tensor.shape))


def _size(data: Any) -> int:
    return _skeleton(data).size if isinstance(data, torch.Tensor) else len(data.getbuffer())


def _named_values(content: Mapping[str, Any]) -> dict[str, tuple[Keys, Any]]:
    """Return nested content by the flat names that it is stored under.

    Raises:
        StateDictError: A DTensor lies in what is stored whole, or two paths get the same name.
    """
    found = flatten_nested(content, _KINDS, StateDictError)
    for name, (_, value) in found.items():
        if not isinstance(value, torch.Tensor) and _holds_shards(value):
            raise StateDictError(
                f"{name!r} is a {type(value).__name__} with sharded tensors, which cannot be stored in parts. Use "
                "lists, and dicts whose keys are strings or integers."
            )
    return found


_KINDS = NestedKinds(
    is_tensor=lambda value: isinstance(value, torch.Tensor),
    mapping=lambda value: value if isinstance(value, Mapping) else None,
)


def _holds_shards(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_shards, value.values()))
    return isinstance(value, DTensor) or (isinstance(value, list | tuple) and any(map(_holds_shards, value)))
