"""Reads a directory with a file per rank that holds what fairscale's FSDP calls its local state dict, and the metadata.

``local_state_dict()`` gives each rank's part of the flat parameters, ``local_metadata_dict()`` what they are made of:
fairscale/nn/data_parallel/fully_sharded_data_parallel.py, whose ``consolidate_shard_weights`` puts them together. Each
script chooses the names of files and keys: metaseq writes ``checkpoint-shard0.pt`` with ``model`` and
``shard_metadata``, others ``weights`` and ``meta``. The metadata is recognised by its keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmfsdp.basics.text import missing
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.common.source import SourcePath, is_of_fairscale
from mmfsdp.checkpoint.formats.fsdp1.flat_parameters import FlatRange, FlatUnit, entry_of_ranges, spans_in_order
from mmfsdp.checkpoint.formats.torch_files.same_save import check_same_save
from mmfsdp.checkpoint.formats.torch_files.torch_zip import PickledTensor, add_whole, read_tree
from mmfsdp.checkpoint.integrity import add_rank_file, inside
from mmfsdp.checkpoint.layout import Layout, TensorRef
from mmfsdp.checkpoint.pickles.unpickling import integers
from mmfsdp.checkpoint.tree import find_leaves, map_leaves
from mmfsdp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatError,
    IncompleteCheckpointError,
)

__all__ = ["read"]

_NAME = re.compile(r".*?(\d{1,9})\.(?:pt|pth|bin|torch)", re.ASCII)


@dataclass(frozen=True)
class _FairscaleFile:
    """The file of a rank, as read."""

    path: Path
    weights: Mapping[str, Any]
    """Its part of each flat parameter, and its buffers."""
    units: Sequence[Mapping[str, Any]]
    """The metadata of each unit."""
    buffers: Sequence[str]
    rest: Mapping[Any, Any]
    """Content beside the weights."""


def read(source: SourcePath) -> Layout:
    """Read the layout of such a directory.

    The weights are under ``state_dict``. What lies beside them is rank 0's, or a list by rank if it holds tensors, such
    as the optimizer's state, which fairscale does not describe.

    Raises:
        CheckpointNotFoundError: The file of some rank is missing.
        IncompleteCheckpointError: Files of some ranks are missing; they are named.
        CorruptCheckpointError: A file is of another save, or damaged.
        FormatError: A file lacks the metadata, or a unit holds other parameters on each rank.
        UnsafePickleError: A file names something that is not on the list of safe names.
    """
    files: dict[int, Path] = {}
    for name in source.names:
        if match := _NAME.fullmatch(name):
            add_rank_file(files, int(match[1]), inside(source.path, name, source.path))
    if not files:
        raise CheckpointNotFoundError(f"{source.path.name} holds no file of a rank.", file=str(source.path))
    path = files[min(files)]
    if gap := [rank for rank in range(max(files)) if rank not in files]:
        raise _missing(path, gap)
    try:
        return _layout(source, [_rank(files[rank], source.trust) for rank in sorted(files)])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CorruptCheckpointError(
            f"The metadata of fairscale in {path.parent.name} is not what local_metadata_dict() returns: {error!r}.",
            file=str(path),
        ) from error


def _layout(source: SourcePath, ranks: Sequence[_FairscaleFile]) -> Layout:
    first = ranks[0]
    for rank in ranks[1:]:
        check_same_save(first.path, first.rest, rank.path, rank.rest)
    tensors: dict[str, TensorEntry] = {}
    weights: dict[str, TensorRef] = {}
    for index, unit in enumerate(first.units):
        for name, entry in _parameters(index, unit, ranks).items():
            if name in weights:
                raise CorruptCheckpointError(f"{first.path.name} has two parameters {name!r}.", file=str(first.path))
            tensors[f"state_dict/{name}"] = entry
            weights[name] = TensorRef(f"state_dict/{name}")
    for name in first.buffers:
        leaf = first.weights.get(name)
        if not isinstance(leaf, PickledTensor):
            raise CorruptCheckpointError(f"{first.path.name} lacks the buffer {name!r}.", file=str(first.path))
        weights[name] = add_whole(f"state_dict/{name}", leaf, tensors)
    for unit in first.units:
        for one, two in unit["shared_param_info"]:
            kept, tied = _joined(unit, one), _joined(unit, two)
            if kept not in weights:
                raise CorruptCheckpointError(
                    f"{first.path.name} ties {tied!r} to {kept!r}, which it lacks.", file=str(first.path)
                )
            weights[tied] = weights[kept]
    return Layout(source.path, "fairscale", len(ranks), tensors, {"state_dict": weights, **_rest(ranks, tensors)})


def _rank(path: Path, trust: bool) -> _FairscaleFile:
    tree = read_tree(path, trust=trust)
    held = {key: value for key, value in tree.items() if isinstance(value, dict)} if isinstance(tree, dict) else {}
    found = [key for key, value in held.items() if is_of_fairscale(value)]
    if len(found) != 1:
        raise FormatError(
            f"{path.name} holds {len(found) or 'no'} local_metadata_dict() of fairscale, so that nothing says what its "
            "flat parameters are made of. Write local_state_dict() and local_metadata_dict() under a key each.",
            file=str(path),
        )
    metadata = held.pop(found[0])
    units, buffers = metadata["param_metadata"], metadata["buffer_names"]
    names = {_joined(unit, name) for unit in units for name in unit["params"]}
    keys = [key for key, value in held.items() if names <= {*value}]
    if not keys:
        raise FormatError(
            f"{path.name} holds fairscale's metadata, but no dict with all of its parameters, such as "
            f"{min(names, default='')!r}. Write local_state_dict() beside it.",
            file=str(path),
        )
    rest = {key: value for key, value in tree.items() if key not in (found[0], keys[0])}
    return _FairscaleFile(path, held[keys[0]], units, buffers, rest)


def _joined(unit: Mapping[str, Any], name: str) -> str:
    return f"{unit['fsdp_path']}.{name}" if unit["fsdp_path"] else name


def _parameters(index: int, unit: Mapping[str, Any], ranks: Sequence[_FairscaleFile]) -> dict[str, TensorEntry]:
    """Return the parameters of a unit by name."""
    first = ranks[0]
    if unit["no_broadcast_optim_state"] and len(ranks) > 1:
        raise FormatError(
            f"The parameters of {unit['fsdp_path']!r} are other ones on each rank, such as experts. That is not "
            "supported.",
            file=str(first.path),
        )
    entries: dict[str, TensorEntry] = {}
    for held, described in unit["params"].items():
        key = _joined(unit, held)
        shapes = dict(zip(described["names"], map(integers, described["shapes"]), strict=True))
        parts = [_part(key, index, held, rank, first) for rank in ranks]
        ranges: list[FlatRange] = []
        for part, length in parts:
            start = ranges[-1].stop if ranges else 0
            if length:
                ranges.append(FlatRange(start, start + length, part.offset, part.record))
        flat = FlatUnit(key, parts[0][0].dtype, tuple(ranges))
        spans = spans_in_order(flat, shapes)
        if spans is None:
            total, whole = sum(described["numels"]), parts[0][0].shape[0]
            if flat.numel < total and whole and flat.numel == whole * len(ranks):
                raise _missing(first.path, [*range(len(ranks), -(-total // whole))])
            raise CorruptCheckpointError(
                f"The parts of {key!r} have {flat.numel} elements together, expected {total}: files of other saves are "
                f"among the {len(ranks)} of {first.path.parent.name}.",
                file=str(first.path),
            )
        for name, span in spans.items():
            full = _joined(unit, name)
            entries[full] = entry_of_ranges(f"state_dict/{full}", span.dtype, shapes[name], span.ranges)
    return entries


def _part(key: str, index: int, held: str, rank: _FairscaleFile, first: _FairscaleFile) -> tuple[PickledTensor, int]:
    """Return a rank's part of a flat parameter, and its length without padding."""
    part, like = rank.weights.get(key), first.weights[key]
    padding = _padding(index, held, rank, first)
    if (
        not isinstance(part, PickledTensor)
        or padding is None
        or len(part.shape) != 1
        or part.strides is not None
        or not padding <= part.shape[0]
        or part.dtype != like.dtype
    ):
        raise CorruptCheckpointError(
            f"{rank.path.name} does not hold {key!r} as {first.path.name} describes it: it is of another save, or "
            "damaged.",
            file=str(rank.path),
        )
    return part, part.shape[0] - padding


def _padding(index: int, held: str, rank: _FairscaleFile, first: _FairscaleFile) -> int | None:
    """Return the elements that pad a rank's part; ``None`` if its metadata differs from the first rank's."""
    if len(rank.units) != len(first.units) or held not in rank.units[index]["params"]:
        return None
    own, like = ({**of.units[index]["params"][held]} for of in (rank, first))
    padding = own["padding"]
    for described in (own, like):
        described |= {"shapes": [*map(integers, described["shapes"])], "padding": 0}
    return padding if own == like and type(padding) is int and padding >= 0 else None


def _missing(first: Path, ranks: Sequence[int]) -> IncompleteCheckpointError:
    names = [re.sub(r"\d+(?=\.\w+$)", str(rank), first.name) for rank in ranks]
    return IncompleteCheckpointError(f"{missing(names)}.", file=str(first.with_name(names[0])))


def _rest(ranks: Sequence[_FairscaleFile], tensors: dict[str, TensorEntry]) -> dict[Any, Any]:
    """Return what lies beside the weights: rank 0's, or a list by rank if there are tensors in it."""
    content: dict[Any, Any] = {}
    for key, value in ranks[0].rest.items():
        if not any(True for _ in find_leaves(value, PickledTensor)):
            content[key] = value
            continue
        content[key] = [
            map_leaves(
                rank.rest.get(key),
                lambda name, leaf, index=index: (  # type: ignore[misc]
                    add_whole(f"{key}/{index}/{name}".rstrip("/"), leaf, tensors)  # noqa: B023
                    if isinstance(leaf, PickledTensor)
                    else leaf
                ),
            )
            for index, rank in enumerate(ranks)
        ]
    return content
