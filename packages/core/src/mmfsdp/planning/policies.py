"""From a wrapping policy, in any form that users have, to the modules that become shard units.

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

from mmfsdp.config import (
    AllOf,
    AnyOf,
    ModuleClassWrap,
    ModuleNameWrap,
    NoWrap,
    ReferenceWrap,
    SizeWrap,
    Wrap,
)
from mmfsdp.config.base import ConfigModel
from mmfsdp.errors import PolicyError
from mmfsdp.planning.patterns import match_classes, match_fqns
from mmfsdp.references import resolve_reference

__all__ = ["Match", "Policy", "resolve_policy", "select_modules"]

Policy = Wrap | Callable[..., Any] | str | None
"""What can be given as a policy: a `Wrap` config, any callable torch ever took, a dotted reference, or nothing."""

# torch's defaults of size_based_auto_wrap_policy.
_SIZE_EXCLUDED = ("torch.nn.modules.container.ModuleList", "torch.nn.modules.container.ModuleDict")
_SIZE_LEAVES = ("torch.nn.modules.activation.MultiheadAttention",)


@dataclass(frozen=True, slots=True)
class Match:
    """A module that the policy chose, why, and the settings that the policy gave it."""

    fqn: str
    module: nn.Module
    reason: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Verdicts:
    """A policy in one shape: whether to look inside a module, and why (or with which settings) to wrap it.

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
        also: Classes whose instances are chosen as well, with the reason: mixed precision asks for it.

    Raises:
        PolicyError: The policy matched nothing it named, or returned something that is not a decision.
        PolicyNotFoundError: A reference cannot be resolved.
    """
    ignored = {id(module) for top in ignored_modules for module in top.modules()}
    names = {id(module): fqn for fqn, module in root.named_modules()}
    verdicts = _verdicts(root, policy, ignored)
    if also:
        verdicts = _any_of([verdicts, _by_class(also)])
    return _walk(root, verdicts, ignored, {id(param) for param in ignored_params}, names)


def select_modules(root: nn.Module, policy: Policy) -> list[str]:
    """Return the FQNs that a policy chooses, in the order of ``named_modules()``; the root is never among them."""
    chosen = {match.fqn for match in resolve_policy(root, policy)}
    return [fqn for fqn, _ in root.named_modules() if fqn in chosen]


def _walk(
    root: nn.Module, verdicts: _Verdicts, ignored: set[int], ignored_params: set[int], names: dict[int, str]
) -> list[Match]:
    chosen: dict[int, Match] = {}
    seen: dict[int, int] = {}  # what a shared module's subtree holds in chosen modules: the same at each visit

    def visit(module: nn.Module) -> int:
        """Return the parameters (elements) below ``module``, itself included, that chosen modules hold."""
        if id(module) in seen:
            return seen[id(module)]
        total = sum(param.numel() for param in module.parameters() if id(param) not in ignored_params)
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


def _verdicts(root: nn.Module, policy: Policy, ignored: set[int]) -> _Verdicts:
    if policy is None or isinstance(policy, NoWrap):
        return _Verdicts(inside=lambda module, numel: False, wrap=lambda module, numel: None)
    if isinstance(policy, ConfigModel):
        return _declared(root, policy, ignored)
    if isinstance(policy, str):
        return _verdicts(root, resolve_reference(policy), ignored)
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
        case SizeWrap():
            leaves = match_classes(config.force_leaf_classes or _SIZE_LEAVES, modules, must_match=False)
            excluded = match_classes(config.exclude_classes or _SIZE_EXCLUDED, modules, must_match=False)
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
            matched = match_fqns(config.patterns, [fqn for fqn in modules if fqn], what="module", config="wrap.patterns")
            reasons = {id(modules[fqn]): f"name: {pattern}" for fqn, pattern in matched.items()}
            return _Verdicts(inside=lambda module, numel: True, wrap=lambda module, numel: reasons.get(id(module)))
        case ReferenceWrap():
            target = resolve_reference(config.target)
            if config.kwargs:
                # A class such as CustomPolicy is called for an object, a function gets its arguments bound.
                bind = target if inspect.isclass(target) else functools.partial(functools.partial, target)
                target = bind(**config.kwargs)
            return _verdicts(root, target, ignored)
        case AnyOf():
            return _any_of([_declared(root, part, ignored) for part in config.policies])
        case AllOf():
            return _all_of([_declared(root, part, ignored) for part in config.policies])
        case NoWrap():
            return _verdicts(root, None, ignored)
        case _:
            raise PolicyError(f"{config!r} is not a wrapping policy.")


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
    """torch's ``ModuleWrapPolicy`` and ``CustomPolicy``.

    They have no public way to be asked without wrapping, so this is the one place that calls their
    ``_run_policy``; every torch from 2.1 to 2.15 has it with these arguments.
    """
    name = type(policy).__name__
    try:
        targets = policy._run_policy(root, {module for module in root.modules() if id(module) in ignored}, {})
    except ValueError as error:
        raise PolicyError(f"{name}: its function must return True, False or a dict of settings. {error}") from error
    found = {id(module): (f"policy: {name}", settings) for module, settings in targets.items()}
    return _Verdicts(inside=lambda module, numel: True, wrap=lambda module, numel: found.get(id(module)))


def _called(root: nn.Module, policy: Callable[..., Any]) -> _Verdicts:
    """A callable, with whichever signature it has."""
    name = getattr(policy, "__name__", None) or getattr(getattr(policy, "func", None), "__name__", None) or repr(policy)
    reason = f"policy: {name}"
    ask, predicate = _caller(policy, name)
    names = {id(module): fqn for fqn, module in root.named_modules()}

    def decide(module: nn.Module, recurse: bool, numel: int) -> bool:
        answer = ask(module, recurse, numel)
        if not isinstance(answer, bool):
            raise PolicyError(
                f"Policy {name!r} must return True or False, but for module {names[id(module)]!r} with recurse={recurse} "
                f"it returned {answer!r} (type {type(answer).__name__}).",
                fqn=names[id(module)],
            )
        return answer

    return _Verdicts(
        inside=lambda module, numel: predicate or decide(module, True, numel),
        wrap=lambda module, numel: reason if decide(module, False, numel) else None,
    )


def _caller(policy: Callable[..., Any], name: str) -> tuple[Callable[[nn.Module, bool, int], Any], bool]:
    """Return how to ask the policy, and whether it is a mere predicate on modules."""
    try:
        parameters = inspect.signature(policy).parameters
    except (TypeError, ValueError):  # a builtin: torch asked with three arguments
        return policy, False
    for numel_name in ("nonwrapped_numel", "unwrapped_params"):
        if {"module", "recurse", numel_name} <= parameters.keys():
            return lambda module, recurse, numel: policy(module=module, recurse=recurse, **{numel_name: numel}), False
    positional = [
        p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    required = [p for p in positional if p.default is p.empty]
    open_ended = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    if len(positional) == 1 and not open_ended:
        return lambda module, recurse, numel: policy(module), True
    if len(required) <= 3 and (len(positional) >= 3 or open_ended):
        return lambda module, recurse, numel: policy(module, recurse, numel), False
    raise PolicyError(
        f"Policy {name!r} has the signature {inspect.signature(policy)}. Accepted: (module), "
        "(module, recurse, nonwrapped_numel) or (module, recurse, unwrapped_params), more arguments with defaults "
        "or bound by functools.partial."
    )
