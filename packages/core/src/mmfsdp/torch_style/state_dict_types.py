"""The state dict type of a wrapped model: what `state_dict()` and `optim_state_dict()` return, as in torch's class."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from mmfsdp.errors import ShardStateError, StateDictError, UnsupportedCallError
from mmfsdp.torch_style.sharded_modules import models_in

__all__ = ["default_state_dict_type", "get_state_dict_type", "on_cpu", "set_state_dict_type", "state_dict_type"]

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}
# Settings of wrappers, except of engine fsdp1, whose units keep torch's settings themselves.
_settings: weakref.WeakKeyDictionary[nn.Module, StateDictSettings] = weakref.WeakKeyDictionary()


def default_state_dict_type(wrapper: nn.Module) -> None:
    """Give a new wrapper the default type: full state dicts."""
    _settings[wrapper] = StateDictSettings(
        StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
    )


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """Return the state dict type and configs of the wrapped model in ``module``. Not collective.

    Args:
        module: A wrapped model, or a module that holds one or several.

    Raises:
        StateDictError: ``module`` holds several models with different settings.
        ShardStateError: ``module`` holds no wrapped model.
    """
    found = [_get(wrapper) for wrapper in _wrappers(module)]
    if any(settings != found[0] for settings in found):
        raise StateDictError(f"The models in this {type(module).__name__} have different state dict types: {found}.")
    return found[0]


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Set what `state_dict()` and `optim_state_dict()` return from now on. Not collective.

    Args:
        module: A wrapped model, or a module that holds one or several.
        state_dict_type: ``FULL_STATE_DICT`` for whole tensors, or ``SHARDED_STATE_DICT`` for DTensors.
        state_dict_config: Config of the same type. Default: the type's own.
        optim_state_dict_config: Config of the same type, for the optimizer's state. Default: the type's own.

    Returns:
        The settings before.

    Raises:
        UnsupportedCallError: The type is ``LOCAL_STATE_DICT``.
        StateDictError: The type is unknown, or a config has another type.
        ShardStateError: ``module`` holds no wrapped model.
    """
    wrappers = _wrappers(module)
    settings = _checked(state_dict_type, state_dict_config, optim_state_dict_config)
    before = _get(wrappers[0])
    for wrapper in wrappers:
        _set(wrapper, settings)
    return before


@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """Set the state dict type within the context; also after an error the settings before are restored.

    Not collective. See `set_state_dict_type`.
    """
    before = [(wrapper, _get(wrapper)) for wrapper in _wrappers(module)]
    set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        for wrapper, settings in before:
            _set(wrapper, settings)


def on_cpu(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with CPU tensors; DTensors keep their placement."""
    return {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in values.items()}


def _wrappers(module: nn.Module) -> list[nn.Module]:
    """Return the wrapped models in ``module``, at least one; ``module`` itself for units of torch's class."""
    found = [part for part in module.modules() if part in _settings]
    found += [state.module for state in models_in(module) if state.is_fsdp1]
    if not found and TorchFSDP.fsdp_modules(module):
        found = [module]
    if not found:
        raise ShardStateError(
            f"This {type(module).__name__} holds no mmfsdp.FullyShardedDataParallel, so it has no state dict type. "
            "Without the wrapper, call mmfsdp.model_state_dict() and mmfsdp.optim_state_dict(), which take the kind."
        )
    return found


def _checked(kind: Any, config: Any, optim_config: Any) -> StateDictSettings:
    if kind is StateDictType.LOCAL_STATE_DICT:
        raise UnsupportedCallError(
            "LOCAL_STATE_DICT stands for pieces of flat parameters, which only the same number of ranks can load and "
            "which torch does not support with a DeviceMesh. Use StateDictType.SHARDED_STATE_DICT, or save with "
            "mmfsdp.save_checkpoint(..., kind='local')."
        )
    if kind not in _CONFIGS:
        raise StateDictError(
            f"state_dict_type must be StateDictType.FULL_STATE_DICT or SHARDED_STATE_DICT, got {kind!r}."
        )
    of_model, of_optimizer = _CONFIGS[kind]
    for name, given, wanted in (
        ("state_dict_config", config, of_model),
        ("optim_state_dict_config", optim_config, of_optimizer),
    ):
        if given is not None and type(given) is not wanted:
            raise StateDictError(f"With {kind}, {name} must be a {wanted.__name__}, got {given!r}.")
    return StateDictSettings(kind, config or of_model(), optim_config or of_optimizer())


def _get(wrapper: nn.Module) -> StateDictSettings:
    return _settings[wrapper] if wrapper in _settings else TorchFSDP.get_state_dict_type(wrapper)


def _set(wrapper: nn.Module, settings: StateDictSettings) -> None:
    if wrapper in _settings:
        _settings[wrapper] = settings
        return
    configs = (replace(settings.state_dict_config), replace(settings.optim_state_dict_config))  # torch changes them
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # that types are deprecated
        TorchFSDP.set_state_dict_type(wrapper, settings.state_dict_type, *configs)
