"""Decides what a conversion writes: which part, which tensors, under which names and dtypes, in which files."""

from __future__ import annotations

import collections
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from mmfsdp.basics.arguments import argument
from mmfsdp.basics.boxes import Ranks
from mmfsdp.basics.text import WRAPPER_PREFIX, parse_bytes
from mmfsdp.checkpoint.conversion.casts import chosen_dtypes
from mmfsdp.checkpoint.conversion.settings import Conversion, NameRules
from mmfsdp.checkpoint.conversion.unknown_calls import leave_out_unknown
from mmfsdp.checkpoint.empty_weights import refuse_empty_weights
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.files.cast_entries import CastEntry
from mmfsdp.checkpoint.files.journal import lasting_id
from mmfsdp.checkpoint.formats.common.format import Format, Made, ModelForm
from mmfsdp.checkpoint.formats.common.source import CheckpointContent
from mmfsdp.checkpoint.formats.opening import open_layout
from mmfsdp.checkpoint.layout import Layout, PlannedFile, TensorRef
from mmfsdp.checkpoint.tree import named_tensors, select_tensors, tensor_free_paths, top_level_key, weights_of
from mmfsdp.errors import ConfigError, FormatError

__all__ = ["Intent", "Selection", "intended", "select"]


@dataclass(frozen=True)
class Intent:
    """The plan of a conversion."""

    layout: Layout
    """Where ``sources`` are: the source, or what a recipe makes of it."""
    format: str
    """The part of a checkpoint to write."""
    planned: Sequence[PlannedFile]
    """The files that will be written."""
    save_id: str
    """Identifies what is written."""
    world_size: int
    """Number of ranks that it will be of."""
    written: Mapping[str, TensorEntry]
    """Every tensor by the name that a reader of the target will know it by."""
    sources: tuple[str, ...]
    """The source's tensors that are read."""
    files: Mapping[str, int]
    """Bytes of tensor data by file."""
    renamed: Mapping[str, str]
    """Old names in the part that is kept, and new ones."""
    casts: Mapping[str, str]
    """New dtypes by name."""
    dropped: tuple[str, ...]
    """Paths of the parts that are left out."""
    notes: tuple[str, ...]
    """Facts that the user should know."""


def intended(
    layout: Layout, target: Format, conversion: Conversion, overflowed: Counter[str], form: ModelForm
) -> Intent:
    """Decide what a conversion writes; reads data only to prove that weights are tied.

    Args:
        layout: The source.
        target: The format to write.
        conversion: What to write; ``keep`` and, for formats with files per rank, ``ranks`` are filled in.
        overflowed: Counts the elements of each tensor that turn out to be too large for the dtype of a cast.
        form: What the format makes of the weights, from the folder to be like if it needs one.

    Raises:
        ConfigError, FormatError: See ``convert``.
    """
    rules = NameRules(conversion.include, conversion.exclude, conversion.rename, conversion.strip_prefix)
    keep = conversion.keep or "model"
    ranks = Ranks.parse(1 if conversion.ranks is None else conversion.ranks)
    selection = select(layout, keep, conversion.drop, rules, use_ema=conversion.use_ema)
    if keep != "model":
        tree, notes = target.convert_states(selection.tree, layout)
        part = tree if selection.part is selection.tree else next(iter(tree.values()), selection.part)
        selection = replace(selection, tree=tree, part=part, notes=(*selection.notes, *notes))
    if conversion.recipe is not None:
        layout, selection = _through_recipe(
            layout, selection, conversion.recipe, conversion, [form.like] if conversion.like else []
        )
    by_recipe = conversion.recipe is not None
    if (made := form.named(_stored(layout, selection), open_layout, by_recipe=by_recipe)) is not None:
        layout, selection = _with_weights(layout, selection, made, target.name)
    names, stored = selection.names, _stored(layout, selection)
    refuse_empty_weights(stored, layout.path)
    if target.tensors_only and not stored and layout.tensors:
        raise ConfigError(
            f"{argument('keep', keep)} holds no tensor, and a {target.name} file holds nothing else. Write a .pth "
            "file, or keep another part.",
            config="keep",
        )
    chosen, kept_codes = ({}, ()) if conversion.dtype is None else chosen_dtypes(conversion.dtype, stored)
    casts = form.dtypes(chosen, stored)
    named: dict[str, TensorEntry] = {}
    for name, entry in stored.items():
        count = partial(_count, overflowed, name)
        named[name] = CastEntry.of(entry, casts[name], count) if name in casts else entry.counting(count)
    finished = form.finished(named, conversion.quantize, partial(_count, overflowed))
    named = dict(finished.tensors)
    selection = replace(selection, notes=(*selection.notes, *kept_codes, *finished.notes))
    # What lies beside the part, such as tensors in `meta`, is written as it is.
    bare = target.writes_bare(keep)
    tree = selection.part if bare else selection.tree
    all_names = names if bare else named_tensors(tree)
    tensors = {source: layout.tensors[source] for source in all_names.values()}
    tensors |= {names[name]: entry for name, entry in named.items() if name in names}
    limit = None if conversion.max_shard_size is None else parse_bytes(conversion.max_shard_size)
    content = CheckpointContent(tree, tensors, named, limit, ranks, keys=finished.keys, stem=form.stem())
    if conversion.resume:  # what is there already must not differ by its id
        text = f"{target.name} {keep} {ranks} {limit}"
        content = replace(content, save_id=lasting_id({**tensors, **named}, text))
    dropped = selection.dropped
    if target.tensors_only:
        written: Mapping[str, TensorEntry] = named
        dropped += tuple(path for path in tensor_free_paths(tree) if tree.get(path) not in ({}, []))
    else:
        written = {name: tensors[source] for name, source in all_names.items()}
        if bare and selection.tree.get("meta"):
            dropped += ("meta",)
    sources = tuple(names.values()) if target.tensors_only else tuple(tensors)
    planned = target.plan_write(content)
    return Intent(
        layout=layout,
        format=target.name,
        planned=planned,
        save_id=content.save_id,
        world_size=ranks.count if target.by_rank else 1,
        written=written,
        sources=sources,
        files={file.name: file.nbytes for file in planned if file.pieces or not file.name},
        renamed=rules.renames,
        casts=casts,
        dropped=dropped,
        notes=selection.notes,
    )


def _through_recipe(
    layout: Layout, selection: Selection, recipe: str, conversion: Conversion, folders: Sequence[Path]
) -> tuple[Layout, Selection]:
    """Return the layout and the selection with the weights that a recipe makes of those selected."""
    from mmfsdp.checkpoint.recipes import applying

    made = applying.rewritten(
        _stored(layout, selection),
        recipe,
        inverse=conversion.inverse,
        values=conversion.recipe_values,
        folders=[*applying.folders_of(layout), *folders],
    )
    return _with_weights(layout, selection, Made(made), "recipe")


def _stored(layout: Layout, selection: Selection) -> dict[str, TensorEntry]:
    """Return the tensors of the part that is kept, by their names in it."""
    return {name: layout.tensors[source] for name, source in selection.names.items()}


def _with_weights(layout: Layout, selection: Selection, made: Made, maker: str) -> tuple[Layout, Selection]:
    # What lies beside the weights keeps its name, which must not be one of the new ones.
    part = {name: TensorRef(f"{maker}:{name}") for name in made.tensors}
    tensors = {**layout.tensors, **{part[name].name: entry for name, entry in made.tensors.items()}}
    selection = replace(_with_part(selection, part), notes=(*selection.notes, *made.notes))
    return replace(layout, tensors=tensors), selection


def _with_part(selection: Selection, part: dict[Any, Any]) -> Selection:
    tree = {key: part if value is selection.part else value for key, value in selection.tree.items()}
    return replace(selection, tree=tree, part=part)


def _count(overflowed: Counter[str], name: str, elements: int) -> None:
    overflowed[name] += elements


@dataclass(frozen=True)
class Selection:
    """The part of a checkpoint to write."""

    tree: dict[Any, Any]
    """The content; its ``TensorRef``s name the tensors as the source does."""
    part: Any
    """The part that names are relative to: the weights, the content of a key, or all of the tree."""
    dropped: tuple[str, ...]
    """Paths of what is left out, sorted into top-level keys and then excluded names."""
    notes: tuple[str, ...]
    """Facts that the user should know."""

    @cached_property
    def names(self) -> dict[str, str]:
        """The names of tensors within the part, mapped to their names in the source."""
        return named_tensors(self.part)


def select(layout: Layout, keep: str, drop: Sequence[str], rules: NameRules, *, use_ema: bool = False) -> Selection:
    """Return the part of a checkpoint to write, with the rules applied.

    Args:
        layout: The source.
        keep: Which part: ``'model'``, ``'all'`` or a top-level key.
        drop: With ``'all'``, the top-level keys to leave out.
        rules: Which names are taken, and what they become.
        use_ema: Take the averaged weights as the model's.

    Raises:
        ConfigError: The part is unknown, a rule matches nothing, or two tensors would get one name.
        FormatError: The source has no such part.
    """
    if not isinstance(layout.tree, dict):
        weights_of(layout)  # raises
    notes: tuple[str, ...] = ()
    if keep == "all":
        dropped = {key: str(key) for key in (top_level_key(layout, name, "drop") for name in drop)}
        kept = {key: value for key, value in layout.tree.items() if key not in dropped} if dropped else layout.tree
        known, unknown = leave_out_unknown(kept)
        part, removed = _edited(known, rules)
        return Selection(part, part, (*dropped.values(), *unknown, *removed), notes)
    if keep == "model":
        found = weights_of(layout)
        part = found.weights
        if use_ema:
            part, notes = _averaged(layout, part)
        part, unknown = leave_out_unknown(part)
        beside, others = leave_out_unknown({"meta": found.beside.get("meta", {})})
        part, removed = _edited(part, rules)
        tree = {"state_dict": part, "meta": {}, **beside}
        return Selection(tree, part, (*found.left_out("meta"), *unknown, *others, *removed), notes)
    key = top_level_key(layout, keep)
    others = [name for name in layout.top_level if name != keep]
    if isinstance(layout.tree[key], TensorRef):
        part = {key: layout.tree[key]}
        return Selection(part, part, tuple(others), notes)
    known, unknown = leave_out_unknown({key: layout.tree[key]})
    part, removed = _edited(known.get(key, {}), rules)
    return Selection({key: part}, part, (*others, *unknown, *removed), notes)


_WRITTEN_BY_MMENGINE = ("mmengine_version", "mmengine")  # by Runner, and by FlexibleRunner
_WRITTEN_BY_LIGHTNING = {"state_dict", "current_model_state", "averaging_state"}  # by its callback WeightAveraging


def _averaged(layout: Layout, weights: dict[Any, Any]) -> tuple[dict[Any, Any], tuple[str, ...]]:
    if layout.tree.keys() >= _WRITTEN_BY_LIGHTNING:
        return weights, (
            "Lightning's WeightAveraging saves the averaged weights under 'state_dict' already, and the plain ones "
            "under 'current_model_state': 'state_dict' was taken",
        )
    averaged = layout.tree.get("ema_state_dict")
    if not isinstance(averaged, dict):
        raise FormatError(
            f"{layout.path.name} has no 'ema_state_dict', so no averaged weights. Leave out {argument('use_ema')} "
            "for the weights that it has.",
            file=str(layout.path),
        )
    meta = layout.tree.get("meta")
    if isinstance(meta, dict) and not meta.keys().isdisjoint(_WRITTEN_BY_MMENGINE):
        # EMAHook.before_save_checkpoint swaps the two: mmengine/hooks/ema_hook.py, _swap_ema_state_dict.
        return weights, (
            "MMEngine's EMAHook saves the averaged weights under 'state_dict' already, and the plain ones under "
            "'ema_state_dict': 'state_dict' was taken",
        )
    wrapped = {str(key): value for key, value in averaged.items() if str(key).startswith(WRAPPER_PREFIX)}
    named = {key.removeprefix(WRAPPER_PREFIX): value for key, value in wrapped.items()}
    unknown = [name for name in named if name not in weights]
    if not named or unknown:
        problem = (
            f"{unknown[0]!r}, which 'state_dict' lacks" if unknown else f"no key that begins with {WRAPPER_PREFIX!r}"
        )
        raise FormatError(f"'ema_state_dict' of {layout.path.name} holds {problem}.", file=str(layout.path))
    replaced = collections.OrderedDict((key, named.get(str(key), value)) for key, value in weights.items())
    vars(replaced).update(vars(weights) if isinstance(weights, collections.OrderedDict) else {})
    return replaced, ()


def _edited(part: Any, rules: NameRules) -> tuple[Any, list[str]]:
    if not rules.active:
        return part, []
    if not isinstance(part, dict):
        raise ConfigError("Names can be chosen and changed only within a mapping.")
    removed: list[str] = []
    edited = _edit(part, "", rules, removed)
    rules.check_all_used(named_tensors(part))
    if not select_tensors(edited):
        raise ConfigError("No tensor is left to write; include or exclude less.")
    return edited, removed


def _edit(part: dict[Any, Any], path: str, rules: NameRules, removed: list[str]) -> dict[Any, Any]:
    ordered = isinstance(part, collections.OrderedDict)
    result: dict[Any, Any] = collections.OrderedDict() if ordered else {}
    origins: dict[Any, str] = {}
    for key, child in part.items():
        name = f"{path}/{key}" if path else str(key)
        if rules.excluded(name):
            removed.append(name)
            continue
        new: Any = key
        if isinstance(child, dict):
            edited = _edit(child, name, rules, removed)
            if child and not edited:
                continue
            child = edited
        elif select_tensors(child):
            if not rules.included(name):
                removed.append(name)
                continue
            new = _new_key(key, name, path, rules)
        if new in result:
            raise ConfigError(f"{origins[new]!r} and {name!r} would both be named {str(new)!r}. Change the renaming.")
        result[new], origins[new] = child, name
    if ordered:
        vars(result).update(_with_renamed_modules(vars(part), rules))
    return result


def _new_key(key: Any, name: str, path: str, rules: NameRules) -> Any:
    new = rules.renamed(name)
    if new == name:
        return key
    parent = f"{path}/" if path else ""
    if not new.startswith(parent) or new == parent or (path and "/" in new.removeprefix(parent)):
        raise ConfigError(f"{name!r} would be renamed to {new!r}: a tensor's last key can change, not where it lies.")
    return new.removeprefix(parent)


def _with_renamed_modules(attributes: Mapping[str, Any], rules: NameRules) -> dict[str, Any]:
    # A module's state dict carries `_metadata`: its modules' versions by their names, which change with the keys.
    versions = attributes.get("_metadata")
    if not isinstance(versions, dict) or not (rules.rename or rules.strip_prefix):
        return dict(attributes)
    renamed = collections.OrderedDict(
        (rules.renamed(f"{module}.", count=False).rstrip(".") if module else module, version)
        for module, version in versions.items()
    )
    return {**attributes, "_metadata": renamed}
