"""Selects the modules that recompute their forward, from the activation checkpointing settings."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn as nn

from mmfsdp.basics.references import resolve_reference
from mmfsdp.config import ActivationCheckpointingConfig
from mmfsdp.errors import ConfigError, PolicyError
from mmfsdp.planning.plan_records import ActivationPlan, ShardUnit
from mmfsdp.planning.policies.automatic import LARGE
from mmfsdp.planning.policies.forms import Policy
from mmfsdp.planning.policies.matching import select_modules
from mmfsdp.planning.units import has_forward

__all__ = ["activation_plan"]


def activation_plan(
    model: nn.Module,
    config: ActivationCheckpointingConfig | None,
    units: tuple[ShardUnit, ...],
    check_fn: Callable[[nn.Module], bool] | None = None,
) -> ActivationPlan | None:
    """Return the modules that recompute, or None.

    Args:
        model: The model.
        config: The settings; None with a ``check_fn`` means mode ``selective``.
        units: The shard units; by default, those below the root are checkpointed.
        check_fn: ``(module) -> bool``, in place of the one that the settings refer to.

    Raises:
        ConfigError: The settings contradict each other.
        PolicyError: Nothing is selected.
    """
    if config is None and check_fn is None:
        return None
    config = config or ActivationCheckpointingConfig(mode="selective")
    if check_fn is None and config.check_fn is not None:
        check_fn = resolve_reference(config.check_fn)
    if check_fn is not None and config.modules is not None:
        raise ConfigError(
            "Both a check_fn and modules select what to checkpoint. Give one.", config="activation_checkpointing"
        )
    fqns = _selected(model, config, units, check_fn)
    if config.mode == "every_n":
        fqns = fqns[:: config.n]
    if not fqns:
        raise PolicyError(
            "Activation checkpointing selects no module. Give activation_checkpointing.modules a policy that matches, "
            "or a wrap policy that makes shard units.",
            config="activation_checkpointing",
        )
    return ActivationPlan(
        fqns=tuple(fqns),
        mode="ops" if config.mode == "ops" else "full",
        save_ops=config.save_ops,
        offload=config.offload,
        preserve_rng_state=config.preserve_rng_state,
        use_reentrant=config.use_reentrant,
        early_stop=config.early_stop,
        determinism_check=config.determinism_check,
    )


def _selected(
    model: nn.Module,
    config: ActivationCheckpointingConfig,
    units: tuple[ShardUnit, ...],
    check_fn: Callable[[nn.Module], bool] | None,
) -> list[str]:
    policy: Policy = check_fn if check_fn is not None else config.modules
    if policy is None and config.mode == "selective":
        raise ConfigError(
            "Mode 'selective' needs modules (a policy) or check_fn to select by.", config="activation_checkpointing"
        )
    if policy is None:
        blocks = [unit for unit in units if not unit.precision.full_precision and unit.matched_by != LARGE]
        chosen = {fqn for unit in blocks for fqn in unit.fqns if fqn}
        order = [fqn for fqn, _ in model.named_modules() if fqn in chosen]
        # A checkpointed unit already recomputes the units inside it.
        return [fqn for fqn in order if not chosen & set(_ancestors(fqn))]
    return [fqn for fqn in select_modules(model, policy) if has_forward(model.get_submodule(fqn))]


def _ancestors(fqn: str) -> list[str]:
    parts = fqn.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]
