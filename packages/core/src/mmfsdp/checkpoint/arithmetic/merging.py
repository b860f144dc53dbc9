"""Merges a LoRA adapter into the weights of its base, which may be sharded and of any format."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmfsdp.basics.arguments import argument
from mmfsdp.basics.codes import codes_in_units, how_to_restore, not_restored, scales_of
from mmfsdp.basics.dtypes import is_floating_point
from mmfsdp.basics.text import name_list
from mmfsdp.checkpoint.arithmetic.adapters import PREFIX, Adapter, read_adapter
from mmfsdp.checkpoint.arithmetic.base_names import BaseNames, find_names
from mmfsdp.checkpoint.arithmetic.diffusers_adapters import diffusers_file, read_diffusers_adapter
from mmfsdp.checkpoint.arithmetic.low_rank import LowRankSum, transposed
from mmfsdp.checkpoint.arithmetic.matching import for_weights, restored_for
from mmfsdp.checkpoint.conversion.converting import ConversionReport, convert
from mmfsdp.checkpoint.conversion.settings import Conversion
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.files.cast_entries import CastEntry
from mmfsdp.checkpoint.files.elements import require_numpy
from mmfsdp.checkpoint.files.planned_files import Progress
from mmfsdp.checkpoint.formats.huggingface.memory_names import Located, described_model
from mmfsdp.checkpoint.formats.huggingface.model_folders import CONFIG
from mmfsdp.checkpoint.formats.huggingface.weight_names import also_the_head, is_head
from mmfsdp.checkpoint.formats.opening import opened
from mmfsdp.checkpoint.geometry import check_coverage
from mmfsdp.checkpoint.layout import Layout, TensorRef
from mmfsdp.checkpoint.tree import common_prefix, part_tensors, weights_of
from mmfsdp.errors import ConfigError

__all__ = ["merge_lora"]


def merge_lora(
    base: str | os.PathLike[str] | Layout,
    adapter: str | os.PathLike[str],
    target: str | os.PathLike[str],
    conversion: Conversion | None = None,
    *,
    prefix: str = "",
    component: str | None = None,
    reference: str | os.PathLike[str] | Layout | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> ConversionReport:
    """Write the weights of a base with a LoRA adapter merged into them, in constant memory and without torch.

    A weight becomes ``weight + scale * B @ A``, computed in float64 and rounded once to its dtype or to ``dtype``.
    ``scale`` is ``alpha / rank``, or ``alpha / sqrt(rank)`` with rsLoRA. Every other weight is copied. Tensors that the
    adapter holds whole (``modules_to_save``, trained biases) take the place of the base's, in the base's dtype; those
    that the base lacks, such as a new head, are added. Names that share their bytes with a weight that is changed, such
    as a tied head, change with it.

    If the base does not have the adapter's names, the model in memory may have them: then the table of
    transformers for the model of the base's ``config.json`` is asked, if it is installed, and the shipped recipes. The
    result has the base's names.

    Args:
        base: The base's checkpoint, of any format and sharding.
        adapter: The folder that peft's ``save_pretrained`` wrote, or the file or folder of diffusers'
            ``save_lora_weights``.
        target: The path to write; see `convert`.
        conversion: What to write and how.
        prefix: Stands before the adapter's module names in the base, such as ``'model.'``.
        component: What the base is in diffusers' pipeline, such as ``'unet'``, if the adapter is for several and the
            base's folder is not named so.
        reference: A complete checkpoint of the same model, if the base does not hold all shapes; see ``open_layout``.
        dry_run: Check and report everything that can be known without writing.
        progress: Called with the bytes written so far and the bytes to write.
        **settings: Fields of `Conversion`, as for `convert`. Only weights are written: ``keep`` is ``'model'``.

    Raises:
        ConfigError: The adapter is for another base: the message lists modules and shapes. A setting is wrong, or numpy
            is missing.
        FormatError: The adapter is not LoRA, or is of a variant such as DoRA.
        CheckpointError: As for `convert`.

    Example:
        >>> merge_lora("llama", "runs/lora", "merged", max_shard_size="5GB")
    """
    require_numpy("Merging an adapter")
    chosen = for_weights((conversion or Conversion()).changed(settings), "Merging an adapter")
    layout = opened(base, trust=chosen.trust, reference=reference, format=chosen.source_format)
    [layout] = restored_for([layout], target, chosen)
    merged, notes = _merged(layout, _read(adapter, component, layout), prefix)
    report = convert(merged, target, chosen, dry_run=dry_run, progress=progress)
    return replace(report, notes=(*notes, *report.notes))


def _read(adapter: str | os.PathLike[str], component: str | None, base: Layout) -> Adapter:
    if (file := diffusers_file(adapter)) is not None:
        return read_diffusers_adapter(file, component, _folder(base).name)
    if component is not None:
        raise ConfigError(
            f"{argument('component', component)} is for an adapter of a pipeline, in one file as diffusers writes it, "
            f"which {os.fspath(adapter)!r} is not. Leave it out."
        )
    return read_adapter(adapter)


def _folder(base: Layout) -> Path:
    return base.path if base.path.is_dir() else base.path.parent


def _merged(base: Layout, adapter: Adapter, prefix: str) -> tuple[Layout, tuple[str, ...]]:
    found = find_names(
        base.tensors, weights_of(base).names, _folder(base), [prefix + name for name in _wanted(adapter)]
    )
    names = found.stored
    _check_modules(base, found, adapter, prefix)
    _refuse_codes(base, found, adapter, prefix)
    check_coverage(adapter.layout)
    changed: dict[str, TensorEntry] = {}
    added: dict[str, TensorEntry] = {}
    wrong = []
    for name, entry in adapter.replaced.items():
        if prefix + name not in found:
            if not found.keep(prefix + name, entry):
                wrong.append(f"only the adapter has {name!r}, and its name in files is not known")
            added[prefix + name] = replace(entry, name=prefix + name)
            continue
        if prefix + name not in names:
            wrong.append(f"{name!r} is replaced, and the base has it in {len(found.of(prefix + name))} parts")
            continue
        stored = base.tensors[names[prefix + name]]
        kept = is_floating_point(stored.dtype) and stored.dtype != entry.dtype
        changed[stored.name] = replace(CastEntry.of(entry, stored.dtype, _ignore) if kept else entry, name=stored.name)
    for module, factors in adapter.factors.items():
        left, right = (
            (factors.b, factors.a) if not factors.transposed else (transposed(factors.a), transposed(factors.b))
        )
        shape = (left.shape[0], *right.shape[1:])
        for key, box in found.of(f"{prefix}{module}.weight"):
            entry = changed.get(key, base.tensors[key])
            whole = entry.shape if box is None else box.whole
            if shape != whole or not is_floating_point(entry.dtype):
                has = f"{[*whole]} of {entry.dtype}"
                wrong.append(f"{module!r} needs a weight of shape {[*shape]}, and the base has {has}")
                break
            changed[key] = LowRankSum.of(entry, *_cut(left, right, box), factors.scale)
    if wrong:
        raise _another_base(base, adapter, wrong)
    tied = _tied(base, names, changed)
    shared = _with_missing_head(base, names, adapter, prefix)
    resized = [name for name, entry in changed.items() if entry.shape != base.tensors[name].shape]
    facts = {
        "As in the base, because the adapter has no factors for them, though its config has target_modules for them": [
            *_lacking(base, names, adapter, prefix)
        ],
        "Tied to a weight that is merged, and so merged too": [*tied],
        "Also merged into the head, which config.json ties to it": [shared] if shared else [],
        "Of another shape than in the base, which config.json must say": resized,
        "Added, because only the adapter has it": [*added],
    }
    tensors = {**base.tensors, **changed, **tied, **added}
    # The folder, in which the config lies, too, is not to be written to.
    origins = (*(base.origins or (base,)), replace(adapter.layout, path=adapter.config.parent))
    merged = replace(base, tensors=tensors, tree=_with(base, added), origins=origins)
    notes = [f"{what}: {name_list(named, 5)}" for what, named in facts.items() if named]
    if found.table:
        notes.append(f"The adapter names modules as the model in memory does; {found.table} says what files call them")
    return merged, tuple(notes)


def _cut(left: TensorEntry, right: TensorEntry, box: Located | None) -> tuple[TensorEntry, TensorEntry]:
    """Return the rows and columns of two factors whose product is a box of theirs."""
    if box is None:
        return left, right
    (row, *columns), (rows, *widths) = box.offsets, box.sizes
    return (
        left.cut((row, *(0 for _ in left.shape[1:])), (rows, *left.shape[1:])),
        right.cut((0, *columns), (right.shape[0], *widths)),
    )


def _wanted(adapter: Adapter) -> list[str]:
    """Return the names that a base must have."""
    return [f"{module}.weight" for module in adapter.factors] or [*adapter.replaced]


def _lacking(base: Layout, names: Mapping[str, str], adapter: Adapter, prefix: str) -> Iterator[str]:
    """Yield the modules of the base that were trained by the adapter's config, and that the adapter lacks."""
    for name, stored in names.items():
        module = name.removeprefix(prefix).removesuffix(".weight")
        if name == f"{prefix}{module}.weight" and adapter.lacks(module) and len(base.tensors[stored].shape) > 1:
            yield module


def _with(base: Layout, added: Iterable[str]) -> dict[Any, Any]:
    """Return the tree of a checkpoint with further tensors among its weights."""
    found = weights_of(base)
    tree: dict[Any, Any] = {**found.weights, **{name: TensorRef(name) for name in added}}
    if not found.where:
        return {**found.beside, **tree}
    for depth in range(len(found.where), 0, -1):
        above = base.tree
        for key in found.where[: depth - 1]:
            above = above[key]
        tree = {**above, found.where[depth - 1]: tree}
    return tree


def _with_missing_head(base: Layout, names: Mapping[str, str], adapter: Adapter, prefix: str) -> str | None:
    """Return a weight that factors change and that is the head, too; raise if the adapter replaces it.

    The head was not replaced while the adapter was trained, unless it says so.
    """
    folder = _folder(base)
    merged = [f"{prefix}{module}.weight" for module in adapter.factors]
    kept = {*names, *(prefix + name for name in adapter.replaced)}
    replaced = [prefix + name for name in adapter.replaced if prefix + name not in merged]
    if (name := also_the_head(folder, kept, replaced)) is not None:
        raise ConfigError(
            f"The adapter replaces {name!r}, and the model of {folder.name} ties the head to it: no file holds a head, "
            f"and {CONFIG} does not rule it out. The adapter was trained with the head as it is in the base: merged, "
            "the two differ. Merge it with peft, which unties them, or train with ensure_weight_tying=True.",
            file=str(folder / CONFIG),
        )
    return also_the_head(folder, kept, merged)


def _ignore(_: int) -> None:
    return None


def _tied(base: Layout, names: Mapping[str, str], changed: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    by_bytes = {
        (base.tensors[name].shape, base.tensors[name].chunks()): entry
        for name, entry in changed.items()
        if isinstance(entry, LowRankSum)
    }
    others = [base.tensors[name] for name in names.values() if name not in changed]
    return {
        entry.name: replace(by_bytes[key], name=entry.name)
        for entry in others
        if (key := (entry.shape, entry.chunks())) in by_bytes
    }


def _check_modules(base: Layout, found: BaseNames, adapter: Adapter, prefix: str) -> None:
    names, wanted = found.stored, _wanted(adapter)
    missing = [name for name in wanted if prefix + name not in found]
    if not missing:
        return
    _refuse_factors_of_a_tied_head(base, names, adapter, prefix, missing)
    problems = [f"it has no {prefix + name!r}" for name in missing[:5]]
    if len(missing) > 5:
        problems.append(f"and {len(missing) - 5} more are missing")
    ends = {name.removesuffix(wanted[0]) for name in names if name.endswith(wanted[0])}
    other = next((end for end in sorted(ends, key=len) if all(end + name in names for name in wanted)), None)
    hint = f" All of them are there below {other!r}: set {argument('prefix')} to it." if other is not None else ""
    if longer := common_prefix(wanted, {name.removeprefix(prefix) for name in names}):
        hint = f" Without {longer!r} they are there: {_renaming(adapter, longer)}"
    folder = _folder(base)
    if hint and (folder / CONFIG).is_file() and described_model(folder) is None:
        hint += " Or install transformers 5, if it has this model: names of models in memory are then found here."
    raise _another_base(base, adapter, problems, hint)


def _renaming(adapter: Adapter, longer: str) -> str:
    """Return how an adapter's names lose a prefix. The base keeps its own, which readers of the result expect."""
    file, start = adapter.layout.path.name, PREFIX + longer
    if not all(name.startswith(start) for name in adapter.layout.tensors):
        return "remove it from the names of the adapter."
    return (
        f"copy the adapter's folder, and write its {file} again into the copy, converted with "
        f"rename={{{f'^{re.escape(start)}'!r}: {PREFIX!r}}}."
    )


def _refuse_factors_of_a_tied_head(
    base: Layout, names: Mapping[str, str], adapter: Adapter, prefix: str, missing: Iterable[str]
) -> None:
    """Raise a ``ConfigError`` if the adapter changes a head that the base has only as its embedding."""
    head = next((prefix + name for name in missing if is_head(prefix + name)), None)
    first = None if head is None else also_the_head(_folder(base), names, names)
    if first is None:
        return
    raise ConfigError(
        f"The adapter changes {head!r}, which {base.path.name} holds only as {first!r}, to which its model ties it: "
        "merged, the two differ, and one tensor cannot be both. Untie the base first, in transformers: set "
        "model.config.tie_word_embeddings = False, give the head a copy (model.lm_head.weight = "
        "torch.nn.Parameter(model.get_input_embeddings().weight.detach().clone())) and save_pretrained() it to another "
        "folder; then merge into that.",
        file=str(adapter.layout.path),
    )


def _refuse_codes(base: Layout, found: BaseNames, adapter: Adapter, prefix: str) -> None:
    """Raise a ``ConfigError`` if a weight of the base that changes is stored as codes."""
    weights = {name: base.tensors[source] for name, source in found.stored.items()}
    scales = codes_in_units(weights) | scales_of(weights)
    changing = {f"{prefix}{module}.weight" for module in adapter.factors} | {prefix + name for name in adapter.replaced}
    if (name := next((name for name in scales if name in changing), None)) is not None:
        raise ConfigError(
            f"{name!r} of the base is {weights[name].dtype} in units of {scales[name]!r}, and nothing can be added to "
            f"such numbers. {how_to_restore(name, weights)}",
            file=str(base.path),
        )


def _another_base(base: Layout, adapter: Adapter, problems: list[str], hint: str = "") -> ConfigError:
    named = f" It was trained on {adapter.base_name!r}." if adapter.base_name else ""
    more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
    others = f" {codes}" if (codes := not_restored(part_tensors(base, "model"))) else ""
    return ConfigError(
        f"The adapter does not fit {str(base.path)!r}: {'; '.join(problems[:8])}{more}.{named}{hint or others}",
        file=str(adapter.layout.path),
    )
