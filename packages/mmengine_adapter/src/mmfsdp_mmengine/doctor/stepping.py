"""A step of training as an MMEngine config describes it: `TrainingStep` from its data, model and optimizer wrapper."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
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
from mmfsdp_mmengine.doctor.own_steps import OwnEvaluation, OwnStep, own_labels
from mmfsdp_mmengine.doctor.sampling import sample_batch
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
        batch, source = sample_batch(settings, size)
        evaluated = None
        if isinstance(settings.get("val_dataloader"), Mapping) and settings.get("val_cfg") is not None:
            evaluated = OwnEvaluation(partial(_validation_batch, settings, size))
    step = step_with(settings, model, batch)
    return replace(step, evaluate=evaluated, assumed=(f"{size} samples per rank, {source}",))


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
    count, max_norm = wrapper.get("accumulative_counts", 1), _norm(wrapper.get("clip_grad"))
    step = TrainingStep(
        batch=batch,
        loss=_loss(cast),
        step=OwnStep({"": (cast, count)}) if overrides(model, "train_step") else None,
        optimizer=_optimizer(settings, model),
        max_norm=max_norm,
        accumulate=count,
        ema=_averages(settings),
    )
    if step.step is None or "constructor" not in wrapper or len(several := _wrappers(settings, model)) < 2:
        return step
    counts = {name: int(getattr(each, "_accumulative_counts", 1)) for name, each in several.items()}
    return replace(
        step,
        step=OwnStep({name: (_autocast_of(each), counts[name]) for name, each in several.items()}),
        max_norms=tuple(_norm(getattr(each, "clip_grad_kwargs", None)) for each in several.values()),
        accumulate=math.lcm(*counts.values()),
    )


def _validation_batch(settings: Mapping[str, Any], size: int) -> Any:
    with quiet(), in_scope(settings):
        return sample_batch(settings, size, "val_dataloader")[0]


def _norm(clip: Any) -> float | None:
    return float(clip["max_norm"]) if isinstance(clip, Mapping) and "max_norm" in clip else None


def _autocast_of(wrapper: Any) -> Callable[[], Any]:
    """Return what makes the context of a forward, of a wrapper that a constructor of several has made."""
    if not isinstance(wrapper, AmpOptimWrapper):
        return contextlib.nullcontext
    return lambda: torch.autocast("cpu", dtype=wrapper.cast_dtype)


def _wrappers(settings: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return the config's optimizer wrappers by name.

    Raises:
        ConfigError: They cannot be built.
    """
    try:
        with quiet(), in_scope(settings):
            return optim_wrappers_of(build_optim_wrapper(model, plainest(settings.get("optim_wrapper") or {})))
    except Exception as error:  # whatever a user's constructor raises
        raise ConfigError(
            f"The config's optimizer cannot be built: {type(error).__name__}: {error}", config="optim_wrapper"
        ) from error


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
    """Return the function that makes the context of a forward: the CPU's autocast for MMEngine's mixed precision."""
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
    """Return what makes the config's optimizer, or a list of several, for the sharded model's parameters."""

    def make(params: Iterable[torch.Tensor]) -> Any:
        sharded, whole = list(params), list(model.parameters())
        wrappers, is_flat = _wrappers(settings, model), len(whole) != len(sharded)
        if len(wrappers) > 1 and (is_flat or not overrides(model, "train_step")):
            why = "flat parameters are of all" if is_flat else "the model has no train_step of its own that uses them"
            raise ConfigError(
                f"The config has several optimizers: {', '.join(wrappers)}; and {why}.", config="optim_wrapper"
            )
        index_of = {id(param): index for index, param in enumerate(whole)}
        made = [wrapper.optimizer for wrapper in wrappers.values()]
        for optimizer in made:
            if is_flat:  # they have one group
                groups = [[param for param in sharded if param.requires_grad]]
                del optimizer.param_groups[1:]
            else:
                groups = [
                    [sharded[index_of[id(param)]] for param in group["params"]] for group in optimizer.param_groups
                ]
            for group, members in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = members
        return made if len(made) > 1 else made[0]

    return make
