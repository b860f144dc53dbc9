"""Applies a wrapping policy, in any form that torch or a config accepts, to find the shard units.

The result equals what torch's own FSDP1 auto-wrapping wraps. Its rule (torch/distributed/fsdp/wrap.py): ask the policy
whether to look inside a module; visit its children; then ask whether to wrap the module itself, and pass the number of
parameters that no wrapped descendant holds. The root itself is never wrapped by the policy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.nn as nn

from mmfsdp.planning.policies.forms import Policy, Verdicts, any_of, by_class, verdicts_of

__all__ = ["Match", "own_parameters", "resolve_policy", "select_modules"]


@dataclass(frozen=True, slots=True)
class Match:
    """A module that the policy chose, with the reason and the settings that the policy gave it."""

    fqn: str
    module: nn.Module
    reason: str
    settings: Mapping[str, Any] = field(default_factory=dict)


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
        ignored_modules: Skipped, together with their descendants.
        ignored_params: Not counted.
        also: More classes whose instances become units, each with its reason; mixed precision needs them. If this is
            given, even empty, all modules are searched, as in torch, including those that the policy would not enter.

    Raises:
        PolicyError: The policy matched nothing it named, or returned something other than a decision.
        PolicyNotFoundError: A reference cannot be resolved.
    """
    ignored = {id(module) for top in ignored_modules for module in top.modules()}
    verdicts = verdicts_of(root, policy, ignored)
    if also is not None:
        verdicts = any_of([verdicts, by_class(also)])
    return _walk(root, verdicts, ignored, {id(param) for param in ignored_params})


def select_modules(root: nn.Module, policy: Policy) -> list[str]:
    """Return the FQNs that a policy chooses, in the order of ``named_modules()``; the root is never among them."""
    chosen = {match.fqn for match in resolve_policy(root, policy)}
    return [fqn for fqn, _ in root.named_modules() if fqn in chosen]


def _walk(root: nn.Module, verdicts: Verdicts, ignored: set[int], ignored_params: set[int]) -> list[Match]:
    names = {id(module): fqn for fqn, module in root.named_modules()}
    numels = _numels(root, ignored_params)
    chosen: dict[int, Match] = {}
    seen: dict[int, int] = {}  # a shared module is visited once: a second visit would give the same number

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
