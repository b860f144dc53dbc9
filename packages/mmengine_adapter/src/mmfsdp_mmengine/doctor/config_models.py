"""Builds the model of an MMEngine config without memory, and reads how the config shards it."""

from __future__ import annotations

import inspect
from typing import Any

import torch.distributed as dist
import torch.nn as nn
from mmengine.registry import MODELS

from mmfsdp.errors import ConfigError
from mmfsdp.torch_style import ARGUMENTS, Translated, translate_arguments
from mmfsdp_mmengine.configs.arguments import activation_arguments, copied, wrapper_arguments
from mmfsdp_mmengine.configs.empty_models import without_weights
from mmfsdp_mmengine.configs.lookup import UnknownNameError
from mmfsdp_mmengine.configs.packages import what_to_install
from mmfsdp_mmengine.doctor.advice import advised_wrapper
from mmfsdp_mmengine.doctor.other_strategies import wrapper_of_others
from mmfsdp_mmengine.doctor.subject import in_scope, quiet, sharding_of, types_in
from mmfsdp_mmengine.wrappers.fsdp import MMFullyShardedDataParallel

__all__ = ["OWN_ARGUMENTS", "build_model", "sharding_settings"]

OWN_ARGUMENTS = (*inspect.signature(MMFullyShardedDataParallel.__init__).parameters, "type")
"""Arguments of the wrapper besides core's, and ``type``."""


def build_model(settings: dict[str, Any]) -> nn.Module:
    """Build a config's model with its parameters on the meta device.

    As in MMEngine's runners, ``data_preprocessor`` at the top level is the model's unless the model has one.

    Raises:
        ConfigError: The model cannot be built; for an unknown name the error suggests the nearest names.
    """
    if not isinstance(settings.get("model"), dict):
        raise ConfigError("The config has no model. Add model = dict(type=...).", config="model")
    try:
        with in_scope(settings), quiet(about_scopes=True):
            model = _built(_with_preprocessor(settings))
    except Exception as error:  # whatever the user's model raises
        reason = f"{type(error).__name__}: {error}"
        for path, name in types_in(settings["model"], "model"):
            if isinstance(error, UnknownNameError) and error.message.startswith(f"{name} is not in the "):
                raise UnknownNameError(error.message, config=path) from error
        text = f"The model cannot be built: {reason}"
        if (advice := what_to_install(error)) or isinstance(error, ImportError):
            text = f"{text}. {advice}".rstrip()
        raise ConfigError(text, config="model") from error
    return model


def _with_preprocessor(settings: dict[str, Any]) -> dict[str, Any]:
    common = settings.get("data_preprocessor")
    return {**({} if common is None else {"data_preprocessor": common}), **settings["model"]}


def _built(config: dict[str, Any]) -> nn.Module:
    try:
        return _without_memory(config)
    except (ValueError, RuntimeError) as error:
        if "process group" not in str(error) or dist.is_initialized():
            raise
    # Its constructor asks for the ranks, as mmcv's SyncBatchNorm does.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        return _without_memory(config)
    finally:
        dist.destroy_process_group()


def _without_memory(config: dict[str, Any]) -> nn.Module:
    try:
        with without_weights():
            model: nn.Module = MODELS.build(copied(config))
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error):
            raise
        # Its constructor computes with parameters, as those that fuse layers do. That takes memory for a moment.
        model = MODELS.build(copied(config))
        meta = {param: nn.Parameter(param.to("meta"), param.requires_grad) for param in model.parameters()}
        for module in model.modules():
            for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
                vars(module)["_parameters"][name] = meta[param]
    return model


def sharding_settings(settings: dict[str, Any], model: nn.Module) -> Translated:
    """Return how a config shards its model, without its mesh and process groups; the advice if it shards nothing.

    Raises:
        ConfigError: An argument is unknown or has a value that is not accepted.
    """
    with quiet(), in_scope(settings):
        found = sharding_of(settings)
        if found is None:
            advised = {**advised_wrapper(model), **wrapper_of_others(settings)}
            return translate_arguments(**wrapper_arguments(model, **advised))
        given = dict(found.arguments)
        for name in ("module", "process_group", "device_mesh"):
            given.pop(name, None)
        given = {key: value for key, value in given.items() if key in ARGUMENTS or key not in OWN_ARGUMENTS}
        recompute = found.strategy.get("activation_checkpointing")
        if recompute is not None:
            given["activation_checkpointing"] = activation_arguments(recompute, model)
        return translate_arguments(**wrapper_arguments(model, **given))
