"""Assembles whole tensors, with their shapes, from the parts of a state dict that FSDP1's ranks saved."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mmfsdp.basics.arguments import argument
from mmfsdp.basics.text import WRAPPER_PREFIX
from mmfsdp.checkpoint.chunks import row_major_strides
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.fsdp1.flat_parameters import (
    FLAT,
    FlatRange,
    FlatSpan,
    FlatUnit,
    entry_of_ranges,
    flat_unit,
    spans_in_order,
    spans_of_views,
)
from mmfsdp.checkpoint.formats.torch_files.torch_zip import PickledShards, PickledTensor
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.errors import CorruptCheckpointError, IncompleteCheckpointError

__all__ = ["ParameterFacts", "in_model_order", "known_shapes", "resolve_section"]

_SORTED = ("huggingface", "safetensors", "safetensors_index", "safetensors_ranks")
_ENOUGH = 5  # neighbours in the order of the alphabet, and none against it, are no chance


@dataclass(frozen=True)
class ParameterFacts:
    """Facts about parameters that come from outside of the state dict."""

    shapes: Mapping[str, tuple[int, ...]]
    """Name to shape, from the optimizer's state."""
    groups: tuple[str, ...]
    """Names in the order of the optimizer's groups."""
    reference: Mapping[str, TensorEntry]
    """Name to tensor of a whole checkpoint of the same model."""
    ordered: bool
    """Whether the reference has its names in the order of the model."""


def known_shapes(optimizer: Any, reference: Layout | None) -> ParameterFacts:
    """Collect what an optimizer's state and a reference say about parameters."""
    shapes: dict[str, tuple[int, ...]] = {}
    groups: dict[str, None] = {}
    for state in _optimizers(optimizer):
        for group in state["param_groups"]:
            names = group.get("params", ()) if isinstance(group, dict) else ()
            groups.update(dict.fromkeys(name for name in names if isinstance(name, str)))
        for name, values in state["state"].items():
            held = values.values() if isinstance(values, dict) else ()
            candidates = {value.shape for value in held if isinstance(value, PickledShards | TensorEntry)} - {()}
            if len(candidates) == 1:  # factored state has other shapes than its parameter
                shapes[name] = candidates.pop()
    found: dict[str, TensorEntry] = {}
    if reference is not None:
        key = next((key for key in ("state_dict", "model") if reference.tensors_below(key)), None)
        found = dict(reference.tensors) if reference.is_flat or key is None else reference.tensors_below(key)
    return ParameterFacts(shapes, tuple(groups), found, reference is not None and in_model_order(reference, found))


def resolve_section(
    parts: Sequence[Mapping[Any, Any]],
    files: Sequence[Path],
    known: ParameterFacts,
    found: Mapping[str, FlatSpan] = MappingProxyType({}),
) -> dict[Any, Any]:
    """Return a state dict with whole tensors: a ``TensorEntry`` for each parameter that was in parts.

    Args:
        parts: The state dict as each rank saved it, all with the same keys.
        files: The file of each rank.
        known: Facts about parameters.
        found: Parameters that the caller has found in flat parameters.

    Raises:
        IncompleteCheckpointError: The shapes of parameters are not known.
        CorruptCheckpointError: Parts do not fit together, or not with what is known.
    """
    units = {}
    for key, value in parts[0].items():
        if isinstance(value, PickledShards) and key.endswith(FLAT):
            held = [part[key] for part in parts]
            if any(not isinstance(shards, PickledShards) for shards in held):
                raise CorruptCheckpointError(f"{key!r} is not sharded on every rank.", file=str(files[0]))
            units[key] = flat_unit(key, held, files)
    plain = [key for key in parts[0] if key not in units]
    pieces = {key: [part[key] if isinstance(part[key], PickledTensor) else None for part in parts] for key in plain}
    spans = {**spans_of_views(list(units.values()), pieces), **found}
    shapes = _shapes_of_spans(spans, known)
    spans.update(_spans_of_copies(pieces, spans, known, [unit.prefix for unit in units.values()]))
    split = {span.start[0] for span in spans.values()}  # units whose parameters have keys of their own
    result: dict[Any, Any] = {}
    unknown: list[str] = []
    for key, value in parts[0].items():
        if key not in units and key not in spans:
            result[key] = value  # the same on all ranks
        elif key in spans or units[key].prefix not in split:
            cut = {key: spans[key]} if key in spans else _cut(units[key], list(units.values()), plain, known)
            unknown += [key] if cut is None else []
            for name, span in (cut or {}).items():
                shape = shapes.get(name, _shape(name, known))
                if shape is None:
                    unknown.append(name)
                else:
                    result[name] = _entry(name, span, shape, known, files[0])
    if unknown:
        more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
        model = argument("model", python="layout_of_model(model) as 'reference'")
        raise IncompleteCheckpointError(
            f"{files[0].parent.name} does not say the shapes of {', '.join(map(repr, unknown[:8]))}{more}, as "
            "it has no optimizer state for them. Give a complete checkpoint of the same model as "
            f"{argument('reference')}, such as the weights that training started from"
            + (
                "."
                if known.ordered or not known.reference
                else ", as a .pth file, which keeps the model's order if nobody sorts it."
            )
            + f" Or give the model itself: {model}.",
            file=str(files[0]),
        )
    result.update(_aliases(result, known))
    return result


def _optimizers(value: Any) -> Iterator[dict[str, Any]]:
    for state in [value, *value.values()] if isinstance(value, dict) else []:
        if (
            isinstance(state, dict)
            and isinstance(state.get("state"), dict)
            and isinstance(state.get("param_groups"), list)
        ):
            yield state


def _shape(name: str, known: ParameterFacts) -> tuple[int, ...] | None:
    """Return the shape of a parameter; weights averaged by MMEngine have ``module.`` before their names."""
    for spelling in (name, name.removeprefix(WRAPPER_PREFIX)):
        if spelling in known.reference:
            return known.reference[spelling].shape
        if spelling in known.shapes:
            return known.shapes[spelling]
    return None


def _shapes_of_spans(spans: Mapping[str, FlatSpan], known: ParameterFacts) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters, tied names included."""
    shapes = {span.start: shape for name, span in spans.items() if (shape := _shape(name, known)) is not None}
    return {name: shapes[span.start] for name, span in spans.items() if span.start in shapes}


def _spans_of_copies(
    pieces: Mapping[str, list[PickledTensor | None]],
    spans: Mapping[str, FlatSpan],
    known: ParameterFacts,
    prefixes: list[str],
) -> dict[str, FlatSpan]:
    """Find parameters whose pieces were copied before they were saved, and so are not views any more."""
    found: dict[str, FlatSpan] = {}
    for name, parts in pieces.items():
        shape = _shape(name, known)
        held = [part for part in parts if part is not None and len(part.shape) == 1]
        if name in spans or shape is None or len(held) != len(parts) or all(part.shape == shape for part in held):
            continue
        owners = [prefix for prefix in prefixes if name.startswith(prefix)]
        if not owners or sum(part.shape[0] for part in held) != math.prod(shape):
            continue
        ranges, begin = [], 0
        for part in held:
            ranges.append(FlatRange(begin, begin + part.shape[0], part.offset, part.record))
            begin = ranges[-1].stop
        found[name] = FlatSpan(held[0].dtype, begin, tuple(ranges), (max(owners, key=len), -1 - len(found)))
    return found


def _cut(unit: FlatUnit, units: list[FlatUnit], plain: list[str], known: ParameterFacts) -> dict[str, FlatSpan] | None:
    prefixes = [other.prefix for other in units if len(other.prefix) > len(unit.prefix)]
    orders = [known.groups]
    if known.ordered:
        chunks = {name: entry.chunks() for name, entry in known.reference.items()}
        first_names = {held: name for name, held in reversed(list(chunks.items())) if held}
        orders.append(tuple(name for name, held in chunks.items() if first_names.get(held) == name))
    for order in orders:
        names = [name for name in order if name.startswith(unit.prefix) and name not in plain]
        names = [name for name in names if not any(name.startswith(prefix) for prefix in prefixes)]
        shapes = {name: _shape(name, known) for name in names}
        whole = {name: shape for name, shape in shapes.items() if shape is not None}
        if len(whole) == len(shapes) and (found := spans_in_order(unit, whole)) is not None:
            return found
    return None


def _entry(name: str, span: FlatSpan, shape: tuple[int, ...], known: ParameterFacts, file: Path) -> TensorEntry:
    if math.prod(shape) != span.numel:
        raise CorruptCheckpointError(
            f"Parameter {name!r} has {span.numel} elements in {file.parent.name} (expected {math.prod(shape)}, as its "
            f"shape is {list(shape)}).",
            file=str(file),
        )
    return entry_of_ranges(name, span.dtype, shape, span.ranges, _memory_order(name, known))


def _memory_order(name: str, known: ParameterFacts) -> tuple[int, ...] | None:
    """Return the dimensions of a parameter from the slowest to the fastest, where the reference says so.

    FSDP flattens weights in channels-last format as they lie in memory. It cannot save optimizer state of them, so
    files that have that state need no reference to tell.
    """
    entry = known.reference.get(name)
    chunks = () if entry is None else entry.chunks()
    strides = chunks[0].strides if len(chunks) == 1 else None
    if entry is None or strides is None:
        return None
    order = tuple(sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim)))
    packed = row_major_strides(tuple(entry.shape[dim] for dim in order))
    if any(strides[dim] != step and entry.shape[dim] != 1 for dim, step in zip(order, packed, strict=True)):
        return None  # a view into something larger: says nothing about the model's own memory
    return order


def _aliases(result: Mapping[str, Any], known: ParameterFacts) -> dict[str, TensorEntry]:
    """Return the names of the reference that are tied to a parameter and have no key here."""
    by_source = {entry.chunks(): name for name, entry in known.reference.items() if entry.chunks() and name in result}
    aliases = {}
    for name, entry in known.reference.items():
        twin = result.get(by_source.get(entry.chunks(), "")) if name not in result else None
        if isinstance(twin, TensorEntry) and twin.shape == entry.shape:
            aliases[name] = TensorEntry(name, twin.dtype, twin.shape, twin.chunks())
    return aliases


def in_model_order(layout: Layout, names: Iterable[str]) -> bool:
    """Tell whether a checkpoint has its weights in the order of the model, as far as that can be known.

    Nothing says so. Files of ``torch.save`` keep that order unless a script sorted the names; safetensors, and indexes
    of several files, do not keep it.

    Args:
        layout: The checkpoint.
        names: The names of its weights, in order.
    """
    if layout.format == "model":  # made of the model itself
        return True
    of_several_files = layout.format == "torch_index" and len([*layout.files()]) > 1
    return not (layout.format in _SORTED or of_several_files or _were_sorted([*names]))


def _were_sorted(names: Sequence[str]) -> bool:
    """Tell whether somebody sorted the names, or turned them round.

    Layers are numbered upwards in a model, and torch's modules have their weight before their bias.
    """
    positions = {name: index for index, name in enumerate(names)}
    biases = [name for name in names if name.endswith("bias") and f"{name[:-4]}weight" in positions]
    if biases and all(positions[name] < positions[f"{name[:-4]}weight"] for name in biases):
        return True
    rising, falls = 0, False
    for one, two in itertools.pairwise(name.split(".") for name in names):
        a, b = next(((a, b) for a, b in zip(one, two, strict=False) if a != b), ("", ""))
        if a.isdecimal() and b.isdecimal():
            if int(a[:18]) > int(b[:18]):
                return True
        else:
            rising, falls = rising + (a < b), falls or a > b
    return rising >= _ENOUGH and not falls
