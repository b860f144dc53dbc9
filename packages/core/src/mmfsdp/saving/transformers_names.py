"""Gives weights the names and shapes of a transformers model in memory, by the conversions that transformers lists."""

from __future__ import annotations

import copy
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn

from mmfsdp.basics.codes import other_codes, scales_of
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.recipes.rearranging import fused, split, stacked
from mmfsdp.checkpoint.recipes.standing_in import StandIns
from mmfsdp.errors import ConfigError

__all__ = ["as_transformers_names"]

_Converter = Any
"""A ``WeightConverter`` of transformers: patterns of names in files and in memory, and the operations between."""


def as_transformers_names(model: nn.Module, tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry] | None:
    """Return weights as transformers' ``from_pretrained`` names and shapes them. Not collective; reads no data.

    Args:
        model: A model, which may be sharded.
        tensors: The weights as a file names them.

    Returns:
        The weights; None if the model is not one of transformers, this release of it lists no conversions, or these
        rearrange weights in a way that is not known here, or codes.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return None
    if not isinstance(model, transformers.PreTrainedModel):
        model = getattr(model, "module", model)  # engine fsdp1 wraps it
    if not isinstance(model, transformers.PreTrainedModel):
        return None
    if scales_of(tensors) or other_codes(tensors):
        return None
    renamed = _renamed(model, tensors)
    if renamed is None:
        return None
    stand_ins = StandIns()
    made: dict[str, TensorEntry] = {}
    groups: defaultdict[str, defaultdict[str, list[TensorEntry]]] = defaultdict(lambda: defaultdict(list))
    converters: dict[str, _Converter] = {}
    for name, (target, pattern, converter) in renamed.items():
        if converter is not None:
            groups[target][pattern].append(stand_ins.of(tensors[name]))
            converters[target] = converter
        elif target in made:
            return None
        else:
            made[target] = stand_ins.of(tensors[name])
    for target, parts in groups.items():
        converted = _converted(target, parts, converters[target])
        if converted is None or {*converted} & {*made}:
            return None
        made |= converted
    try:
        return {name: replace(stand_ins.resolved(entry), name=name) for name, entry in made.items()}
    except ConfigError:  # computed and stored parts, mixed
        return None


def _renamed(model: Any, names: Iterable[str]) -> dict[str, tuple[str, str, _Converter]] | None:
    """Return each name's own in memory, and the pattern and the converter that take its tensor, if one does."""
    plain = _unsharded(model)
    try:
        from transformers import conversion_mapping
        from transformers import core_model_loading as loading

        transforms: list[Any] = conversion_mapping.get_model_conversion_mapping(plain)
        renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
        converters = [each for each in transforms if not isinstance(each, loading.WeightRenaming)]
        taken_by = {pattern: each for each in converters for pattern in each.source_patterns}
        own, prefix = plain.state_dict(), plain.base_model_prefix
        renamed: dict[str, tuple[str, str, _Converter]] = {}
        for name in sorted(names, key=_natural):
            target, pattern = loading.rename_source_key(name, renamings, converters, prefix, own)
            renamed[name] = (target, pattern or "", taken_by.get(pattern))
        return renamed
    except (ImportError, AttributeError, TypeError):
        return None  # transformers 4, whose models have the names of files; or a release whose table is another


def _unsharded(model: Any) -> Any:
    """Return the model as its class makes it, on the meta device: the names of classes decide on conversions.

    Engines give modules other classes, or wrap them.
    """
    own = next(each for each in type(model).__mro__ if not each.__module__.startswith(("torch.", "mmfsdp.")))
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return own(copy.deepcopy(model.config))
    except Exception:  # whatever a class of the user raises: the conversions are then not known
        return None


def _converted(
    target: str, parts: Mapping[str, Sequence[TensorEntry]], converter: _Converter
) -> dict[str, TensorEntry] | None:
    """Return what a converter makes of the tensors that its patterns took, by name; None if that is not known here."""
    order = [pattern for pattern in converter.source_patterns if pattern in parts]
    targets = [*converter.target_patterns]
    if order != [*converter.source_patterns] or (len(targets) > 1 and targets[0] not in target):
        return None
    lists = [parts[pattern] for pattern in order]
    try:
        for operation in converter.operations:
            kind = type(operation).__name__
            if kind == "MergeModulelist":
                lists = [[stacked(target, each, operation.dim)] for each in lists]
            elif kind == "Concatenate":
                lists = [[fused(target, [entry for each in lists for entry in each], operation.dim)]]
            elif kind == "Chunk" and len(lists) == 1 and len(lists[0]) == 1:
                whole = lists[0][0]
                sizes = [whole.shape[operation.dim] // len(targets)] * len(targets)
                names = [target.replace(targets[0], each) for each in targets]
                lists = [[entry] for entry in split(whole, names, operation.dim, sizes)]
            else:
                return None
    except ValueError:  # they do not fit together
        return None
    if len(lists) != len(targets) or any(len(each) != 1 for each in lists):
        return None
    names = [target.replace(targets[0], each) for each in targets]
    return {name: entry for name, [entry] in zip(names, lists, strict=True)}


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts numbers in names as numbers."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"\.", name)]
