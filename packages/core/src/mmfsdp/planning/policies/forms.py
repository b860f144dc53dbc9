"""Brings wrapping policies of every form into one: whether to look inside a module, and whether to wrap it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.nn as nn

from mmfsdp.basics.references import resolve_reference
from mmfsdp.config import (
    AllOf,
    AnyOf,
    AutoWrap,
    ModuleClassWrap,
    ModuleNameWrap,
    NoWrap,
    ReferenceWrap,
    SizeWrap,
    Wrap,
)
from mmfsdp.config.base import ConfigModel
from mmfsdp.errors import PolicyError
from mmfsdp.planning.policies.automatic import automatic_units
from mmfsdp.planning.policies.callable_policies import ask_callable, ask_torch_policy
from mmfsdp.planning.policies.patterns import match_classes, match_fqns
from mmfsdp.planning.policies.verdicts import Verdicts, all_of, any_of, by_class

__all__ = ["Policy", "verdicts_of"]

Policy = Wrap | Callable[..., Any] | str | None
"""The forms of a policy: a `Wrap` config, any callable that torch accepts, a dotted reference, or nothing."""

# torch's defaults of size_based_auto_wrap_policy.
_SIZE_EXCLUDED = ("torch.nn.modules.container.ModuleList", "torch.nn.modules.container.ModuleDict")
_SIZE_LEAVES = ("torch.nn.modules.activation.MultiheadAttention",)


def verdicts_of(root: nn.Module, policy: Policy, ignored: set[int]) -> Verdicts:
    """Return a policy of any accepted form as `Verdicts`.

    Args:
        root: The model.
        policy: See `mmfsdp.planning.policies.matching.resolve_policy`.
        ignored: ``id`` of the modules that the policy must not choose.

    Raises:
        PolicyError: The policy has none of the accepted forms, or names nothing in the model.
        PolicyNotFoundError: A reference cannot be resolved.
    """
    if policy is None or isinstance(policy, NoWrap):
        return Verdicts(inside=lambda module, numel: False, wrap=lambda module, numel: None)
    if isinstance(policy, ConfigModel):
        return _declared(root, policy, ignored)
    if isinstance(policy, str):
        short = {"none": None, "auto": AutoWrap()}
        return verdicts_of(root, short[policy] if policy in short else resolve_reference(policy), ignored)
    if inspect.isclass(policy):
        raise PolicyError(
            f"A wrapping policy must be callable, but {policy.__qualname__} is a class. Pass an instance."
        )
    if hasattr(policy, "_run_policy"):
        return ask_torch_policy(root, policy, ignored)
    if callable(policy):
        return ask_callable(root, policy)
    raise PolicyError(
        f"A wrapping policy must be a config, a callable, a dotted reference or None, got {policy!r} "
        f"(type {type(policy).__name__})."
    )


def _declared(root: nn.Module, config: ConfigModel, ignored: set[int]) -> Verdicts:
    modules = dict(root.named_modules())
    match config:
        case AutoWrap():
            found = automatic_units(root, ignored)
            return Verdicts(inside=lambda module, numel: True, wrap=lambda module, numel: found.get(id(module)))
        case SizeWrap():
            # An empty list is meant: no such classes.
            leaf_names = _SIZE_LEAVES if config.force_leaf_classes is None else config.force_leaf_classes
            excluded_names = _SIZE_EXCLUDED if config.exclude_classes is None else config.exclude_classes
            leaves = match_classes(leaf_names, modules, must_match=False)
            excluded = match_classes(excluded_names, modules, must_match=False)
            least = config.min_num_params
            reason = f"size: at least {least:,} parameters"
            return Verdicts(
                inside=lambda module, numel: numel >= least and type(module) not in leaves,
                wrap=lambda module, numel: reason if numel >= least and type(module) not in excluded else None,
            )
        case ModuleClassWrap():
            classes = match_classes(config.classes, modules, config="wrap.classes", words=("auto", "none", "size"))
            return by_class({cls: f"class: {name}" for cls, name in classes.items()})
        case ModuleNameWrap():
            # A shared module has several names.
            named = {fqn: module for fqn, module in root.named_modules(remove_duplicate=False) if fqn}
            matched = match_fqns(config.patterns, named, what="module", config="wrap.patterns")
            reasons = {id(named[fqn]): f"name: {pattern}" for fqn, pattern in reversed(matched.items())}
            return Verdicts(inside=lambda module, numel: True, wrap=lambda module, numel: reasons.get(id(module)))
        case ReferenceWrap():
            return verdicts_of(root, _bound(config), ignored)
        case AnyOf():
            return any_of([_declared(root, part, ignored) for part in config.policies])
        case AllOf():
            return all_of([_declared(root, part, ignored) for part in config.policies])
        case NoWrap():
            return verdicts_of(root, None, ignored)
        case _:
            raise PolicyError(f"{config!r} is not a wrapping policy.")


def _bound(config: ReferenceWrap) -> Any:
    """Return the policy of a reference: a class is called, a function gets its arguments bound."""
    target = resolve_reference(config.target)
    if not config.kwargs:
        return target
    if not callable(target):
        raise PolicyError(f"{config.target!r} is not callable and accepts no kwargs.", config="wrap.kwargs")
    try:
        inspect.signature(target).bind_partial(**config.kwargs)
    except TypeError as error:
        raise PolicyError(f"{config.target!r} does not accept these kwargs: {error}.", config="wrap.kwargs") from None
    return target(**config.kwargs) if inspect.isclass(target) else functools.partial(target, **config.kwargs)
