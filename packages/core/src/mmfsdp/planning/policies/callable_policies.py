"""Reads callable wrapping policies: functions with any signature that torch ever took, and torch's policy objects."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.nn as nn

from mmfsdp.errors import PolicyError
from mmfsdp.planning.policies.verdicts import Verdicts

__all__ = ["ask_callable", "ask_torch_policy"]


def ask_torch_policy(root: nn.Module, policy: Any, ignored: set[int]) -> Verdicts:
    """Return torch's ``ModuleWrapPolicy`` or ``CustomPolicy`` as `Verdicts`.

    torch has no public way to evaluate them without wrapping, so this is the one place that calls their
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


def ask_callable(root: nn.Module, policy: Callable[..., Any]) -> Verdicts:
    """Return a function with any accepted signature as `Verdicts`.

    Raises:
        PolicyError: It accepts none of the known arguments; or, when asked, it returns something other than a bool.
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
