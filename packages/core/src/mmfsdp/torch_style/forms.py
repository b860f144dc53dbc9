"""Converts the objects that torch's FullyShardedDataParallel accepts as arguments to settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn as nn

from mmfsdp.errors import ConfigError, closest
from mmfsdp.sharding.devices import current_accelerator

__all__ = ["backward_prefetch", "cpu_offload", "device_type", "ignored", "is_policy", "precision"]

_MIXED_PRECISION = (
    "param_dtype",
    "reduce_dtype",
    "buffer_dtype",
    "output_dtype",
    "keep_low_precision_grads",
    "cast_forward_inputs",
    "cast_root_forward_inputs",
)


def backward_prefetch(value: Any) -> str:
    """Return ``'pre'``, ``'post'`` or ``'none'`` for an enum member, a name or None.

    Raises:
        ConfigError: ``value`` has another type.
    """
    if value is None:
        return "none"
    name = getattr(value, "name", value)
    word = name.strip().lower().rpartition(".")[2].removeprefix("backward_") if isinstance(name, str) else None
    if word not in ("pre", "post", "none"):
        hint = closest(name, ("BACKWARD_PRE", "BACKWARD_POST"), cutoff=0.7) if isinstance(name, str) else ""
        raise ConfigError(
            "backward_prefetch must be 'BACKWARD_PRE', 'BACKWARD_POST', a BackwardPrefetch, or None for no "
            f"prefetching, got {value!r} (type {type(value).__name__}).{hint}",
            config="backward_prefetch",
        )
    return word


def is_policy(value: Any) -> bool:
    """Tell whether a value selects modules: a function, or a policy object of torch."""
    return callable(value) or hasattr(value, "_run_policy")


def precision(value: Any) -> Any:
    """Return settings of `PrecisionConfig` for torch's policy objects, a dict of their fields or a preset name.

    Raises:
        ConfigError: ``value`` has another type.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        fields = dict(value)
        ignored = fields.pop("_module_classes_to_ignore", None)
    else:
        fields = {name: getattr(value, name) for name in _MIXED_PRECISION if hasattr(value, name)}
        ignored = getattr(value, "_module_classes_to_ignore", None)
        if not fields:
            raise ConfigError(
                f"mixed_precision must be a MixedPrecision, a dict of its fields or a preset name, got {value!r} "
                f"(type {type(value).__name__})."
            )
    if isinstance(value, Mapping):
        # torch casts the root's inputs by a setting of its own; without it there is nothing left to cast inside.
        root = fields.setdefault("cast_root_forward_inputs", True)
        fields.setdefault("cast_forward_inputs", root)
    if fields.get("cast_forward_inputs"):
        fields.pop("cast_root_forward_inputs", None)  # torch then casts the root's inputs, whatever it says
    if ignored is not None:
        is_many = isinstance(ignored, Iterable) and not isinstance(ignored, str | type)
        fields["ignore_classes"] = [_name(cls) for cls in ignored] if is_many else ignored
    return fields


def _name(cls: Any) -> Any:
    return f"{cls.__module__}.{cls.__qualname__}" if isinstance(cls, type) else cls


def cpu_offload(value: Any) -> Any:
    """Return settings of `CpuOffloadConfig` for a bool, torch's ``CPUOffload`` or a dict.

    Raises:
        ConfigError: ``value`` has another type.
    """
    if hasattr(value, "offload_params"):
        return bool(value.offload_params)
    if isinstance(value, Mapping):
        fields = dict(value)
        known = ("offload_params", "enabled", "pin_memory")
        for name in fields:
            if name not in known:
                raise ConfigError(
                    f"cpu_offload has no field {name!r}.{closest(name, known, count=1)} Accepted: {', '.join(known)}.",
                    config="cpu_offload",
                )
        if "offload_params" in fields:
            fields["enabled"] = fields.pop("offload_params")
        return fields
    if value is not None and not isinstance(value, bool):
        raise ConfigError(
            f"cpu_offload must be a bool, a CPUOffload or a dict, got {value!r} (type {type(value).__name__})."
        )
    return value


def device_type(device_id: int | str | torch.device | None) -> str | None:
    """Return the type of a device; an index becomes the current device of its type, as in torch's class.

    Raises:
        ConfigError: torch does not know the device.
    """
    if device_id is None:
        return None
    accelerator = current_accelerator()
    if isinstance(device_id, int):
        if accelerator is None:
            return "cpu"  # configs written for GPUs run on a machine without one
        device_id = f"{accelerator}:{device_id}"
    try:
        device = torch.device(device_id)
    except RuntimeError as error:
        raise ConfigError(
            f"device_id must name a device such as 'cpu' or 'cuda:0', got {device_id!r}: {str(error).splitlines()[0]}"
        ) from None
    if device.index is not None and device.type == accelerator:
        torch.get_device_module(device.type).set_device(device.index)
    return device.type


def ignored(
    modules: Iterable[Any] | None, states: Iterable[Any] | None, params: Iterable[Any] | None
) -> tuple[list[nn.Module], list[nn.Parameter], dict[str, list[str]]]:
    """Return the modules, parameters and FQN patterns (by setting) among the values to ignore.

    Raises:
        ConfigError: A value is none of these.
    """
    found_modules: list[nn.Module] = []
    found_params: list[nn.Parameter] = []
    patterns: dict[str, list[str]] = {"ignored_modules": [], "ignored_parameters": []}
    sources = (("ignored_modules", modules), ("ignored_states", states), ("ignored_parameters", params))
    for argument, items in sources:
        for item in [items] if isinstance(items, str) else items or ():
            if isinstance(item, nn.Module):
                found_modules.append(item)
            elif isinstance(item, nn.Parameter):
                found_params.append(item)
            elif isinstance(item, str):
                patterns["ignored_modules" if argument == "ignored_modules" else "ignored_parameters"].append(item)
            else:
                raise ConfigError(
                    f"{argument} holds {item!r} (type {type(item).__name__}); give modules, parameters or names."
                )
    return found_modules, found_params, patterns
