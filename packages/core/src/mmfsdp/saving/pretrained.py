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
from mmfsdp.basics.text import WRAPPER_PREFIX, clean_fqn, name_list
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.layout import Layout, TensorRef
from mmfsdp.checkpoint.recipes.applying import apply_recipe
from mmfsdp.checkpoint.tree import common_prefix, part_tensors
from mmfsdp.collective.steps import check_same_arguments, on_all_ranks
from mmfsdp.errors import ConfigError, StateDictError
from mmfsdp.runtime.sharded_model import ShardedModel, find_sharded_model
from mmfsdp.saving.initial_weights import left_initial, module_globs, without_patterns
from mmfsdp.saving.load import reference_of, under_tied_names
from mmfsdp.saving.reading import open_weights
from mmfsdp.saving.source import Source, lazy_tensors
from mmfsdp.saving.transformers_names import as_transformers_names
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

    def rewrite(layout: Layout) -> Layout:
        if rules is not None:
            return apply_recipe(layout, rules, inverse=inverse, values=values)
        weights = _converted(state, part_tensors(layout, "model"))
        tree = {name: TensorRef(name) for name in weights}
        return replace(layout, tensors=weights, tree=tree)

    def fitted(source: Source) -> dict[str, LazyTensor]:
        weights = _under_own_names(_one_per_place(source), state, path)
        if not ignore_mismatched_sizes:
            _check_shapes(weights, state, path)
        if not strict:  # which raises for each name that is missing
            _check_filled(weights, initial, state, path, has_rules=rules is not None)
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
        warnings.warn(f"{path} does not fit {type(state.module).__name__} in all names: {report}.", stacklevel=2)
    return report


def _one_per_place(source: Source) -> dict[str, LazyTensor]:
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
    params = _names_of_params(state)

    def count_filled(names: Collection[str]) -> int:
        spelt = [{spell(name) for name in names}.union(names) for spell in _spellings(state)]
        return max(sum(any(name in each for name in own) for own in params) for each in spelt)

    filled = count_filled(weights)
    if filled == len(params):
        return weights
    converted = as_transformers_names(state.module, weights)
    return weights if converted is None or count_filled(converted) <= filled else converted


def _spellings(state: ShardedModel) -> list[Callable[[str], str]]:
    base = getattr(state.module, "base_model_prefix", "")
    prefixes = [WRAPPER_PREFIX, *([f"{base}."] if base else [])]
    spellings: list[Callable[[str], str]] = [lambda name: name]
    spellings += [lambda name, prefix=prefix: name.removeprefix(prefix) for prefix in prefixes]  # type: ignore[misc]
    spellings += [lambda name, prefix=prefix: prefix + name for prefix in prefixes]  # type: ignore[misc]
    return spellings


def _under_own_names(weights: dict[str, LazyTensor], state: ShardedModel, path: Any) -> dict[str, LazyTensor]:
    """Return the weights without a prefix that the model's names lack, or with one that they have."""
    own = _own_shapes(state)
    spellings = _spellings(state)
    matches = [sum(spelt(name) in own for name in weights) for spelt in spellings]
    if not any(matches):
        raise StateDictError(_unlike(weights, own, state, path))
    spelt = spellings[matches.index(max(matches))]
    # A name that already is the model's own stays: a head, say, lies beside the base model.
    return {name if name in own else spelt(name): value for name, value in weights.items()}


def _unlike(weights: Mapping[str, LazyTensor], own: Collection[str], state: ShardedModel, path: Any) -> str:
    remedy = (
        "Give 'rules', a recipe that rewrites them; mmfsdp.checkpoint.known_recipes() lists those that are shipped."
    )
    if prefix := common_prefix(weights, own):
        remedy = f"They match without the prefix {prefix!r}: give 'rules', a recipe that removes it."
    remedy = not_restored(weights) or remedy
    return (
        f"No tensor of {path} has a name of {type(state.module).__name__}. It has {name_list([*weights])}; the model "
        f"has {name_list([*own])}. {remedy}"
    )


def _check_shapes(weights: Mapping[str, LazyTensor], state: ShardedModel, path: Any) -> None:
    wanted = {name: shape for name, shape in _own_shapes(state).items() if name in weights}
    report = compare_shapes(wanted, {name: tuple(weights[name].shape) for name in wanted})
    if not report.clean:
        raise StateDictError(
            f"{path} does not fit {type(state.module).__name__}: {report}. Set 'ignore_mismatched_sizes' to leave "
            "these as they are, or give 'rules', a recipe that changes their shapes."
        )


def _check_filled(
    weights: Mapping[str, LazyTensor], initial: Sequence[str], state: ShardedModel, path: Any, *, has_rules: bool
) -> None:
    own = _own_shapes(state)
    left = without_patterns(left_initial(_names_of_params(state), own, weights), initial)
    if not left:
        return
    others = name_list([name for name in weights if name not in own], 3)
    globs = module_globs(left)
    recipe = "Change the recipe so that it makes them" if has_rules else "Give 'rules', a recipe that makes them"
    remedy = f"It has {others}, which the model does not have. {recipe}." if others else "Is a file of it missing?"
    raise StateDictError(
        f"{path} does not fill {len(left)} parameters of {type(state.module).__name__}: {name_list(left, 4)}. {remedy} "
        f"If they shall keep their initial values, add initial={globs[:4]}"
        f"{'' if len(globs) < 5 else f' and {len(globs) - 4} more'}."
    )


def _names_of_params(state: ShardedModel) -> list[tuple[str, ...]]:
    return [(param.fqn, *param.aliases) for param in state.plan.all_params()]


def _own_shapes(state: ShardedModel) -> dict[str, tuple[int, ...]]:
    params = {name: param.shape for param in state.plan.all_params() for name in (param.fqn, *param.aliases)}
    return params | {clean_fqn(name): tuple(buffer.shape) for name, buffer in state.module.named_buffers()}
