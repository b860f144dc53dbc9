"""Translates the arguments of torch's FullyShardedDataParallel, of torch 1.11 and later, to a `ShardConfig`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from mmfsdp.collective.scopes import is_group_pair
from mmfsdp.config import ShardConfig
from mmfsdp.config.base import settings_written_as
from mmfsdp.config.synonyms import bare_name, synonym_of
from mmfsdp.errors import ConfigError, closest
from mmfsdp.planning.policies.forms import Policy
from mmfsdp.torch_style import forms

if TYPE_CHECKING:
    from mmfsdp.sharding.materialise import InitFn

__all__ = ["ARGUMENTS", "Translated", "advice_for_argument", "translate_arguments"]


_UNSET: Any = object()

_ARGUMENTS = {
    "sharding.strategy": "sharding_strategy",
    "sharding.use_orig_params": "use_orig_params",
    "sharding.limit_all_gathers": "limit_all_gathers",
    "sharding.ignored_modules": "ignored_modules",
    "sharding.ignored_parameters": "ignored_states",
    "prefetch.backward": "backward_prefetch",
    "prefetch.forward": "forward_prefetch",
    "init.sync_states": "sync_module_states",
    "init.param_init_fn": "param_init_fn",
    "init.device": "device_id",
    "cpu_offload.enabled": "cpu_offload.offload_params",
    "precision.preset": "mixed_precision",
    "precision.ignore_classes": "mixed_precision._module_classes_to_ignore",
    "precision": "mixed_precision",
    "wrap": "auto_wrap_policy",
    "sharding": "sharding_strategy",
}
"""Arguments by the paths of the settings that they become."""


@dataclass(frozen=True, slots=True)
class Translated:
    """A configuration, and the objects that a configuration cannot hold."""

    config: ShardConfig
    policy: Policy = None
    param_init_fn: InitFn | None = None
    check_fn: Callable[[nn.Module], bool] | None = None
    ignored_modules: list[nn.Module] = field(default_factory=list)
    ignored_params: list[nn.Parameter] = field(default_factory=list)
    mesh: Any = None


def translate_arguments(
    *,
    config: ShardConfig | Mapping[str, Any] | None = None,
    process_group: Any = None,
    sharding_strategy: Any = None,
    cpu_offload: Any = None,
    auto_wrap_policy: Any = None,
    backward_prefetch: Any = _UNSET,
    mixed_precision: Any = None,
    ignored_modules: Iterable[nn.Module | str] | None = None,
    param_init_fn: InitFn | str | None = None,
    device_id: int | str | torch.device | None = None,
    sync_module_states: bool | None = None,
    forward_prefetch: bool | int | None = None,
    limit_all_gathers: bool | None = None,
    use_orig_params: bool | None = None,
    ignored_states: Iterable[nn.Module | nn.Parameter | str] | None = None,
    ignored_parameters: Iterable[nn.Parameter | str] | None = None,
    device_mesh: Any = None,
    engine: str | None = None,
    activation_checkpointing: Any = None,
    fsdp_auto_wrap_policy: Any = None,
    **unknown: Any,
) -> Translated:
    """Return the settings that the arguments mean. Not collective.

    It changes nothing, except that ``device_id`` selects the current device, as in torch's class.

    Args:
        config: Base settings; every argument that is given overrides them.
        process_group: A group, a (shard, replicate) pair of groups as in torch's class, or None.
        sharding_strategy: Enum member or name.
        cpu_offload: bool, ``CPUOffload``, or a dict of ``CpuOffloadConfig`` fields.
        auto_wrap_policy: Anything `mmfsdp.planning.resolve_policy` takes, or a dict with ``kind``.
        backward_prefetch: Enum member, its name, ``'pre'``, ``'post'``, or None.
        mixed_precision: ``MixedPrecision``, ``MixedPrecisionPolicy``, a preset name, or a dict of their fields.
        ignored_modules: Modules, or FQN patterns.
        param_init_fn: A function of one module, or a reference to it.
        device_id: Device to shard on.
        sync_module_states: Whether to start from rank 0's weights; unlike in torch the default is True.
        forward_prefetch: Whether forward gathers the next unit early, or how many units ahead.
        limit_all_gathers: Accepted; it is always on.
        use_orig_params: ``False`` selects engine ``fsdp1``, which it needs. Default True.
        ignored_states: Modules or parameters, or FQN patterns of parameters.
        ignored_parameters: Parameters, or FQN patterns; the name is torch 2.0's.
        device_mesh: A mesh of one dimension, or of two: (replicate, shard).
        engine: ``'auto'``, ``'fsdp2'``, ``'fsdp1'`` or ``'replicate'``.
        activation_checkpointing: True, a mode, or a dict of its settings, whose ``check_fn`` may be a function or a
            policy of torch.
        fsdp_auto_wrap_policy: torch 1.11's name of ``auto_wrap_policy``.
        **unknown: Any other name raises an error that suggests the nearest arguments.

    Raises:
        ConfigError: An argument is unknown, has a value that is not accepted, or contradicts another one.
    """
    for name in unknown:
        hint = advice_for_argument(name, ARGUMENTS) or f"{closest(name, ARGUMENTS)} Accepted: {', '.join(ARGUMENTS)}."
        raise ConfigError(f"FullyShardedDataParallel has no argument {name!r}.{hint}")
    if fsdp_auto_wrap_policy is not None:
        if auto_wrap_policy is not None:
            raise ConfigError("fsdp_auto_wrap_policy is torch 1.11's name of auto_wrap_policy; give only one of them.")
        auto_wrap_policy = fsdp_auto_wrap_policy
    if process_group is not None and device_mesh is not None:
        raise ConfigError("process_group and device_mesh both say which ranks shard; give only one of them.")
    base = _as_dict(config)
    policy: Policy = None
    if isinstance(auto_wrap_policy, Mapping):
        base["wrap"] = dict(auto_wrap_policy)
    elif auto_wrap_policy is not None:
        policy = auto_wrap_policy
    else:
        base.setdefault("wrap", "none")  # torch's default
    modules, params, patterns = forms.ignored(ignored_modules, ignored_states, ignored_parameters)

    sharding = _section(base, "sharding", "strategy")
    _set(sharding, "strategy", sharding_strategy)
    _set(sharding, "use_orig_params", use_orig_params)
    _set(sharding, "limit_all_gathers", limit_all_gathers)
    for key, names in patterns.items():
        if names:
            sharding[key] = [*sharding.get(key, ()), *names]
    init = _section(base, "init", "")
    _set(init, "sync_states", sync_module_states)
    _set(init, "device", forms.device_type(device_id))
    init_fn = param_init_fn if callable(param_init_fn) else None
    if isinstance(param_init_fn, str):
        init["param_init_fn"] = param_init_fn
    prefetch = _section(base, "prefetch", "backward")
    if backward_prefetch is not _UNSET:
        prefetch["backward"] = forms.backward_prefetch(backward_prefetch)
    if forward_prefetch is not None:
        prefetch["forward"] = int(forward_prefetch)
    _set(base, "precision", forms.precision(mixed_precision))
    _set(base, "cpu_offload", forms.cpu_offload(cpu_offload))
    _set(base, "engine", engine)
    check_fn = None
    if isinstance(activation_checkpointing, Mapping) and forms.is_policy(activation_checkpointing.get("check_fn")):
        activation_checkpointing = dict(activation_checkpointing)
        check_fn = activation_checkpointing.pop("check_fn")
    _set(base, "activation_checkpointing", activation_checkpointing)
    # FSDP1's pair is (shard, replicate); everywhere else a pair is (replicate, shard), as in a DeviceMesh.
    groups = (process_group[1], process_group[0]) if is_group_pair(process_group) else process_group
    mesh = groups if groups is not None else device_mesh
    with settings_written_as(_ARGUMENTS) if config is None else nullcontext():
        settings = ShardConfig.from_dict(base)
    return Translated(settings, policy, init_fn, check_fn, modules, params, mesh)


ARGUMENTS = tuple(name for name in inspect.signature(translate_arguments).parameters if name != "unknown")
"""The names that `translate_arguments` knows."""


def _as_dict(config: ShardConfig | Mapping[str, Any] | None) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, ShardConfig):
        return config.model_dump(exclude_unset=True)
    if isinstance(config, Mapping):
        return dict(config)
    raise ConfigError(f"config must be a ShardConfig or a mapping, got {config!r} (type {type(config).__name__}).")


def _section(base: dict[str, Any], name: str, shorthand: str) -> dict[str, Any]:
    """Replace one section of the config by a copy, and return it; a bare value becomes its shorthand setting."""
    given = base.get(name)
    if given is None:
        section: dict[str, Any] = {}
    elif isinstance(given, Mapping):
        section = dict(given)
    elif hasattr(given, "model_dump"):
        section = given.model_dump(exclude_unset=True)
    else:
        section = {shorthand: given}
    base[name] = section
    return section


def _set(section: dict[str, Any], name: str, value: Any) -> None:
    if value is not None:
        section[name] = value


_POLICY = "auto_wrap_policy={'kind': 'module_class', 'classes': 'LlamaDecoderLayer'}"
_FOREIGN = {
    "wrap": _POLICY,
    "policy": _POLICY,
    "transformer_layer_cls_to_wrap": _POLICY,
    "transformer_cls_names_to_wrap": _POLICY,
    "precision": "mixed_precision='bf16'",
    "mp_policy": "mixed_precision='bf16', or a MixedPrecisionPolicy as mixed_precision",
    "mixed_precision_policy": "mixed_precision='bf16', or a MixedPrecisionPolicy as mixed_precision",
    "sharding": "sharding_strategy='FULL_SHARD'",
    "zero_stage": "sharding_strategy='FULL_SHARD'",
    "reshard_after_forward": "sharding_strategy='SHARD_GRAD_OP', which does not reshard, or 'FULL_SHARD', which does",
    "offload_policy": "cpu_offload=True",
    "mesh": "device_mesh with a DeviceMesh",
    "dp_mesh_dims": "device_mesh with the part of the mesh that shards",
    "prefetch": "backward_prefetch='pre'",
    "ignored_params": "ignored_states",
}
"""What to write for arguments of mmfsdp and of similar libraries, which FullyShardedDataParallel does not have."""

_SECTIONS = {
    "precision": "mixed_precision",
    "cpu_offload": "cpu_offload",
    "activation_checkpointing": "activation_checkpointing",
}


def advice_for_argument(name: str, accepted: Collection[str]) -> str:
    """Return ``" Write cpu_offload=True."`` for a name that belongs to another interface, or an empty string.

    Args:
        name: What the user wrote.
        accepted: The names of all arguments.
    """
    bare = bare_name(name)
    if bare in accepted:
        return f" Write {bare}."
    if bare in _FOREIGN:
        return f" Write {_FOREIGN[bare]}."
    if bare in ShardConfig.model_fields:
        return f" Write it in config, as in config={{{bare!r}: ...}}."
    found = synonym_of(name, accepted)
    if found is None:
        return ""
    if not found.settings:
        return f" {found.note}"
    [(section, value)] = found.settings.items()
    if section in _SECTIONS:
        return f" Write {_SECTIONS[section]}={value!r}."
    return f" Write config={dict(found.settings)!r}."
