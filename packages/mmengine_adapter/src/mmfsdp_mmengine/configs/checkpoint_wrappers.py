"""Reads the arguments of torch's ``apply_activation_checkpointing`` as settings of activation checkpointing."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from mmfsdp.errors import ConfigError
from mmfsdp_mmengine.configs.named_functions import build_policy

__all__ = ["policy_settings", "wrapper_settings"]

_PATH = "activation_checkpointing.checkpoint_wrapper_fn"
_SETTINGS = ("preserve_rng_state", "use_reentrant", "early_stop", "determinism_check")
_SETTINGS_INSTEAD = "Use mode, save_ops, offload and use_reentrant instead."
_INSTEAD = {
    "offload_wrapper": "To move what is kept to the CPU, write dict(check_fn=..., offload=True).",
    "context_fn": "To keep the results of some operators, write dict(mode='ops', save_ops=[...]).",
}


def wrapper_settings(wrapper: Any) -> dict[str, Any]:
    """Return the settings that a ``checkpoint_wrapper_fn`` stands for.

    Args:
        wrapper: torch's ``checkpoint_wrapper`` or its name, or a ``functools.partial`` of it with ``checkpoint_impl``
            and arguments of ``torch.utils.checkpoint.checkpoint``.

    Raises:
        ConfigError: It is another function, or binds an argument that no setting stands for.
    """
    bound: dict[str, Any] = {}
    while isinstance(wrapper, functools.partial):
        bound = {**wrapper.keywords, **bound}
        if wrapper.args:
            raise _refused(f"binds the positional arguments {wrapper.args!r}", "Bind them by name.")
        wrapper = wrapper.func
    name = getattr(wrapper, "__name__", wrapper)
    if name != "checkpoint_wrapper":
        raise _refused(f"{name!r} cannot be used", _INSTEAD.get(str(name), _SETTINGS_INSTEAD))
    settings = {}
    impl = bound.pop("checkpoint_impl", None)
    if impl is not None:
        settings["use_reentrant"] = _is_reentrant(impl)
    if bound.get("checkpoint_fn") in (None, checkpoint):
        bound.pop("checkpoint_fn", None)
    for key, value in bound.items():
        if key not in _SETTINGS:
            raise _refused(f"binds {key}={value!r}", _INSTEAD.get(key, f"It may bind {', '.join(_SETTINGS)}."))
        settings[key] = value
    return settings


def policy_settings(policy: Any, module: nn.Module) -> dict[str, Any]:
    """Return the settings that ``auto_wrap_policy`` of ``apply_activation_checkpointing`` stands for.

    Args:
        policy: What the wrapper's ``auto_wrap_policy`` may be. Not changed.
        module: The model, in which named classes are looked up.
    """
    found = build_policy(policy, module, "activation_checkpointing.auto_wrap_policy")
    return {"modules" if isinstance(found, Mapping) else "check_fn": found}


def _is_reentrant(impl: Any) -> bool:
    name = str(getattr(impl, "name", impl)).rpartition(".")[2].upper()
    if name not in ("REENTRANT", "NO_REENTRANT"):
        raise _refused(f"binds checkpoint_impl={impl!r}", "Accepted: the members of CheckpointImpl.")
    return name == "REENTRANT"


def _refused(what: str, instead: str) -> ConfigError:
    return ConfigError(
        f"{_PATH} {what}: mmfsdp does not wrap modules, which lets parameters keep their names. {instead}", config=_PATH
    )
