"""Moves optimizers that were built from the unsharded model over to the sharded model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn as nn
from mmengine.optim import BaseOptimWrapper, OptimWrapper, OptimWrapperDict
from mmengine.registry import OPTIMIZERS

from mmfsdp import ShardPlan, load_optim_state_dict
from mmfsdp.errors import ConfigError
from mmfsdp.optimizers import MatrixOptimizer, MuonWithAdamW
from mmfsdp_mmengine.configs.others import check_optim_wrapper
from mmfsdp_mmengine.optimizers.clipping import clip_globally

__all__ = ["OptimizerBinding", "check_optimizer_named", "optim_wrappers_of", "waiting_gradients", "with_optimizers"]


def optim_wrappers_of(optim_wrapper: Any) -> dict[str, Any]:
    """Return an OptimWrapperDict's wrappers by name; a single one has the name ``''``."""
    if isinstance(optim_wrapper, OptimWrapperDict):
        return dict(optim_wrapper.items())
    return {"": optim_wrapper}


def check_optimizer_named(optim_wrapper: Any) -> None:
    """Raise if a config of an optimizer wrapper names no optimizer and no constructor of several.

    Raises:
        ConfigError: It does not; the error says what to write.
    """
    if not isinstance(optim_wrapper, Mapping) or "constructor" in optim_wrapper or "optimizer" in optim_wrapper:
        return
    given = {name: value for name, value in optim_wrapper.items() if not isinstance(value, BaseOptimWrapper)}
    if not given:  # several wrappers that were built already
        return
    kind = optim_wrapper.get("type")
    if isinstance(kind, str) and kind in OPTIMIZERS:
        write = f"optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type={kind!r}, ...))"
        what = "is the config of an optimizer"
    else:
        write = "optim_wrapper = dict(optimizer=dict(type='SGD', lr=...)), or for several optimizers constructor=..."
        what = f"has {', '.join(map(repr, given))} and no 'optimizer'"
    raise ConfigError(f"optim_wrapper {what}. Write {write}.", config="optim_wrapper")


def waiting_gradients(optim_wrapper: Any) -> tuple[int, int] | None:
    """Return (iterations accumulated, iterations needed) of unused gradients, or None if a step used all of them."""
    for wrapper in optim_wrappers_of(optim_wrapper).values():
        if isinstance(wrapper, OptimWrapper) and not wrapper.should_update():
            counts = wrapper._accumulative_counts
            return wrapper._inner_count % counts, counts
    return None


def with_optimizers(plan: ShardPlan, optim_wrapper: Any) -> ShardPlan:
    """Return the plan with what Muon and AdamW update, if that is the one optimizer; else the plan.

    Args:
        plan: The plan of the model.
        optim_wrapper: An optimizer wrapper, an OptimWrapperDict, or None.
    """
    optimizers = [wrapper.optimizer for wrapper in optim_wrappers_of(optim_wrapper).values()] if optim_wrapper else []
    if len(optimizers) == 1 and isinstance(optimizers[0], MuonWithAdamW):
        return optimizers[0].planned(plan)
    return plan


class OptimizerBinding:
    """Remembers the names of the parameters that optimizers hold, and replaces them by the sharded parameters.

    This way an optimizer constructor sees the names, shapes and classes of the unsharded model, and optimizers,
    wrappers and schedulers that a user built are kept.

    Args:
        model: The model from whose parameters the optimizers were built, not sharded yet.
        optim_wrapper: An optimizer wrapper or an OptimWrapperDict.

    Raises:
        ConfigError: An optimizer holds a parameter that the model does not have, or a parameter has two owners.

    Attributes:
        optim_wrapper: The optimizer wrapper that was given.
    """

    def __init__(self, model: nn.Module, optim_wrapper: Any) -> None:
        names = {id(param): name for name, param in model.named_parameters()}
        _check_owners(optim_wrappers_of(optim_wrapper), names)
        self.optim_wrapper = optim_wrapper
        self._wrappers = optim_wrappers_of(optim_wrapper)
        self._groups: dict[str, list[list[str]]] = {}
        self._states: dict[str, dict[str, Any]] = {}
        for key, wrapper in self._wrappers.items():
            check_optim_wrapper(wrapper, f"optim_wrapper.{key}".rstrip("."))
            groups = wrapper.optimizer.param_groups
            foreign = [tuple(param.shape) for group in groups for param in group["params"] if id(param) not in names]
            if foreign:
                raise ConfigError(
                    f"The optimizer {type(wrapper.optimizer).__name__} holds {len(foreign)} parameters that "
                    f"{type(model).__name__} does not have, with shapes {foreign[:3]}. Build the optimizer from the "
                    "parameters of the model that you train.",
                    config=f"optim_wrapper.{key}".rstrip("."),
                )
            self._groups[key] = [[names[id(param)] for param in group["params"]] for group in groups]
            if wrapper.optimizer.state:
                self._states[key] = wrapper.optimizer.state_dict()

    def bind(self, model: nn.Module, plan: ShardPlan) -> None:
        """Give the optimizers the sharded parameters and make them clip by the global norm. Collective: every rank.

        Args:
            model: The sharded model.
            plan: The plan that was applied to it.

        Raises:
            ConfigError: A flat parameter (``use_orig_params=False``) would be in several param groups.
            ShardStateError: An optimizer needs whole matrices, and the engine is ``fsdp1``.
        """
        params = dict(model.named_parameters())
        flat = _flat_names(plan, params)
        for key, wrapper in self._wrappers.items():
            _check_flat(plan, flat, self._groups[key])
            for group, names in zip(wrapper.optimizer.param_groups, self._groups[key], strict=True):
                group["params"][:] = [params[name] for name in dict.fromkeys(flat.get(name, name) for name in names)]
            wrapper.optimizer.state.clear()
            if isinstance(wrapper.optimizer, MatrixOptimizer):
                wrapper.optimizer.bind(model)
            if key in self._states:
                load_optim_state_dict(model, wrapper.optimizer, self._states[key])
            clip_globally(wrapper, model)


def _check_owners(wrappers: Mapping[str, Any], names: Mapping[int, str]) -> None:
    """Raise if a parameter appears twice: it would be updated twice in a step."""
    owners: dict[int, str] = {}
    for key, wrapper in wrappers.items():
        for group in wrapper.optimizer.param_groups:
            for param in group["params"]:
                if (other := owners.get(id(param))) is not None:
                    who = f"twice by {key!r}" if other == key else f"by both {other!r} and {key!r}"
                    raise ConfigError(
                        f"Parameter {names.get(id(param), '(not of the model)')!r} is held {who} of the "
                        "OptimWrapperDict and would be updated twice. Keep it in one of them.",
                        fqn=names.get(id(param)),
                        config=f"optim_wrapper.{key}".rstrip("."),
                    )
                owners[id(param)] = key


def _flat_names(plan: ShardPlan, params: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Return the name of the flat parameter for every parameter that is part of one."""
    flat: dict[str, str] = {}
    for unit in plan.units:
        name = f"{unit.fqn}._flat_param".lstrip(".")
        if name in params:
            flat |= {param.fqn: name for param in unit.params}
    return flat


def _check_flat(plan: ShardPlan, flat: Mapping[str, str], groups: list[list[str]]) -> None:
    group_of = {name: index for index, names in enumerate(groups) for name in names}
    for unit in plan.units:
        found = {group_of.get(param.fqn) for param in unit.params if param.fqn in flat}
        if len(found) > 1:
            first, *others = unit.params
            other = next(param for param in others if group_of.get(param.fqn) != group_of.get(first.fqn))
            raise ConfigError(
                f"use_orig_params=False makes one flat parameter of shard unit {unit.fqn or '(root)'!r}, but the "
                f"optimizer gives {first.fqn!r} and {other.fqn!r} different settings. Set use_orig_params=True.",
                fqn=unit.fqn,
            )
