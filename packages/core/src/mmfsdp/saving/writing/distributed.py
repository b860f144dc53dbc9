"""Writes a directory of torch's distributed checkpoint (DCP) from all ranks, each its own file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mmfsdp.basics.boxes import Bounds, Boxes, EvenBoxes, ListedBoxes
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.dcp.names import Keys, NestedKinds, flatten_nested
from mmfsdp.checkpoint.formats.dcp.writer import Items, plan_metadata, plan_rank
from mmfsdp.checkpoint.formats.torch_files.torch_zip_writer import Archive
from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import all_equal, any_of, broadcast_object, gather_objects, gather_to_first, on_all_ranks
from mmfsdp.errors import StateDictError
from mmfsdp.runtime.dtensors import box_of, is_part_of
from mmfsdp.saving.directory.errors import as_checkpoint_error
from mmfsdp.saving.writing.archives import plan_live
from mmfsdp.saving.writing.memory import entry_in_memory, is_plain
from mmfsdp.saving.writing.pieces import write_file
from mmfsdp.saving.writing.publishing import DirectorySave, Files
from mmfsdp.saving.writing.replica_shares import written_boxes

__all__ = ["Named", "named_values", "write_distributed", "write_parts"]

Named = tuple[Keys, Any]
"""A value of nested content, with the keys that lead to it."""


def write_distributed(save: DirectorySave, content: Mapping[str, Any], mesh: DeviceMesh, scope: Scope) -> Files:
    """Write the file of this rank, and on the first ``.metadata``. Collective: every rank of the scope.

    Each rank knows by itself what the others write, but for tensors on another mesh: of these the ranks say what they
    hold, and the first one decides who writes it.

    Args:
        save: The save that the files belong to.
        content: Nested dicts and lists with DTensors placed by ``Shard`` and ``Replicate``; other values are taken from
            the first rank.
        mesh: The ranks that save.
        scope: The same ranks.

    Returns:
        This rank's files.

    Raises:
        CheckpointError: The files could not be written; raised on every rank.
        StateDictError: Ranks hold different sharded tensors, or a DTensor lies in content that is stored whole.
    """

    def plan() -> _Own:
        with as_checkpoint_error(save.target):
            return _own(content, save, mesh)

    own = on_all_ranks(plan, scope)
    _check_alike(own.divided, scope)
    return _write(save, own, scope)


def write_parts(save: DirectorySave, parts: Mapping[str, Named], scope: Scope) -> Files:
    """Write as `write_distributed` does what no rank knows of the others. Collective: every rank of the scope.

    Args:
        save: The save that the files belong to.
        parts: By flat name, what this rank gives: DTensors on meshes of some ranks, each of which gives its part, and
            other tensors of which it is the only rank; objects on the first rank of the scope alone.
        scope: The ranks that save.

    Returns:
        This rank's files.

    Raises:
        CheckpointError: The files could not be written; raised on every rank.
    """

    def plan() -> _Own:
        own = _Own()
        with as_checkpoint_error(save.target):
            for name, (keys, value) in parts.items():
                own.keys[name] = keys
                if isinstance(value, torch.Tensor):
                    held, box = value.to_local() if isinstance(value, DTensor) else value, box_of(value).bounds
                    own.elsewhere[name] = entry_in_memory(name, held, value.shape, box), box
                else:
                    own.objects[name] = plan_live(value)
        return own

    return _write(save, on_all_ranks(plan, scope), scope)


def _write(save: DirectorySave, own: _Own, scope: Scope) -> Files:
    tensors: dict[str, tuple[TensorEntry, Boxes]] = {**own.whole, **own.divided}
    keys = {**own.keys}
    for name, (path, entry, boxes) in _given_out(own, scope).items():
        keys[name], tensors[name] = path, (entry, boxes)
    items = Items(keys, tensors, own.objects, save.world_size)

    def write() -> Files:
        with as_checkpoint_error(save.target):
            planned = [plan_rank(items, save.rank, save.save_id), plan_metadata(items) if scope.is_first else None]
            files = [file for file in planned if file is not None]
            return {file.name: write_file(save.temporary / file.name, file) for file in files}

    return on_all_ranks(write, scope)


@dataclass
class _Own:
    """What this rank knows of the content, by flat name."""

    keys: dict[str, Keys] = field(default_factory=dict)
    divided: dict[str, tuple[TensorEntry, EvenBoxes]] = field(default_factory=dict)  # on the mesh of the ranks
    elsewhere: dict[str, tuple[TensorEntry, Bounds]] = field(default_factory=dict)  # on another mesh
    whole: dict[str, tuple[TensorEntry, EvenBoxes]] = field(default_factory=dict)
    objects: dict[str, Archive] = field(default_factory=dict)


def _own(content: Mapping[str, Any], save: DirectorySave, mesh: DeviceMesh) -> _Own:
    own = _Own()
    values = named_values(content)
    written: dict[int, dict[int, int]] = {}  # by number of replicas: the bytes that each replica writes
    shards = {name: value for name, (_, value) in values.items() if isinstance(value, DTensor)}
    for name in sorted(name for name, value in shards.items() if is_part_of(value, mesh)):
        value = shards[name]
        entry = entry_in_memory(name, value.to_local(), value.shape, box_of(value).bounds)
        own.divided[name] = entry, written_boxes(value, written, mesh)[0]
    for name, (keys, value) in values.items():
        if isinstance(value, DTensor):
            if name not in own.divided and value.device_mesh.get_coordinate() is not None:
                box = box_of(value).bounds
                own.elsewhere[name] = entry_in_memory(name, value.to_local(), value.shape, box), box
        elif save.rank:
            continue
        elif is_plain(value):
            shape = tuple(value.shape)
            entry = entry_in_memory(name, value, shape, ((0,) * len(shape), shape))
            own.whole[name] = entry, EvenBoxes(shape, (save.world_size,), (None,), 0)
        else:
            own.objects[name] = plan_live(value)
        own.keys[name] = keys
    return own


def _check_alike(divided: Mapping[str, tuple[TensorEntry, EvenBoxes]], scope: Scope) -> None:
    """Check that ranks save the same sharded tensors. Collective: every rank of the scope.

    Raises:
        StateDictError: They do not; raised on every rank.
    """
    said = {name: f"{entry.dtype} of shape {list(entry.shape)}" for name, (entry, _) in divided.items()}
    if all_equal(scope, repr([*said.items(), *(boxes for _, boxes in divided.values())])):
        return
    first, *others = gather_objects(scope, said)
    for rank, other in enumerate(others, start=1):
        for name in sorted({**first, **other}):
            if first.get(name) != other.get(name):
                here, there = (f"{each[name]}" if name in each else "not there" for each in (first, other))
                raise StateDictError(
                    f"Ranks save different sharded tensors: {name!r} is {here} on rank 0, and {there} on rank {rank}. "
                    "Save the same names on every rank."
                )
    raise StateDictError("Ranks save sharded tensors that are placed differently. Place them alike on every rank.")


def _given_out(own: _Own, scope: Scope) -> dict[str, tuple[Keys, TensorEntry, Boxes]]:
    """Return the tensors on other meshes, and who writes their boxes: who has least to write. Collective.

    On the first rank these are the tensors of all ranks, on others their own.
    """
    if not any_of(scope, bool(own.elsewhere)):
        return {}
    offers = {name: (own.keys[name], entry.dtype, entry.shape, box) for name, (entry, box) in own.elsewhere.items()}
    known: dict[str, tuple[Keys, str, tuple[int, ...]]] = {}
    holders: dict[str, dict[Bounds, list[int]]] = {}
    for rank, offered in enumerate(gather_to_first(scope, offers) or ()):
        for name, (keys, dtype, shape, box) in offered.items():
            known.setdefault(name, (keys, dtype, shape))
            if 0 not in box[1]:
                holders.setdefault(name, {}).setdefault(box, []).append(rank)
    loads = [0] * scope.size
    writers: dict[str, dict[Bounds, int]] = {name: {} for name in known}
    for name, boxes in holders.items():
        for box, ranks in boxes.items():
            writers[name][box] = rank = min(ranks, key=loads.__getitem__)
            loads[rank] += math.prod(box[1])
    known, writers = broadcast_object(scope, (known, writers))
    found: dict[str, tuple[Keys, TensorEntry, Boxes]] = {}
    for name, (keys, dtype, shape) in known.items():
        if scope.is_first or name in own.elsewhere:
            entry = own.elsewhere[name][0] if name in own.elsewhere else TensorEntry(name, dtype, shape, ())
            found[name] = keys, entry, ListedBoxes(writers[name])
    return found


def named_values(content: Mapping[str, Any]) -> dict[str, tuple[Keys, Any]]:
    """Return nested content by the flat names that it is stored under.

    Raises:
        StateDictError: A DTensor lies in content that is stored whole, or two paths get the same name.
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
