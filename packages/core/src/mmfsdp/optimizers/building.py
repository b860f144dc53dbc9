"""Builds the optimizer that the plan of a sharded model names, or one around a function of a matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.optim import AdamW

from mmfsdp.basics.text import name_list
from mmfsdp.errors import ConfigError, ShardStateError
from mmfsdp.optimizers.functions import MUON, MatrixFunction, UpdateMatrix
from mmfsdp.optimizers.matrix_optimizer import BUCKET_BYTES, MatrixOptimizer, loss_of, state_with_matrices
from mmfsdp.planning import ShardPlan
from mmfsdp.planning.optimizer_groups import OptimizerGroup, OptimizerPlan
from mmfsdp.runtime.sharded_model import ShardedModel, find_sharded_model

__all__ = ["MuonWithAdamW", "build_optimizer", "matrix_optimizer"]

_RATES = ("lr", "weight_decay")
_MUON = ("momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn", "parts", "is_stack")
_SETTINGS = {"muon": (*_RATES, *_MUON), "adamw": (*_RATES, "betas", "eps")}
"""The settings that a param group of each optimizer must have."""


class MuonWithAdamW(MatrixOptimizer):
    """One optimizer that updates matrices as ``torch.optim.Muon`` does, and all else by ``torch.optim.AdamW``.

    Param groups have an entry ``optimizer``, ``'muon'`` or ``'adamw'``; state and settings of each are torch's.

    Args:
        groups: Param groups, with all settings. They belong to the optimizer from now on.
        **options: See `MatrixOptimizer`.
    """

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        plain = [group for group in groups if group["optimizer"] == "adamw"]
        self._adamw = AdamW(plain) if plain else None  # it fills in the settings that a group lacks
        # What MMEngine's OptimWrapper logs as the base learning rate.
        defaults = {name: groups[0][name] for name in _RATES} if groups else {}
        super().__init__(groups, MUON, defaults, **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights. Collective: see `MatrixOptimizer.step`."""
        loss = loss_of(closure)
        if plain := [group for group in self.param_groups if group["optimizer"] == "adamw"]:
            # Groups may have been added, and loading a state replaces groups and state.
            self._adamw = self._adamw or AdamW(plain)
            self._adamw.param_groups, self._adamw.state = plain, self.state
            self._adamw.step()
        self._update_matrices()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. Every rank must add the same ones before its next step.

        Args:
            param_group: ``params``, and ``optimizer``: ``'muon'`` or ``'adamw'``. Settings that it lacks are
                taken from the first group of that optimizer.

        Raises:
            ConfigError: It does not say which optimizer updates it, or no group has a setting that it lacks.
        """
        kind = param_group.get("optimizer")
        if kind not in _SETTINGS:
            raise ConfigError(
                f"A param group of {type(self).__name__} says by optimizer='muon' or 'adamw' who updates it, got "
                f"{kind!r}. Add {{'params': [...], 'optimizer': 'adamw', 'lr': ...}}.",
                config="optimizer",
            )
        like: dict[str, Any] = next((group for group in self.param_groups if group["optimizer"] == kind), {})
        missing = [name for name in _SETTINGS[kind] if name not in param_group and name not in like]
        if missing:
            raise ConfigError(
                f"A param group of {kind} lacks {name_list(missing)}, and no other group of {kind} has it.",
                config="optimizer",
            )
        own = self._adamw.defaults if kind == "adamw" and self._adamw is not None else {}
        shared = {name: like[name] for name in _SETTINGS[kind] if name in like}
        super().add_param_group({**own, **shared, **param_group})

    def planned(self, plan: ShardPlan) -> ShardPlan:
        """Return a plan that says what this optimizer does, as one that was made with it. Not collective.

        Args:
            plan: The plan of the model whose parameters it updates.
        """
        groups = [
            OptimizerGroup(
                optimizer=group["optimizer"],
                fqns=tuple(self._names[id(param)] for param in group["params"]),
                settings={name: group[name] for name in _SETTINGS[group["optimizer"]]},
            )
            for group in self.param_groups
        ]
        return plan.model_copy(
            update={"optimizer": OptimizerPlan(groups=tuple(groups), bucket_bytes=self._bucket_bytes)}
        )

    def matrix_groups(self) -> list[dict[str, Any]]:
        """Return the param groups of Muon."""
        return [group for group in self.param_groups if group["optimizer"] == "muon"]


def build_optimizer(model: nn.Module) -> MuonWithAdamW:
    """Return the optimizer that the plan of a sharded model names. Not collective, but its ``step()`` is.

    Args:
        model: A model that was sharded with the setting ``optimizer``.

    Raises:
        ConfigError: The config has no such setting.
        ShardStateError: The model is not sharded, or trains other parameters than its plan; the message names one.

    Example:
        >>> model = mmfsdp.shard(model, {"optimizer": {"muon": "auto", "lr": 1e-2, "adamw": {"lr": 1e-3}}})
        >>> optimizer = mmfsdp.build_optimizer(model)
    """
    state = find_sharded_model(model)
    chosen = state.plan.optimizer
    if chosen is None:
        raise ConfigError(
            "The model was sharded without the setting optimizer, so its plan names none. Write "
            'mmfsdp.shard(model, optimizer={"muon": "auto", "lr": 1e-2}), or build an optimizer of torch from '
            "model.parameters().",
            config="optimizer",
        )
    params = _params_of(state)
    missing = [fqn for group in chosen.groups for fqn in group.fqns if fqn not in params]
    if missing:
        raise ShardStateError(
            f"The plan has a parameter {missing[0]!r}, which the model has not, or not any more. Shard the model with "
            "the parameters that are trained.",
            fqn=missing[0],
        )
    planned = {fqn for group in chosen.groups for fqn in group.fqns}
    if unplanned := [fqn for fqn, param in params.items() if param.requires_grad and fqn not in planned]:
        raise ShardStateError(
            f"{name_list(unplanned)} would be trained by no optimizer: added to the model, or set to require a "
            "gradient, after the plan was made. Do both before you call shard().",
            fqn=unplanned[0],
        )
    groups = [
        {"params": [params[fqn] for fqn in group.fqns], "optimizer": group.optimizer, **_settings(group.settings)}
        for group in chosen.groups
    ]
    names = {id(param): fqn for fqn, param in params.items()}
    return MuonWithAdamW(groups, mesh=state.mesh, names=names, bucket_bytes=chosen.bucket_bytes)


def matrix_optimizer(
    model: nn.Module,
    update: UpdateMatrix | MatrixFunction,
    params: Any = None,
    *,
    lr: float = 1e-3,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    parts: int = 1,
    is_stack: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
    **settings: Any,
) -> MatrixOptimizer:
    """Return an optimizer that updates each matrix by a function. Not collective, but its ``step()`` is.

    Args:
        model: A sharded model.
        update: ``(matrix, state, settings)``, returns the update of a matrix: a tensor of its shape. It runs on the
            rank that owns the matrix. ``matrix`` is the gradient with momentum, ``state`` a dict that the owner keeps
            for it, of tensors, numbers, text and lists or dicts of these, which checkpoints hold, and ``settings`` the
            param group.
        params: Parameters or param groups. Default: all that are trained.
        lr: The learning rate; updates are multiplied by it.
        momentum: The part of the momentum that each step keeps.
        nesterov: Compute the update from the gradient mixed with the momentum, rather than from the momentum.
        weight_decay: Multiplied by the learning rate; weights lose this part of themselves in a step.
        parts: Matrices that lie one below the other in each parameter of a group, such as 3 for fused q, k and v.
        is_stack: Whether the first dimension of a group's parameters counts matrices, as in experts' weights.
        bucket_bytes: The most that the matrices of a bucket take in messages; a larger parameter is one of its own.
        **settings: Other settings of param groups, for ``update``.

    Raises:
        ConfigError: A setting is out of range.
        ShardStateError: The model is not sharded, or by engine ``fsdp1``, whose parameters have no matrices.
    """
    for name, value, is_right in (
        ("lr", lr, lr >= 0),
        ("momentum", momentum, 0 <= momentum < 1),
        ("weight_decay", weight_decay, weight_decay >= 0),
        ("parts", parts, parts >= 1),
        ("bucket_bytes", bucket_bytes, bucket_bytes > 0),
    ):
        if not is_right:
            raise ConfigError(f"{name}={value!r} of matrix_optimizer() is out of range.")
    state = state_with_matrices(model)
    names = {id(param): fqn for fqn, param in _params_of(state).items()}
    if params is None:
        params = [param for param in _params_of(state).values() if param.requires_grad]
    function = update if isinstance(update, MatrixFunction) else MatrixFunction(update, _elements, _same)
    own = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    defaults = {**own, "parts": parts, "is_stack": is_stack, **settings}
    return MatrixOptimizer(params, function, defaults, mesh=state.mesh, names=names, bucket_bytes=bucket_bytes)


def _params_of(state: ShardedModel) -> dict[str, nn.Parameter]:
    return dict(state.module.named_parameters())


def _settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a param group, which JSON may have turned into lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}


def _elements(rows: int, columns: int, settings: Mapping[str, Any]) -> float:
    return float(rows * columns * min(rows, columns))  # as a product or a decomposition


def _same(lr: float, rows: int, columns: int, settings: Mapping[str, Any]) -> float:
    return lr
