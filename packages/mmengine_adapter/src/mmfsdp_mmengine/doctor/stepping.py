"""A step of training as an MMEngine config describes it: `TrainingStep` from its data, model and optimizer wrapper."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, OPTIM_WRAPPERS
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from mmfsdp.basics import canonical_dtype, to_torch
from mmfsdp.errors import ConfigError
from mmfsdp.frontends import TrainingStep
from mmfsdp_mmengine.checkpoints.averages import averaged_model_class
from mmfsdp_mmengine.doctor.optimizer_findings import plainest
from mmfsdp_mmengine.doctor.own_steps import OwnStep, own_labels
from mmfsdp_mmengine.doctor.sampling import IMAGE_SIZE, OBJECTS, sample_batch
from mmfsdp_mmengine.doctor.subject import class_of, hooks_of, in_scope, name_of, quiet
from mmfsdp_mmengine.hooks.ema import EMAHook
from mmfsdp_mmengine.optimizers.amp import AmpOptimWrapper
from mmfsdp_mmengine.optimizers.binding import optim_wrappers_of
from mmfsdp_mmengine.wrappers.forward_steps import forward_batch, overrides

__all__ = ["step_with", "training_step"]

_OF_HOOK = ("type", "ema_type", "strict_load", "begin_iter", "begin_epoch", "priority")  # the rest is of the averages


def training_step(settings: Mapping[str, Any], model: nn.Module, batch_size: int | None) -> TrainingStep:
    """Return the step that a config describes; see `mmfsdp.frontends.ReadConfig.step`.

    Args:
        settings: The content of the config. Not changed.
        model: Its model, with parameters on the meta device.
        batch_size: The samples of one rank; None for the config's own number.
    """
    loader = settings.get("train_dataloader")
    own = loader.get("batch_size") if isinstance(loader, Mapping) else None
    size = own if batch_size is None else batch_size
    if not isinstance(size, int) or size < 1:
        raise ConfigError(
            "The config does not say how many samples a rank gets. Give --batch-size.",
            config="train_dataloader.batch_size",
        )
    with quiet(), in_scope(settings):
        batch = sample_batch(settings, size)
    height, width = IMAGE_SIZE
    assumed = (
        f"{size} samples per rank, from an invented image of {width} x {height} with {OBJECTS} objects, through the "
        "config's data pipeline"
    )
    return replace(step_with(settings, model, batch), assumed=(assumed,))


def step_with(settings: Mapping[str, Any], model: nn.Module, batch: Any) -> TrainingStep:
    """Return the step that a config describes, with a batch as its data loader gives it.

    Args:
        settings: The content of the config. Not changed.
        model: Its model, with parameters on the meta device.
        batch: The samples of one rank.
    """
    wrapper = settings.get("optim_wrapper") or {}
    with quiet(), in_scope(settings):
        cast = _autocast(wrapper)
    clip = wrapper.get("clip_grad") if isinstance(wrapper, Mapping) else None
    count = wrapper.get("accumulative_counts", 1)
    return TrainingStep(
        batch=batch,
        loss=_loss(cast),
        step=OwnStep(cast, count) if overrides(model, "train_step") else None,
        optimizer=_optimizer(settings, model),
        max_norm=float(clip["max_norm"]) if isinstance(clip, Mapping) and "max_norm" in clip else None,
        accumulate=count,
        ema=_averages(settings),
    )


def _loss(cast: Callable[[], Any]) -> Callable[[nn.Module, Any], torch.Tensor]:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        with cast():
            data = inner.data_preprocessor(tree_map(own_labels, batch), True)
            losses = forward_batch(model, data, "loss")
        total: torch.Tensor = inner.parse_losses(losses)[0]
        return total

    return loss


def _autocast(wrapper: Mapping[str, Any]) -> Callable[[], Any]:
    """Return what makes the context of a forward: that of the CPU's autocast for MMEngine's mixed precision."""
    found = class_of(wrapper.get("type"), OPTIM_WRAPPERS)
    if not (isinstance(found, type) and issubclass(found, AmpOptimWrapper)) and name_of(wrapper.get("type")) != (
        "AmpOptimWrapper"
    ):
        return contextlib.nullcontext
    given = wrapper.get("dtype")
    dtype = torch.float16 if given is None else to_torch(canonical_dtype(given))
    return lambda: torch.autocast("cpu", dtype=dtype)


def _averages(settings: Mapping[str, Any]) -> Callable[[nn.Module], Any] | None:
    """Return what makes the averaged weights of EMAHook, or of a hook derived from it; None without one."""
    hook = next((hook for _, hook, cls in hooks_of(settings) if _averages_weights(hook, cls)), None)
    if hook is None:
        return None
    own = {name: value for name, value in hook.items() if name not in _OF_HOOK}
    config = {"type": hook.get("ema_type", "ExponentialMovingAverage"), **own}

    def make(model: nn.Module) -> Any:
        with quiet(), in_scope(settings):
            averaged_model_class(config)
            return MODELS.build({**config}, default_args={"model": model})

    return make


def _averages_weights(hook: Mapping[str, Any], cls: Any) -> bool:
    return name_of(hook.get("type")) == "EMAHook" or (isinstance(cls, type) and issubclass(cls, EMAHook))


def _optimizer(settings: Mapping[str, Any], model: nn.Module) -> Callable[[Iterable[torch.Tensor]], Any]:
    """Return what makes the config's optimizer for the parameters of the sharded model, with its groups."""

    def make(params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        sharded = list(params)
        try:
            with quiet(), in_scope(settings):
                built = build_optim_wrapper(model, plainest(settings.get("optim_wrapper") or {}))
            wrappers = optim_wrappers_of(built)
            if len(wrappers) > 1:
                raise ValueError(f"there are several: {', '.join(wrappers)}. A step with one is supported.")
            [wrapper] = wrappers.values()
            optimizer: torch.optim.Optimizer = wrapper.optimizer
        except Exception as error:  # whatever a user's constructor raises
            raise ConfigError(
                f"The config's optimizer cannot be built: {type(error).__name__}: {error}", config="optim_wrapper"
            ) from error
        whole = list(model.parameters())
        if len(whole) == len(sharded):
            places = {id(param): place for place, param in enumerate(whole)}
            groups = [[sharded[places[id(param)]] for param in group["params"]] for group in optimizer.param_groups]
        else:  # flat parameters, which have one group
            groups = [[param for param in sharded if param.requires_grad]]
            del optimizer.param_groups[1:]
        for group, members in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = members
        return optimizer

    return make
