"""Reads DCP directories that hold FSDP1's ``LOCAL_STATE_DICT``: whole tensors out of the parts of flat parameters.

DCP stores a flat parameter whole. With ``use_orig_params=True`` the names of the parameters are there, too. All ranks
give their parts of a parameter the same name, so DCP keeps the part of one of them. It says no more than how many
elements of the parameter this rank holds. The shapes come from the optimizer's state, or from a reference.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmfsdp.basics.arguments import argument
from mmfsdp.checkpoint.chunks import Chunk, Record
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.common.source import SourcePath
from mmfsdp.checkpoint.formats.dcp.metadata import read_as_stored
from mmfsdp.checkpoint.formats.fsdp1.flat_parameters import FLAT, FlatSpan, FlatUnit, flat_unit, spans_in_order
from mmfsdp.checkpoint.formats.fsdp1.flat_state_dicts import ParameterFacts, known_shapes, resolve_section
from mmfsdp.checkpoint.formats.torch_files.torch_zip import PickledShards, PickledTensor
from mmfsdp.checkpoint.geometry import check_coverage
from mmfsdp.checkpoint.layout import Layout, TensorRef
from mmfsdp.checkpoint.tree import map_leaves, unique_name
from mmfsdp.errors import IncompleteCheckpointError

__all__ = ["read"]

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # of torch's batch and instance norms
_RANK = re.compile(r"__(\d+)_\d+\.distcp", re.ASCII)


def read(source: SourcePath) -> Layout:
    """Read the layout of such a directory.

    Args:
        source: Its ``reference`` has the shapes, and the order of parameters, that the optimizer's state does not tell.

    Raises:
        IncompleteCheckpointError: The shapes are not known, a name may be a part of a tied parameter, or no file holds
            a part.
        CorruptCheckpointError: Parts do not fit together, or not with what is known.
        FormatError, UnsafePickleError: See the reader of ``dcp``.
    """
    stored = read_as_stored(source)
    content = map_leaves(stored.tree, lambda _, leaf: _entry(leaf, stored))
    reference = source.reference()
    known = known_shapes(content, reference)
    for value in content.values() if isinstance(content, dict) else ():
        if not known.shapes and isinstance(value, dict):  # {'app': {'model': ..., 'optim': ...}}
            known = known_shapes(value, reference)
    tensors: dict[str, TensorEntry] = {}

    def bind(name: str, leaf: Any) -> Any:
        if not isinstance(leaf, TensorEntry):
            return leaf
        unique = unique_name(name, tensors)
        tensors[unique] = replace(leaf, name=unique)
        return TensorRef(unique)

    tree = map_leaves(_resolved(content, stored, known), bind)
    return Layout(stored.path, "dcp_flat", stored.world_size, tensors, tree)


def _entry(leaf: Any, stored: Layout) -> Any:
    return stored.tensors[leaf.name] if isinstance(leaf, TensorRef) else leaf


def _resolved(value: Any, stored: Layout, known: ParameterFacts) -> Any:
    """Return nested content with the flat parameters of every state dict in it taken apart."""
    if not isinstance(value, dict):
        return value
    if not any(_is_flat(key, held) for key, held in value.items()):
        return {key: _resolved(held, stored, known) for key, held in value.items()}
    check_coverage(stored, [held.name for held in value.values() if isinstance(held, TensorEntry)])
    part = {key: _shards(held) if _is_flat(key, held) else held for key, held in value.items()}
    file = stored.path / ".metadata"
    units = [flat_unit(key, [held], [file]) for key, held in part.items() if isinstance(held, PickledShards)]
    found: dict[str, FlatSpan] = {}
    for unit in units:
        mine = {key: held for key, held in value.items() if _unit_of(key, units) is unit and not _is_flat(key, held)}
        spans = _parameters(unit, mine, known, stored.world_size)
        found.update(spans)
        for name in _tied(unit, mine, spans, known):
            del part[name]
    return resolve_section([part], [file], known, found)


def _is_flat(key: Any, value: Any) -> bool:
    return isinstance(key, str) and key.endswith(FLAT) and isinstance(value, TensorEntry)


def _shards(entry: TensorEntry) -> PickledShards:
    """Return a flat parameter as if one rank held all of its parts."""
    chunks = sorted(entry.chunks(), key=lambda chunk: chunk.box_offsets)
    parts = tuple((_part(entry.dtype, chunk), chunk.box_offsets) for chunk in chunks)
    return PickledShards(entry.dtype, entry.shape, parts, 0, 1)


def _part(dtype: str, chunk: Chunk) -> PickledTensor:
    record = chunk.record or Record(chunk.file, chunk.offset, chunk.nbytes, None)
    return PickledTensor(dtype, chunk.box_sizes, chunk.offset, chunk.strides, record)


def _unit_of(key: Any, units: list[FlatUnit]) -> FlatUnit | None:
    owners = [unit for unit in units if isinstance(key, str) and key.startswith(unit.prefix)]
    return max(owners, key=lambda unit: len(unit.prefix), default=None)


def _parameters(unit: FlatUnit, values: Mapping[str, Any], known: ParameterFacts, ranks: int) -> dict[str, FlatSpan]:
    """Return the parameters of a flat parameter whose names are in the state dict; none if that is not certain."""
    shapes: dict[str, tuple[int, ...]] = {}
    seen = set()
    for name, entry in values.items():
        if not _may_be_part(entry, unit):
            continue
        if name in known.reference:
            chunks = known.reference[name].chunks()
            if chunks and chunks in seen:
                continue  # a tied parameter is there once, under its first name
            seen.add(chunks)
            shapes[name] = known.reference[name].shape
        elif name in known.shapes:
            shapes[name] = known.shapes[name]
    # A reference may hold buffers, too. The sizes must add up, so that at most one of these does.
    for chosen in (shapes, {name: shape for name, shape in shapes.items() if not name.endswith(_BUFFERS)}):
        spans = spans_in_order(unit, chosen, aligned=True, ranks=ranks) if chosen else None
        if spans and all(_fits(values[name], span, unit) for name, span in spans.items()):
            return spans
    return {}


def _may_be_part(entry: Any, unit: FlatUnit) -> bool:
    """Tell whether a value may be a rank's part of a parameter; buffers and ignored parameters mostly cannot."""
    return isinstance(entry, TensorEntry) and len(entry.shape) == 1 and entry.dtype == unit.dtype


def _fits(entry: TensorEntry, span: FlatSpan, unit: FlatUnit) -> bool:
    """Tell whether the part of a parameter that is stored is as long as that rank's share of it."""
    return not entry.numel or _share(span, unit, _rank(entry.chunks()[0].file)) == entry.numel


def _share(span: FlatSpan, unit: FlatUnit, rank: str) -> int:
    """Return how many elements of a parameter a rank holds."""
    begin, end = span.start[1], span.start[1] + span.numel
    held = [part for part in unit.ranges if _rank(part.record.file) == rank]
    return sum(max(0, min(part.stop, end) - max(part.start, begin)) for part in held)


def _rank(file: Path) -> str:
    match = _RANK.fullmatch(file.name)
    return match[1] if match else file.name


def _tied(unit: FlatUnit, values: Mapping[str, Any], spans: Mapping[str, FlatSpan], known: ParameterFacts) -> list[str]:
    """Return the names whose stored part belongs to a parameter that has another name, too."""
    found = []
    for name, entry in values.items():
        if name in spans or not spans or not _may_be_part(entry, unit):
            continue
        if known.reference:  # it names every parameter
            found += [name] if name in known.reference and known.reference[name].shape != entry.shape else []
            continue
        rank = _rank(entry.chunks()[0].file) if entry.numel else ""
        for twin, span in spans.items():
            whole = known.shapes.get(twin) == entry.shape  # then it is right, whether it is tied or a buffer
            if not whole and _share(span, unit, rank) == entry.numel:
                raise IncompleteCheckpointError(
                    f"{name!r} may be a buffer, or a part of parameter {twin!r} under a second name: "
                    f"{entry.numel} elements fit both. Give a complete checkpoint of the same model as "
                    f"{argument('reference')}, such as the weights that training started from.",
                    file=str(unit.ranges[0].record.file.with_name(".metadata")),
                )
    return found
