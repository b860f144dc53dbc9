"""From precision settings to the dtypes of each shard unit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn as nn

from mmfsdp.config import PrecisionConfig
from mmfsdp.config.precision import PrecisionOverride
from mmfsdp.dtypes import canonical_dtype
from mmfsdp.errors import PolicyError
from mmfsdp.planning.patterns import match_classes, match_fqns
from mmfsdp.planning.policies import Match
from mmfsdp.planning.schema import UnitPrecision

__all__ = ["full_precision_classes", "override_matches", "unit_precision", "unit_reshard"]

_SETTINGS = ("sharding_strategy", "mixed_precision", "reshard_after_forward")


def full_precision_classes(model: nn.Module, config: PrecisionConfig) -> dict[type, str]:
    """Return the classes in ``model`` that stay in full precision, each with the reason for making it a unit."""
    if config.param_dtype is None:
        return {}
    classes = match_classes(config.ignore_classes, dict(model.named_modules()), must_match=False)
    return {cls: f"full precision: {name.rpartition('.')[2]}" for cls, name in classes.items()}


def override_matches(model: nn.Module, config: PrecisionConfig) -> dict[str, PrecisionOverride]:
    """Return FQN to override for the modules that precision overrides name.

    Raises:
        PolicyError: An override names neither a class nor an FQN of the model.
    """
    modules = {fqn: module for fqn, module in model.named_modules() if fqn}
    found: dict[str, PrecisionOverride] = {}
    for override in config.overrides:
        for name in override.modules:
            classes = match_classes([name], modules, must_match=False)
            hits = [fqn for fqn, module in modules.items() if type(module) in classes]
            for fqn in hits or match_fqns([name], modules, what="module or class", config="precision.overrides"):
                found.setdefault(fqn, override)
    return found


def unit_precision(
    match: Match | None,
    config: PrecisionConfig,
    full: Mapping[type, str],
    overrides: Mapping[str, PrecisionOverride],
) -> UnitPrecision:
    """Return the dtypes of one unit.

    Args:
        match: The module that makes the unit; None is the root.
        config: The model-wide settings.
        full: Classes that stay in full precision.
        overrides: FQN to override.

    Raises:
        PolicyError: The policy gave the module a setting that is none.
    """
    if match is None:
        return UnitPrecision(
            param_dtype=config.param_dtype,
            reduce_dtype=config.reduce_dtype,
            output_dtype=config.output_dtype,
            cast_forward_inputs=config.cast_forward_inputs,
        )
    if "mixed_precision" in match.settings:
        return _from_torch(match.settings["mixed_precision"], match.fqn)
    if match.fqn in overrides:
        override = overrides[match.fqn]
        return UnitPrecision(
            param_dtype=override.param_dtype,
            reduce_dtype=override.reduce_dtype or override.param_dtype,
            cast_forward_inputs=override.cast_forward_inputs,
            full_precision=override.param_dtype in (None, "float32"),
        )
    if type(match.module) in full:
        return UnitPrecision(cast_forward_inputs=False, full_precision=True)
    return UnitPrecision(
        param_dtype=config.param_dtype, reduce_dtype=config.reduce_dtype, cast_forward_inputs=config.cast_forward_inputs
    )


def unit_reshard(match: Match, default: bool | int) -> bool | int:
    """Return whether a unit reshards after forward, as the policy's own settings for it say.

    Raises:
        PolicyError: The policy gave the module a setting that is unknown.
    """
    unknown = sorted(set(match.settings) - set(_SETTINGS))
    if unknown:
        raise PolicyError(
            f"The policy gives module {match.fqn!r} the setting {unknown[0]!r}, which a shard unit does not have. "
            f"Accepted: {', '.join(_SETTINGS)}.",
            fqn=match.fqn,
        )
    if "reshard_after_forward" in match.settings:
        value = match.settings["reshard_after_forward"]
        return value if isinstance(value, (bool, int)) else default
    strategy = match.settings.get("sharding_strategy")
    if strategy is None:
        return default
    name = getattr(strategy, "name", str(strategy)).upper()
    if name not in {"FULL_SHARD", "HYBRID_SHARD", "SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"}:
        raise PolicyError(
            f"The policy gives module {match.fqn!r} the strategy {name!r}; one unit of a sharded model can have "
            "'FULL_SHARD' or 'SHARD_GRAD_OP'. To keep a module whole, list it in sharding.ignored_modules.",
            fqn=match.fqn,
        )
    return name in {"FULL_SHARD", "HYBRID_SHARD"}


def _from_torch(policy: Any, fqn: str) -> UnitPrecision:
    """torch's ``MixedPrecision`` (FSDP1), ``MixedPrecisionPolicy`` (FSDP2), a dict of their fields, or None."""
    if policy is None:
        return UnitPrecision(cast_forward_inputs=False, full_precision=True)
    read = policy.get if isinstance(policy, Mapping) else lambda name, default=None: getattr(policy, name, default)
    param_dtype = read("param_dtype")
    reduce_dtype = read("reduce_dtype") or param_dtype
    return UnitPrecision(
        param_dtype=None if param_dtype is None else canonical_dtype(param_dtype),
        reduce_dtype=None if reduce_dtype is None else canonical_dtype(reduce_dtype),
        cast_forward_inputs=bool(read("cast_forward_inputs", True)),
    )
