"""Brings wrapping policies of every form into one: whether to look inside a module, and whether to wrap it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from mmfsdp.planning.policies.patterns import match_classes, match_fqns

__all__ = ["Policy", "Verdicts", "any_of", "by_class", "verdicts_of"]

Policy = Wrap | Callable[..., Any] | str | None
"""The forms of a policy: a `Wrap` config, any callable that torch accepts, a dotted reference, or nothing."""

# torch's defaults of size_based_auto_wrap_policy.
_SIZE_EXCLUDED = ("torch.nn.modules.container.ModuleList", "torch.nn.modules.container.ModuleDict")
_SIZE_LEAVES = ("torch.nn.modules.activation.MultiheadAttention",)


@dataclass(frozen=True, slots=True)
class Verdicts:
    """A policy in one form: whether to look inside a module, and whether, why and with which settings to wrap it.

    ``inside(module, numel)`` and ``wrap(module, numel)`` get the parameters (elements) below the module that no
    chosen module below it holds. ``wrap`` gives None, a reason, or a reason with settings.
    """

    inside: Callable[[nn.Module, int], bool]
    wrap: Callable[[nn.Module, int], str | tuple[str, Mapping[str, Any]] | None]


def by_class(classes: Mapping[type, str]) -> Verdicts:
    """Choose the instances of these classes, each with the reason given for its class."""
    return Verdicts(inside=lambda module, numel: True, wrap=lambda module, numel: classes.get(type(module)))


def any_of(parts: list[Verdicts]) -> Verdicts:
    """Choose what any part chooses, for the reason of the first part that does."""

    def wrap(module: nn.Module, numel: int) -> str | tuple[str, Mapping[str, Any]] | None:
        answers = (part.wrap(module, numel) for part in parts)
        return next((answer for answer in answers if answer is not None), None)

    return Verdicts(lambda module, numel: any(part.inside(module, numel) for part in parts), wrap)


def _all_of(parts: list[Verdicts]) -> Verdicts:
    """Choose what every part chooses, for the reasons of all of them."""

    def wrap(module: nn.Module, numel: int) -> str | None:
        answers = [part.wrap(module, numel) for part in parts]
        reasons = [answer[0] if isinstance(answer, tuple) else answer for answer in answers if answer is not None]
        return " and ".join(reasons) if len(reasons) == len(parts) else None

    return Verdicts(lambda module, numel: all(part.inside(module, numel) for part in parts), wrap)


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
        return _ask_torch_policy(root, policy, ignored)
    if callable(policy):
        return _ask_callable(root, policy)
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
            return _all_of([_declared(root, part, ignored) for part in config.policies])
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


def _ask_torch_policy(root: nn.Module, policy: Any, ignored: set[int]) -> Verdicts:
    """Return torch's ``ModuleWrapPolicy`` or ``CustomPolicy`` as `Verdicts`.

    torch has no public way to evaluate them without wrapping, so only this function calls their
    ``_run_policy``; every torch from 2.1 to 2.15 has it with these arguments.

    Raises:
        PolicyError: The policy fails for a module.
    """
    name = type(policy).__name__
    skipped = {module for module in root.modules() if id(module) in ignored}
    try:
        targets = policy._run_policy(root, skipped, {})
    except ValueError as error:
        # torch does not name the module, so evaluate each one alone to find it.
        for fqn, module in root.named_modules():
            try:
                policy._run_policy(module, {*module.modules(), *skipped} - {module}, {})
            except ValueError as culprit:
                raise PolicyError(f"{name} fails for module {fqn or '(root)'!r}: {culprit}", fqn=fqn) from error
        raise
    found = {id(module): (f"policy: {name}", settings) for module, settings in targets.items()}
    return Verdicts(inside=lambda module, numel: True, wrap=lambda module, numel: found.get(id(module)))


def _ask_callable(root: nn.Module, policy: Callable[..., Any]) -> Verdicts:
    """Return a function with any accepted signature as `Verdicts`.

    Raises:
        PolicyError: The function accepts none of the known arguments, or does not return a bool.
    """
    name = _policy_name(policy)
    reason = f"policy: {name}"
    ask, predicate = _caller(policy, name)
    names = {id(module): fqn for fqn, module in root.named_modules()}

    def decide(module: nn.Module, recurse: bool, numel: int) -> bool:
        answer = ask(module, recurse, numel)
        if not isinstance(answer, bool):
            raise PolicyError(
                f"Policy {name!r} must return True or False, but for module {names[id(module)] or '(root)'!r} with "
                f"recurse={recurse} it returned {answer!r} (type {type(answer).__name__}).",
                fqn=names[id(module)],
            )
        return answer

    return Verdicts(
        inside=lambda module, numel: predicate or decide(module, True, numel),
        wrap=lambda module, numel: reason if decide(module, False, numel) else None,
    )


def _policy_name(policy: Callable[..., Any]) -> str:
    """Return the name of the function or its class, never an address, which would differ between ranks."""
    while isinstance(policy, functools.partial):
        policy = policy.func
    return str(getattr(policy, "__name__", None) or type(policy).__name__)


def _caller(policy: Callable[..., Any], name: str) -> tuple[Callable[[nn.Module, bool, int], Any], bool]:
    """Return how to call the policy, and whether it is only a predicate on modules.

    By keyword where the signature allows it, as torch calls it; otherwise by position.
    """
    try:
        signature = inspect.signature(policy)
    except (TypeError, ValueError):  # a builtin without a signature
        return policy, False
    if _takes(signature, module=None, recurse=None, nonwrapped_numel=None):
        return lambda module, recurse, numel: policy(module=module, recurse=recurse, nonwrapped_numel=numel), False
    if _takes(signature, module=None, recurse=None, unwrapped_params=None):
        return lambda module, recurse, numel: policy(module=module, recurse=recurse, unwrapped_params=numel), False
    # A second argument with a default that is not torch's belongs to a predicate: `lambda m, cls=Block: ...`.
    is_open = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in signature.parameters.values())
    if _takes(signature, None) and not is_open and "recurse" not in signature.parameters:
        return lambda module, recurse, numel: policy(module), True
    if _takes(signature, None, None, None):
        return lambda module, recurse, numel: policy(module, recurse, numel), False
    if _takes(signature, module=None):
        return lambda module, recurse, numel: policy(module=module), True
    raise PolicyError(
        f"Policy {name!r} has the signature {signature}. Accepted: (module), (module, recurse, nonwrapped_numel) or "
        "(module, recurse, unwrapped_params), more arguments with defaults or bound by functools.partial."
    )


def _takes(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True
