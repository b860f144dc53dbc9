"""Optimizers that were built from the unsharded model, put to work on the sharded one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn
from mmengine.optim import OptimWrapper, OptimWrapperDict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from mmfsdp import ShardPlan, clip_grad_norm_, load_optim_state_dict
from mmfsdp.errors import ConfigError

__all__ = ["OptimizerBinding", "optim_wrappers_of"]


def optim_wrappers_of(optim_wrapper: Any) -> dict[str, Any]:
    """Return an OptimWrapperDict's wrappers by name; a single one has the name ``''``."""
    if isinstance(optim_wrapper, OptimWrapperDict):
        return dict(optim_wrapper.items())
    return {"": optim_wrapper}


class OptimizerBinding:
    """Remembers by name which parameters optimizers hold, and gives them those of that name in the sharded model.

    So a constructor sees the names, shapes and classes of the unsharded model whatever the engine does to them, and an
    optimizer, its wrapper and its schedulers that a user built stay the objects that they are.

    Args:
        model: The model from whose parameters the optimizers were built, not sharded yet.
        optim_wrapper: An optimizer wrapper or an OptimWrapperDict.

    Raises:
        ConfigError: An optimizer holds parameters that the model does not have, or several hold the same.

    Attributes:
        optim_wrapper: What was given.
    """

    def __init__(self, model: nn.Module, optim_wrapper: Any) -> None:
        names = {id(param): name for name, param in model.named_parameters()}
        self.optim_wrapper = optim_wrapper
        self._wrappers = optim_wrappers_of(optim_wrapper)
        self._groups: dict[str, list[list[str]]] = {}
        self._states: dict[str, dict[str, Any]] = {}
        for key, wrapper in self._wrappers.items():
            groups = wrapper.optimizer.param_groups
            foreign = [tuple(param.shape) for group in groups for param in group["params"] if id(param) not in names]
            if foreign:
                raise ConfigError(
                    f"The optimizer {type(wrapper.optimizer).__name__} holds {len(foreign)} parameters that are not "
                    f"{type(model).__name__}'s, of shapes {foreign[:3]}. Build it from the parameters of the model "
                    "that is trained.",
                    config=f"optim_wrapper.{key}".rstrip("."),
                )
            self._groups[key] = [[names[id(param)] for param in group["params"]] for group in groups]
            if wrapper.optimizer.state:
                self._states[key] = wrapper.optimizer.state_dict()

    def bind(self, model: nn.Module, plan: ShardPlan) -> None:
        """Give the optimizers the sharded parameters, and clip by the global norm. Collective: every rank.

        Args:
            model: The sharded model.
            plan: What was done to it.

        Raises:
            ConfigError: A flat parameter (``use_orig_params=False``) would be in several param groups.
        """
        params = dict(model.named_parameters())
        flat = _flat_names(plan, params)
        for key, wrapper in self._wrappers.items():
            _check_flat(plan, flat, self._groups[key])
            for group, names in zip(wrapper.optimizer.param_groups, self._groups[key], strict=True):
                group["params"][:] = [params[name] for name in dict.fromkeys(flat.get(name, name) for name in names)]
                kinds = {isinstance(param, DTensor) for param in group["params"]}
                if len(kinds) > 1 and group.get("foreach") is None and not group.get("fused"):
                    group["foreach"] = False  # torch's loops over many tensors take one kind only
            wrapper.optimizer.state.clear()
            if key in self._states:
                load_optim_state_dict(model, wrapper.optimizer, self._states[key])
            _clip_globally(wrapper, model)


def _flat_names(plan: ShardPlan, params: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """For parameters that are part of a flat one, the name of that."""
    flat: dict[str, str] = {}
    for unit in plan.units:
        name = f"{unit.fqn}._flat_param".lstrip(".")
        if name in params:
            flat |= {param.fqn: name for param in unit.params}
    return flat


def _check_flat(plan: ShardPlan, flat: Mapping[str, str], groups: list[list[str]]) -> None:
    place = {name: index for index, names in enumerate(groups) for name in names}
    for unit in plan.units:
        places = {place.get(param.fqn) for param in unit.params if param.fqn in flat}
        if len(places) > 1:
            first, *others = unit.params
            other = next(param for param in others if place.get(param.fqn) != place.get(first.fqn))
            raise ConfigError(
                f"use_orig_params=False makes one flat parameter of shard unit {unit.fqn or '(root)'!r}, but the "
                f"optimizer treats {first.fqn!r} and {other.fqn!r} of it differently. Set use_orig_params=True.",
                fqn=unit.fqn,
            )


def _clip_globally(wrapper: Any, model: nn.Module) -> None:
    if not getattr(wrapper, "clip_grad_kwargs", None):
        return
    if wrapper.clip_func is torch.nn.utils.clip_grad_value_:
        wrapper.clip_func = _clip_value
        return
    if wrapper.clip_func is not torch.nn.utils.clip_grad_norm_:
        return  # the user's own
    is_fsdp1 = isinstance(model, FullyShardedDataParallel)

    def clip(params: Any, max_norm: float, norm_type: Any = 2.0, error_if_nonfinite: bool = False, **_: Any) -> Any:
        return clip_grad_norm_(
            model if is_fsdp1 else params, float(max_norm), float(norm_type), error_if_nonfinite=error_if_nonfinite
        )

    wrapper.clip_func = clip
    if is_fsdp1 and type(wrapper)._clip_grad is OptimWrapper._clip_grad:
        # MMEngine clips where gradients are; with FSDP1 a rank may have none, and the others would wait for it.
        def clip_grad() -> None:
            norm = clip([], **wrapper.clip_grad_kwargs)
            wrapper.message_hub.update_scalar(f"train/{wrapper.grad_name}", float(norm))

        wrapper._clip_grad = clip_grad


def _clip_value(params: list[torch.Tensor], clip_value: float, **_: Any) -> None:
    """Elementwise, so each rank clips what it holds."""
    for param in params:
        if param.grad is not None:
            local = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
            local.clamp_(-float(clip_value), float(clip_value))
