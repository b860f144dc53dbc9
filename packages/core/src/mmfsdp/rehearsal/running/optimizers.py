"""Makes the optimizer of a rehearsal, by a short name, a class of ``torch.optim``, or a class that can be imported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn

from mmfsdp.basics.references import resolve_reference
from mmfsdp.errors import ConfigError, MmfsdpError, closest
from mmfsdp.optimizers.building import build_optimizer
from mmfsdp.planning.schema import ShardPlan

__all__ = ["OptimizerFn", "make_optimizer", "optimizer_from", "optimizer_of"]

OptimizerFn = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
"""``(parameters) -> optimizer``."""

# What follows the class's name in names such as ``rmsprop-momentum-centered``.
_OPTIONS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9},
    "amsgrad": {"amsgrad": True},
    "centered": {"centered": True},
}


def optimizer_from(name: str, settings: Mapping[str, Any] | None = None) -> OptimizerFn:
    """Return what makes an optimizer of the parameters that require gradients.

    Args:
        name: One of `mmfsdp.planning.OPTIMIZERS`, such as ``'sgd-momentum'``; any class of ``torch.optim``, in any
            case; or ``'package.module:Class'``.
        settings: Its arguments besides the parameters.

    Raises:
        ConfigError: There is no such optimizer. The returned function raises it if the optimizer cannot be made.
    """
    cls, options = _class_of(name)
    given = {**options, **(settings or {})}

    def make(params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        try:
            made: torch.optim.Optimizer = cls([param for param in params if param.requires_grad], **given)
        except Exception as error:  # whatever a user's class raises
            shown = "".join(f", {key}={value!r}" for key, value in given.items())
            raise ConfigError(
                f"{name}(params{shown}) failed: {type(error).__name__}: {error}", config="optimizer"
            ) from error
        return made

    return make


def make_optimizer(
    optimizer: str | OptimizerFn, params: Sequence[torch.Tensor], device_type: str
) -> torch.optim.Optimizer:
    """Return the optimizer, with the kernels that it would choose on a device.

    Args:
        optimizer: A name for `optimizer_from`, or what makes an optimizer.
        params: The sharded model's parameters.
        device_type: On other devices than the CPU, torch's optimizers compute many tensors in one call by default.

    Raises:
        ConfigError: There is no such optimizer, or it cannot be made for these parameters.
    """
    made = (optimizer_from(optimizer) if isinstance(optimizer, str) else optimizer)(params)
    if isinstance(made, list | tuple):
        raise ConfigError(
            f"The function makes {len(made)} optimizers, and this step has one. mmfsdp.prove(step=...) takes several.",
            config="optimizer",
        )
    if device_type != "cpu":
        for group in made.param_groups:
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True
    return made


def optimizer_of(
    optimizer: str | OptimizerFn | None, model: nn.Module, plan: ShardPlan, device_type: str
) -> torch.optim.Optimizer:
    """Return the optimizer of a sharded model; see `make_optimizer`.

    Args:
        optimizer: See `make_optimizer`. None: the one that the plan names, or AdamW.
        model: The sharded model.
        plan: Its plan.
        device_type: See `make_optimizer`.

    Raises:
        ConfigError: See `make_optimizer`.
    """
    if optimizer is None and plan.optimizer is not None:
        optimizer = lambda _: build_optimizer(model)  # noqa: E731
    return make_optimizer(optimizer or "adamw", [*model.parameters()], device_type)


def _class_of(name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    if ":" in name:
        try:
            found = resolve_reference(name)
        except MmfsdpError:
            raise
        except Exception as error:  # importing the user's module may raise anything
            raise ConfigError(
                f"Importing {name!r} failed: {type(error).__name__}: {error}", config="optimizer"
            ) from error
        if not callable(found):
            raise ConfigError(f"{name!r} is not a class of an optimizer, but {found!r}.", config="optimizer")
        return found, {}
    known = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    head, *options = name.lower().split("-")
    if head not in known or any(option not in _OPTIONS for option in options):
        hint = closest(name.lower(), [*known, "sgd-momentum"]) or f" Known: {', '.join(sorted(known))}."
        raise ConfigError(
            f"{name!r} is not an optimizer of torch.optim.{hint} For others write 'package.module:Class', or give a "
            "function that takes parameters and returns the optimizer.",
            config="optimizer",
        )
    return known[head], {key: value for option in options for key, value in _OPTIONS[option].items()}
