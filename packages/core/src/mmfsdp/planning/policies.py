"""Applies a wrapping policy, in any form that torch or a config accepts, to find the shard units.

The answer equals what torch's own FSDP1 auto-wrapping wraps. Its rule
(torch/distributed/fsdp/wrap.py): ask the policy whether to look inside a module; visit its children; then
ask whether to wrap the module itself, told how many parameters no wrapped descendant holds. The root is never
asked whether to be wrapped.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
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
from mmfsdp.planning.automatic import automatic_units
from mmfsdp.planning.patterns import match_classes, match_fqns

__all__ = ["Match", "Policy", "own_parameters", "resolve_policy", "select_modules"]

Policy = Wrap | Callable[..., Any] | str | None
"""What can be given as a policy: a `Wrap` config, any callable torch ever took, a dotted reference, or nothing."""

# torch's defaults of size_based_auto_wrap_policy.
_SIZE_EXCLUDED = ("torch.nn.modules.container.ModuleList", "torch.nn.modules.container.ModuleDict")
_SIZE_LEAVES = ("torch.nn.modules.activation.MultiheadAttention",)


@dataclass(frozen=True, slots=True)
class Match:
    """A module that the policy chose, with the reason and the settings that the policy gave it."""

    fqn: str
    module: nn.Module
    reason: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Verdicts:
    """A policy in one form: whether to look inside a module, and whether, why and with which settings to wrap it.

    ``inside(module, numel)`` and ``wrap(module, numel)`` get the parameters (elements) below the module that no
    chosen module below it holds. ``wrap`` gives None, a reason, or a reason with settings.
    """

    inside: Callable[[nn.Module, int], bool]
    wrap: Callable[[nn.Module, int], str | tuple[str, Mapping[str, Any]] | None]


def resolve_policy(
    root: nn.Module,
    policy: Policy,
    *,
    ignored_modules: Collection[nn.Module] = (),
    ignored_params: Collection[nn.Parameter] = (),
    also: Mapping[type, str] | None = None,
) -> list[Match]:
    """Return the modules that become shard units below ``root``, children before parents.

    Args:
        root: The model; meta or real. It is not changed.
        policy: A `Wrap` config; a callable ``(module, recurse, nonwrapped_numel)`` of torch 2 or
            ``(module, recurse, unwrapped_params)`` of torch 1.11, with its own arguments bound or defaulted;
            a predicate ``(module)``; torch's ``ModuleWrapPolicy`` or ``CustomPolicy``; a dotted reference to
            any of these; or None.
        ignored_modules: Not looked at, nor their descendants.
        ignored_params: Not counted.
        also: Classes whose instances are chosen as well, with the reason: mixed precision asks for it. Even an empty
            mapping makes torch, and so us, look inside every module, those that the policy would not enter included.

    Raises:
        PolicyError: The policy matched nothing it named, or returned something that is not a decision.
        PolicyNotFoundError: A reference cannot be resolved.
    """
    ignored = {id(module) for top in ignored_modules for module in top.modules()}
    verdicts = _verdicts(root, policy, ignored)
    if also is not None:
        verdicts = _any_of([verdicts, _by_class(also)])
    return _walk(root, verdicts, ignored, {id(param) for param in ignored_params})


def select_modules(root: nn.Module, policy: Policy) -> list[str]:
    """Return the FQNs that a policy chooses, in the order of ``named_modules()``; the root is never among them."""
    chosen = {match.fqn for match in resolve_policy(root, policy)}
    return [fqn for fqn, _ in root.named_modules() if fqn in chosen]


def _walk(root: nn.Module, verdicts: _Verdicts, ignored: set[int], ignored_params: set[int]) -> list[Match]:
    names = {id(module): fqn for fqn, module in root.named_modules()}
    numels = _numels(root, ignored_params)
    chosen: dict[int, Match] = {}
    seen: dict[int, int] = {}  # what a shared module's subtree holds in chosen modules: the same at each visit

    def visit(module: nn.Module) -> int:
        """Return the parameters (elements) below ``module``, itself included, that chosen modules hold."""
        if id(module) in seen:
            return seen[id(module)]
        total = numels[id(module)]
        held = 0
        if verdicts.inside(module, total):
            held = sum(visit(child) for child in module.children() if id(child) not in ignored)
            verdict = verdicts.wrap(module, total - held) if module is not root else None
            if verdict is not None:
                reason, settings = verdict if isinstance(verdict, tuple) else (verdict, {})
                chosen[id(module)] = Match(names[id(module)], module, reason, settings)
                held = total
        seen[id(module)] = held
        return held

    visit(root)
    return list(chosen.values())


def _numels(root: nn.Module, ignored_params: set[int]) -> dict[int, int]:
    """Return the number of elements at or below each module, by ``id``; tied parameters count once."""
    below: dict[int, dict[int, int]] = {}  # module -> parameter -> elements

    def collect(module: nn.Module) -> dict[int, int]:
        if id(module) not in below:
            found = {id(param): param.numel() for param in own_parameters(module) if id(param) not in ignored_params}
            for child in module.children():
                found |= collect(child)
            below[id(module)] = found
        return below[id(module)]

    collect(root)
    return {module: sum(found.values()) for module, found in below.items()}


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return ``module.parameters(recurse=False)`` at a tenth of the cost; tied parameters may appear twice."""
    return [param for param in module._parameters.values() if param is not None]


def _verdicts(root: nn.Module, policy: Policy, ignored: set[int]) -> _Verdicts:
    if policy is None or isinstance(policy, NoWrap):
        return _Verdicts(inside=lambda module, numel: False, wrap=lambda module, numel: None)
    if isinstance(policy, ConfigModel):
        return _declared(root, policy, ignored)
    if isinstance(policy, str):
        short = {"none": None, "auto": AutoWrap()}
        return _verdicts(root, short[policy] if policy in short else resolve_reference(policy), ignored)
    if inspect.isclass(policy):
        raise PolicyError(
            f"A wrapping policy must be callable, but {policy.__qualname__} is a class. Pass an instance."
        )
    if hasattr(policy, "_run_policy"):
        return _torch_policy(root, policy, ignored)
    if callable(policy):
        return _called(root, policy)
    raise PolicyError(
        f"A wrapping policy must be a config, a callable, a dotted reference or None, got {policy!r} "
        f"(type {type(policy).__name__})."
    )


def _declared(root: nn.Module, config: ConfigModel, ignored: set[int]) -> _Verdicts:
    modules = dict(root.named_modules())
    match config:
        case AutoWrap():
            found = automatic_units(root, ignored)
            return _Verdicts(inside=lambda module, numel: True, wrap=lambda module, numel: found.get(id(module)))
        case SizeWrap():
            # An empty list is meant: no such classes.
            leaf_names = _SIZE_LEAVES if config.force_leaf_classes is None else config.force_leaf_classes
            excluded_names = _SIZE_EXCLUDED if config.exclude_classes is None else config.exclude_classes
            leaves = match_classes(leaf_names, modules, must_match=False)
            excluded = match_classes(excluded_names, modules, must_match=False)
            least = config.min_num_params
            reason = f"size: at least {least:,} parameters"
            return _Verdicts(
                inside=lambda module, numel: numel >= least and type(module) not in leaves,
                wrap=lambda module, numel: reason if numel >= least and type(module) not in excluded else None,
            )
        case ModuleClassWrap():
            classes = match_classes(config.classes, modules, config="wrap.classes")
            return _by_class({cls: f"class: {name}" for cls, name in classes.items()})
        case ModuleNameWrap():
            # A shared module has several names.
            named = {fqn: module for fqn, module in root.named_modules(remove_duplicate=False) if fqn}
            matched = match_fqns(config.patterns, named, what="module", config="wrap.patterns")
            reasons = {id(named[fqn]): f"name: {pattern}" for fqn, pattern in reversed(matched.items())}
            return _Verdicts(inside=lambda module, numel: True, wrap=lambda module, numel: reasons.get(id(module)))
        case ReferenceWrap():
            return _verdicts(root, _bound(config), ignored)
        case AnyOf():
            return _any_of([_declared(root, part, ignored) for part in config.policies])
        case AllOf():
            return _all_of([_declared(root, part, ignored) for part in config.policies])
        case NoWrap():
            return _verdicts(root, None, ignored)
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


def _by_class(classes: Mapping[type, str]) -> _Verdicts:
    return _Verdicts(inside=lambda module, numel: True, wrap=lambda module, numel: classes.get(type(module)))


def _any_of(parts: list[_Verdicts]) -> _Verdicts:
    def wrap(module: nn.Module, numel: int) -> str | tuple[str, Mapping[str, Any]] | None:
        answers = (part.wrap(module, numel) for part in parts)
        return next((answer for answer in answers if answer is not None), None)

    return _Verdicts(lambda module, numel: any(part.inside(module, numel) for part in parts), wrap)


def _all_of(parts: list[_Verdicts]) -> _Verdicts:
    def wrap(module: nn.Module, numel: int) -> str | None:
        answers = [part.wrap(module, numel) for part in parts]
        reasons = [answer[0] if isinstance(answer, tuple) else answer for answer in answers if answer is not None]
        return " and ".join(reasons) if len(reasons) == len(parts) else None

    return _Verdicts(lambda module, numel: all(part.inside(module, numel) for part in parts), wrap)


def _torch_policy(root: nn.Module, policy: Any, ignored: set[int]) -> _Verdicts:
    """Adapt torch's ``ModuleWrapPolicy`` and ``CustomPolicy``.

    They have no public way to be asked without wrapping, so this is the one place that calls their
    ``_run_policy``; every torch from 2.1 to 2.15 has it with these arguments.
    """
    name = type(policy).__name__
    skipped = {module for module in root.modules() if id(module) in ignored}
    try:
        targets = policy._run_policy(root, skipped, {})
    except ValueError as error:
        # torch does not name the module: ask for each separately.
        for fqn, module in root.named_modules():
            try:
                policy._run_policy(module, {*module.modules(), *skipped} - {module}, {})
            except ValueError as culprit:
                raise PolicyError(f"{name} fails for module {fqn!r}: {culprit}", fqn=fqn) from error
        raise
    found = {id(module): (f"policy: {name}", settings) for module, settings in targets.items()}
    return _Verdicts(inside=lambda module, numel: True, wrap=lambda module, numel: found.get(id(module)))


def _called(root: nn.Module, policy: Callable[..., Any]) -> _Verdicts:
    """Adapt a callable with any accepted signature."""
    name = _policy_name(policy)
    reason = f"policy: {name}"
    ask, predicate = _caller(policy, name)
    names = {id(module): fqn for fqn, module in root.named_modules()}

    def decide(module: nn.Module, recurse: bool, numel: int) -> bool:
        answer = ask(module, recurse, numel)
        if not isinstance(answer, bool):
            raise PolicyError(
                f"Policy {name!r} must return True or False, but for module {names[id(module)]!r} with "
                f"recurse={recurse} it returned {answer!r} (type {type(answer).__name__}).",
                fqn=names[id(module)],
            )
        return answer

    return _Verdicts(
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

    By keyword if it can be, as torch asks; else by position.
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
