"""Fills a sharded model with the weights of any checkpoint: disks read each byte once, names may be rewritten."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.nn as nn

from mmfsdp.basics.codes import not_restored
from mmfsdp.basics.text import name_list
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.huggingface.memory_names import as_in_memory, model_on_meta
from mmfsdp.checkpoint.layout import Layout, TensorRef
from mmfsdp.checkpoint.recipes.applying import apply_recipe, folders_of
from mmfsdp.checkpoint.recipes.recipe_search import fitting_recipes
from mmfsdp.checkpoint.tree import common_prefix, part_tensors
from mmfsdp.collective.steps import check_same_arguments, on_all_ranks
from mmfsdp.errors import ConfigError, StateDictError
from mmfsdp.runtime.sharded_model import ShardedModel, find_sharded_model
from mmfsdp.saving.reading.contents import open_weights
from mmfsdp.saving.reading.initial_weights import left_initial, module_globs, without_patterns
from mmfsdp.saving.reading.load import reference_of, under_tied_names
from mmfsdp.saving.reading.own_names import count_filled, names_of_params, own_shapes, under_own_names
from mmfsdp.saving.reading.source import Source, lazy_tensors
from mmfsdp.state.lazy_tensors import LazyTensor
from mmfsdp.state.model import load_model_state_dict
from mmfsdp.state.report import LoadReport, compare_shapes

__all__ = ["load_pretrained"]


def load_pretrained(
    model: nn.Module,
    path: str | os.PathLike[str],
    rules: str | os.PathLike[str] | None = None,
    *,
    inverse: bool = False,
    values: Mapping[str, int] | None = None,
    strict: bool = False,
    ignore_mismatched_sizes: bool = False,
    verify: bool = True,
    reference: str | os.PathLike[str] | Layout | None = None,
    initial: Sequence[str] = (),
) -> LoadReport:
    """Fill a sharded model with the weights of a checkpoint of any kind. Collective: every rank.

    Each rank reads its own part. Where several ranks hold the same part, one of them reads it and sends it to the
    others, so that each byte is read once, whatever the number of ranks. Only ranks that train on the CPUs of one host
    copy files of its disks each for itself, from the page cache: the disk still reads each byte once. Weights that the
    model ties are read once and stay tied, whichever of their names the checkpoint has.

    Weights that are codes of 8 bits with scales beside them are restored, unless the model holds the same codes.

    A model of transformers 5 gets weights as ``from_pretrained`` converts them, such as experts as one stack, where the
    checkpoint's own names do not fill it.

    Names may lack the prefix that DistributedDataParallel (``module.``) or a Hugging Face model (its
    ``base_model_prefix``) gives them, or have one that the model's names lack.

    Args:
        model: A sharded model, such as one that was planned on the meta device.
        path: Anything that `mmfsdp.checkpoint.open_layout` reads, on a disk that all hosts share or on a server; the
            same on every rank. Nothing but the weights is read, and no pickled object is made.
        rules: A recipe that turns the checkpoint's names and shapes into the model's: the name of one that
            `mmfsdp.checkpoint.known_recipes` lists, or the path of a file.
        inverse: Undo the recipe instead.
        values: Numbers that the recipe needs; see `mmfsdp.checkpoint.apply_recipe`.
        strict: Raise if a name is missing or unexpected. Otherwise the first rank warns, and what is missing keeps its
            initial value.
        ignore_mismatched_sizes: Leave weights alone whose shape differs, such as a head for other classes, instead of
            raising.
        verify: Compare what is read with the checkpoint's checksums, if it has any.
        reference: See `mmfsdp.checkpoint.open_layout`; by default the model's own names and shapes.
        initial: Globs of modules or parameters that keep their initial values on purpose, such as
            ``["model.layers.*.mlp.experts"]``. It is needed only for layers that the checkpoint seems to hold: see
            ``StateDictError``.

    Returns:
        The names and shapes that did not match; the same on every rank.

    Raises:
        ConfigError: There is no such recipe, or it does not fit the checkpoint; raised on every rank.
        CheckpointError: The checkpoint cannot be read, is damaged, or was replaced while it was read; raised on every
            rank.
        RankMismatchError: Ranks gave different paths or other arguments.
        StateDictError: No name matches, or a shape differs, or anything does with ``strict``, or weights are codes that
            cannot be restored; or layers would keep initial values although other layers of their list are in the
            checkpoint, or it has these layers under other names. Raised on every rank, and nothing is changed.

    Example:
        >>> with parameters_on_meta():
        ...     model = build_llama(config)
        >>> shard(model, {"wrap": "auto"})
        >>> load_pretrained(model, "llama-8b", "meta-llama-to-hf")
    """
    state = find_sharded_model(model)
    scope = state.scope
    initial = [initial] if isinstance(initial, str) else [*initial]
    given: dict[str, Any] = {"rules": rules and str(rules), "inverse": inverse, "values": values, "strict": strict}
    given |= {"ignore_mismatched_sizes": ignore_mismatched_sizes, "verify": verify, "initial": initial}
    check_same_arguments(scope, "load_pretrained()", given)
    if strict and ignore_mismatched_sizes:
        raise ConfigError("'strict' and 'ignore_mismatched_sizes' contradict each other. Set one of them.")

    unchanged: list[Layout] = []

    def rewrite(layout: Layout) -> Layout:
        unchanged[:] = [layout]
        if rules is not None:
            return apply_recipe(layout, rules, inverse=inverse, values=values)
        weights = _converted(state, part_tensors(layout, "model"))
        tree = {name: TensorRef(name) for name in weights}
        return replace(layout, tensors=weights, tree=tree)

    def advise(filled: Collection[str]) -> str:
        return _shipped_recipe(unchanged[0], state, filled, initial, values)

    def fitted(source: Source) -> dict[str, LazyTensor]:
        weights = _checked(
            _share_tied(source),
            state,
            path,
            advise,
            initial=initial,
            strict=strict,
            any_shape=ignore_mismatched_sizes,
            has_rules=rules is not None,
        )
        return under_tied_names(weights, state)

    known = None if reference is None else reference if isinstance(reference, Layout) else Path(reference)
    source, weights = open_weights(
        path,
        scope,
        verify=verify,
        reference=lambda: known or reference_of(model),
        rewrite=rewrite,
        change=fitted,
    )
    report = load_model_state_dict(model, weights, strict=strict, read_once=True)
    on_all_ranks(source.check_unchanged, scope)
    if scope.is_first and not report.clean:
        advice = advise([*weights]) if report.missing and report.unexpected else ""
        warnings.warn(
            f"{path} does not fit {type(state.module).__name__} in all names: {report}.{advice and f' {advice}'}",
            stacklevel=2,
        )
    return report


def _share_tied(source: Source) -> dict[str, LazyTensor]:
    """Return the weights by name; names whose data is the same, as of weights that were tied, have one tensor."""
    found: dict[tuple[str, tuple[int, ...], Any], LazyTensor] = {}
    weights = lazy_tensors(source)
    for name, tensor in weights.items():
        entry = source.layout.tensors[name]
        if isinstance(entry.stored, tuple):
            weights[name] = found.setdefault((entry.dtype, entry.shape, entry.stored), tensor)
    return weights


def _converted(state: ShardedModel, weights: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the weights as transformers converts them for its model, if that fills more of the model."""
    own = own_shapes(state)

    def rate(given: Mapping[str, TensorEntry]) -> int:
        spelt = under_own_names(given, state)
        return count_filled([name for name, entry in spelt.items() if entry.shape == own.get(name)], state)

    filled = rate(weights)
    if filled == len(names_of_params(state)) or (model := model_on_meta(state.module)) is None:
        return weights
    converted = as_in_memory(model, weights)
    return weights if converted is None or rate(converted) <= filled else converted


def _checked(
    weights: dict[str, LazyTensor],
    state: ShardedModel,
    path: Any,
    advise: Callable[[Collection[str]], str],
    *,
    initial: Sequence[str],
    strict: bool,
    any_shape: bool,
    has_rules: bool,
) -> dict[str, LazyTensor]:
    """Return the weights under the model's names.

    Raises:
        StateDictError: They do not fit the model.
    """
    own = own_shapes(state)
    spelt = under_own_names(weights, state)
    if not spelt:
        raise StateDictError(_unlike(weights, own, state, path, advise(())))
    if not any_shape:
        _check_shapes(spelt, own, state, path, advise)
    left = without_patterns(left_initial(names_of_params(state), own, spelt), initial)
    if left and not strict:  # which raises for each name that is missing
        raise StateDictError(_unfilled(spelt, own, left, state, path, advise(spelt), has_rules=has_rules))
    if strict and count_filled(spelt, state) < len(names_of_params(state)) and (advice := advise(spelt)):
        raise StateDictError(f"{path} does not fill all parameters of {type(state.module).__name__}. {advice}")
    return spelt


def _unlike(
    weights: Mapping[str, LazyTensor], own: Collection[str], state: ShardedModel, path: Any, advice: str
) -> str:
    remedy = advice or (
        "Give 'rules', a recipe that rewrites them; mmfsdp.checkpoint.known_recipes() lists those that are shipped."
    )
    if prefix := common_prefix(weights, own):
        remedy = f"They match without the prefix {prefix!r}: give 'rules', a recipe that removes it."
    remedy = not_restored(weights) or remedy
    return (
        f"No tensor of {path} has a name of {type(state.module).__name__}. It has {name_list([*weights])}; the model "
        f"has {name_list([*own])}. {remedy}"
    )


def _check_shapes(
    weights: Mapping[str, LazyTensor],
    own: Mapping[str, tuple[int, ...]],
    state: ShardedModel,
    path: Any,
    advise: Callable[[Collection[str]], str],
) -> None:
    wanted = {name: shape for name, shape in own.items() if name in weights}
    report = compare_shapes(wanted, {name: tuple(weights[name].shape) for name in wanted})
    if not report.clean:
        fitting = [name for name in weights if tuple(weights[name].shape) == own.get(name)]
        remedy = advise(fitting) or (
            "Set 'ignore_mismatched_sizes' to leave these as they are, or give 'rules', a recipe that changes their "
            "shapes."
        )
        raise StateDictError(f"{path} does not fit {type(state.module).__name__}: {report}. {remedy}")


def _unfilled(
    weights: Mapping[str, LazyTensor],
    own: Collection[str],
    left: Sequence[str],
    state: ShardedModel,
    path: Any,
    advice: str,
    *,
    has_rules: bool,
) -> str:
    others = name_list([name for name in weights if name not in own], 3)
    globs = module_globs(left)
    recipe = "Change the recipe so that it makes them" if has_rules else "Give 'rules', a recipe that makes them"
    remedy = f"It has {others}, which the model does not have. " if others else ""
    remedy += advice or (f"{recipe}." if others else "Is a file of it missing?")
    return (
        f"{path} does not fill {len(left)} parameters of {type(state.module).__name__}: {name_list(left, 4)}. {remedy} "
        f"If they shall keep their initial values, add initial={globs[:4]}"
        f"{'' if len(globs) < 5 else f' and {len(globs) - 4} more'}."
    )


def _shipped_recipe(
    source: Layout,
    state: ShardedModel,
    filled: Collection[str],
    initial: Sequence[str],
    values: Mapping[str, int] | None,
) -> str:
    """Return a sentence that names the shipped recipe by which a checkpoint fills a model; empty if there is none.

    Args:
        source: The checkpoint.
        state: The model.
        filled: The names that fit already.
        initial: What may stay initial.
        values: Numbers that the user gave.
    """
    own, params, least = own_shapes(state), names_of_params(state), count_filled(filled, state)

    def rate(made: Mapping[str, TensorEntry]) -> int:
        spelt = under_own_names(made, state)
        if any(entry.shape != own[name] for name, entry in spelt.items() if name in own):
            return 0
        left = without_patterns(left_initial(params, own, spelt), initial)
        filled = 0 if left else count_filled(spelt, state)
        return filled if filled > max(least, len(params) // 2) else 0

    tensors, folders = part_tensors(source, "model"), folders_of(source)
    found = fitting_recipes(tensors, rate, folders=folders, values=values)
    given = [f"rules={name!r}{', inverse=True' if inverse else ''}" for name, inverse in found]
    return f"Pass {' or '.join(given)}: this shipped recipe makes them." if given else ""
