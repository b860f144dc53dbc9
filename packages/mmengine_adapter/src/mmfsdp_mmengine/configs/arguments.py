"""Translates MMEngine arguments, in every form that configs use, into arguments of core."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from mmengine.config import ConfigDict
from torch.distributed.fsdp import StateDictType
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mmfsdp.errors import ConfigError, closest
from mmfsdp.torch_style import ARGUMENTS, advice_for_argument
from mmfsdp_mmengine.configs.meshes import build_group, build_mesh
from mmfsdp_mmengine.configs.named_functions import build_check_fn, build_function, build_policy
from mmfsdp_mmengine.configs.unknown import refuse_unknown

__all__ = [
    "StateDictSettings",
    "activation_arguments",
    "copied",
    "named",
    "plain",
    "state_dict_settings",
    "wrapper_arguments",
]

_OF_REPLICAS = {
    **dict.fromkeys(
        inspect.signature(DistributedDataParallel).parameters,
        "It belongs to MMDistributedDataParallel; sharding does not need it. Remove it.",
    ),
    "find_unused_parameters": "It belongs to MMDistributedDataParallel. Here, parameters that a step does not use may "
    "differ from step to step and from rank to rank. Remove it.",
}
"""Messages about arguments that belong to DistributedDataParallel."""

_ELSEWHERE = {
    **_OF_REPLICAS,
    **dict.fromkeys(
        ("gradient_clipping", "max_grad_norm"), "Write optim_wrapper = dict(..., clip_grad=dict(max_norm=1.0))."
    ),
    "gradient_accumulation_steps": "Write optim_wrapper = dict(..., accumulative_counts=2).",
    "state_dict_type": "Write strategy = dict(..., state_dict_cfg='full').",
    "optimizer": "Write it in optim_wrapper.",
}
"""Messages about arguments that belong elsewhere in a config."""

_KINDS: dict[str, Literal["full", "local", "sharded"]] = {"FULL": "full", "LOCAL": "local", "SHARDED": "sharded"}

_PATH = "activation_checkpointing.checkpoint_wrapper_fn"
_SETTINGS = ("preserve_rng_state", "use_reentrant", "early_stop", "determinism_check")
_SETTINGS_INSTEAD = "Use mode, save_ops, offload and use_reentrant instead."
_INSTEAD = {
    "offload_wrapper": "To move what is kept to the CPU, write dict(check_fn=..., offload=True).",
    "context_fn": "To keep the results of some operators, write dict(mode='ops', save_ops=[...]).",
}


def plain(value: Any) -> Any:
    """Return a copy of a config value: containers are copied and become plain ones, other objects are kept."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset) and not hasattr(value, "_fields"):
        return type(value)(plain(item) for item in value)
    return value


def copied(value: Any) -> Any:
    """Return a copy of a config value whose dicts have attributes too, which packages use: ``cfg.pretrained``."""
    copy = plain(value)
    return ConfigDict(copy) if isinstance(copy, dict) else copy


def named(value: Any) -> Any:
    """Return a copy of a config value that can be written: objects that are not plain data become their names."""
    if isinstance(value, Mapping):
        return {key: named(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(named(item) for item in value)
    if value is None or isinstance(value, str | int | float | complex):
        return value
    if isinstance(value, set | frozenset):
        return [named(item) for item in value]
    if isinstance(value, partial):
        return f"partial({named(value.func)})"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return str(value)


def wrapper_arguments(module: nn.Module, **given: Any) -> dict[str, Any]:
    """Translate arguments of `MMFullyShardedDataParallel` into arguments of `mmfsdp.FullyShardedDataParallel`.

    Collective only if ``process_group`` or ``device_mesh`` is a dict: then every rank of the world.

    Args:
        module: The model, in which named classes are looked up.
        **given: The arguments as a config has them. Not changed.

    Raises:
        PolicyNotFoundError: No function has the given name.
        ConfigError: An argument is unknown or has a value that is not accepted.
        MeshError: ``process_group`` or ``device_mesh`` does not fit the ranks that were started.
    """
    refuse_unknown("MMFullyShardedDataParallel", given, ARGUMENTS, "model_wrapper", _ELSEWHERE, advice_for_argument)
    arguments: dict[str, Any] = plain(given)
    for name in ("auto_wrap_policy", "fsdp_auto_wrap_policy"):
        if name in arguments:
            arguments[name] = build_policy(arguments[name], module, name)
    if "param_init_fn" in arguments:
        arguments["param_init_fn"] = build_function(arguments["param_init_fn"], "param_init_fn")
    if "activation_checkpointing" in arguments:
        arguments["activation_checkpointing"] = activation_arguments(arguments["activation_checkpointing"], module)
    for name, type_name in (("mixed_precision", "MixedPrecision"), ("cpu_offload", "CPUOffload")):
        if isinstance(arguments.get(name), dict):
            arguments[name] = _without_type(arguments[name], type_name, name)
    if isinstance(arguments.get("mixed_precision"), dict):
        ignored = arguments["mixed_precision"].pop("_module_classes_to_ignore", None)
        if ignored is not None:
            arguments["mixed_precision"]["ignore_classes"] = ignored
    arguments["process_group"] = build_group(arguments.get("process_group"))
    if isinstance(arguments.get("device_mesh"), dict):
        arguments["device_mesh"] = build_mesh(arguments["device_mesh"])
    return arguments


def activation_arguments(value: Any, module: nn.Module) -> Any:
    """Translate the arguments of a strategy or wrapper into core's settings of activation checkpointing.

    Args:
        value: A mode, True, or a dict: ``check_fn`` as a name, a callable or ``dict(type=..., **arguments)``, beside
            core's settings and the other arguments of torch's ``apply_activation_checkpointing``:
            ``checkpoint_wrapper_fn``, and ``auto_wrap_policy``, which replaces ``check_fn`` as it does there. Not
            changed.
        module: The model, in which named classes are looked up.

    Raises:
        PolicyNotFoundError: ``check_fn`` or a policy is named and not found.
        ConfigError: ``checkpoint_wrapper_fn`` is not torch's own, or binds what no setting stands for.
    """
    if not isinstance(value, Mapping):
        return value
    settings: dict[str, Any] = plain(value)
    wrapper = settings.pop("checkpoint_wrapper_fn", None)
    if wrapper is not None:
        settings = {**_wrapper_settings(wrapper), **settings}
    policy = settings.pop("auto_wrap_policy", None)
    if policy is not None:
        settings.pop("check_fn", None)
        settings |= {"mode": "selective", **settings, **_policy_settings(policy, module)}
    elif "check_fn" in settings:
        settings["check_fn"] = build_check_fn(settings["check_fn"])
        settings.setdefault("mode", "selective")
    return settings


@dataclass(frozen=True, slots=True)
class StateDictSettings:
    """The meaning of a strategy's ``state_dict_cfg``."""

    kind: Literal["full", "local", "sharded"]
    """``full``: one file with whole tensors. ``local``: a directory with a file per rank. ``sharded``: a directory of
    torch's distributed checkpoint."""
    state_dict_type: StateDictType
    """The same as torch's enum member."""


def state_dict_settings(value: Any) -> StateDictSettings:
    """Return the meaning of ``state_dict_cfg``.

    Args:
        value: ``'full'``, ``'local'``, ``'sharded'``, or a dict of ``state_dict_type`` (enum member or its name),
            ``state_dict_config`` and ``optim_state_dict_config`` (an object, a class, or a dict with ``type``). Each
            may be left out. Not changed.

    Raises:
        ConfigError: The value is none of these, or its parts contradict each other.
    """
    if isinstance(value, str):
        if value not in _KINDS.values():
            raise ConfigError(
                f"state_dict_cfg must be 'full', 'local', 'sharded' or a dict, got {value!r}."
                f"{closest(value, _KINDS.values())}",
                config="state_dict_cfg",
            )
        return StateDictSettings(_KINDS[value.upper()], StateDictType[f"{value.upper()}_STATE_DICT"])
    if not isinstance(value, Mapping):
        raise ConfigError(
            "state_dict_cfg must be 'full', 'local', 'sharded' or a dict, got "
            f"{value!r} (type {type(value).__name__}).",
            config="state_dict_cfg",
        )
    names = ("state_dict_type", "state_dict_config", "optim_state_dict_config")
    refuse_unknown("state_dict_cfg", value, names, "state_dict_cfg")
    said = {name: _kind_of(value[name], name) for name in names if value.get(name) is not None}
    if len({*said.values()}) > 1:
        parts = ", ".join(f"{name} is {kind}" for name, kind in said.items())
        raise ConfigError(f"state_dict_cfg contradicts itself: {parts}. Make them agree.", config="state_dict_cfg")
    name = next(iter(said.values()), "LOCAL")
    return StateDictSettings(_KINDS[name], StateDictType[f"{name}_STATE_DICT"])


def _kind_of(value: Any, setting: str) -> str:
    """Return ``FULL``, ``LOCAL`` or ``SHARDED`` for an enum member, a config object or class, or the name of one."""
    arguments: dict[str, Any] = {}
    if isinstance(value, Mapping):
        arguments = {key: item for key, item in value.items() if key != "type"}
        value = value.get("type")
    if not isinstance(value, str | StateDictType):
        value = value if isinstance(value, type) else type(value)
    name = str(getattr(value, "__name__", getattr(value, "name", value))).rpartition(".")[2]
    if setting == "state_dict_type":
        accepted = {f"{kind}_STATE_DICT": kind for kind in _KINDS}
    else:
        infix = "Optim" if setting.startswith("optim") else ""
        accepted = {f"{kind.title()}{infix}StateDictConfig": kind for kind in _KINDS}
    if name not in accepted:
        raise ConfigError(
            f"state_dict_cfg.{setting} {name!r} is not known.{closest(name, accepted)} "
            f"Accepted: {', '.join(accepted)}.",
            config=f"state_dict_cfg.{setting}",
        )
    # Checkpoints are always offloaded and written by as few ranks as possible: only misspelt arguments matter.
    known = [field.name for field in fields(getattr(torch_fsdp, name))] if name.endswith("Config") else []
    refuse_unknown(name, arguments, known, f"state_dict_cfg.{setting}")
    return accepted[name]


def _without_type(value: dict[str, Any], expected: str, argument: str) -> dict[str, Any]:
    given = value.pop("type", expected)
    name = given if isinstance(given, str) else getattr(given, "__name__", str(given))
    if name.rpartition(".")[2] != expected:
        raise ConfigError(f"{argument} must be a {expected}, got a {name!r}.", config=argument)
    return value


def _wrapper_settings(wrapper: Any) -> dict[str, Any]:
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


def _policy_settings(policy: Any, module: nn.Module) -> dict[str, Any]:
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
