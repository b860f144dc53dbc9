"""Findings about optimizers: clipping, accumulation, parameter groups, mixed precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.nn as nn
from mmengine.optim import build_optim_wrapper
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS, OPTIMIZERS

from mmfsdp.basics import canonical_dtype
from mmfsdp.errors import MmfsdpError, closest
from mmfsdp.frontends import Finding
from mmfsdp.optimizers import MuonWithAdamW
from mmfsdp.planning import optimizer_named
from mmfsdp_mmengine.configs.arguments import copied
from mmfsdp_mmengine.doctor.pasting import changed_lines
from mmfsdp_mmengine.doctor.subject import Subject, class_of, name_of, quiet, unregistered
from mmfsdp_mmengine.optimizers.amp import AmpOptimWrapper
from mmfsdp_mmengine.optimizers.binding import OptimizerBinding, optim_wrappers_of
from mmfsdp_mmengine.optimizers.muon import MuonConstructor

__all__ = ["FINDINGS", "build_on", "optimizer_of", "plainest"]

_OF_AMP = ("type", "optimizer", "constructor", "paramwise_cfg", "loss_scale", "clip_grad", "accumulative_counts")
_UNEVEN = ("LBFGS", "Adafactor")


def clipping(subject: Subject) -> Iterator[Finding]:
    """Clipping by norm, for which stock MMEngine used the norm of a rank's own shard."""
    for path, wrapper in _wrappers(subject) if subject.sharding is not None else ():
        given = wrapper.get("clip_grad")
        if isinstance(given, Mapping) and given.get("type", "norm") == "norm":
            yield Finding(
                "changed",
                f"{path}.clip_grad",
                "clips by the norm of the whole model, and logs that norm.",
                "clipped by the norm of each rank's own shard, with other results than DDP. A max_norm that was tuned "
                "with it may be too small now.",
            )


def accumulation(subject: Subject) -> Iterator[Finding]:
    """Gradient accumulation, for which stock MMEngine communicated in every step."""
    for path, wrapper in _wrappers(subject) if subject.sharding is not None else ():
        if wrapper.get("accumulative_counts", 1) > 1:
            yield Finding(
                "changed",
                f"{path}.accumulative_counts",
                "communicates only in the last step. Save checkpoints at multiples of it.",
                "communicated in every step.",
            )


def unknown_optimizers(subject: Subject) -> Iterator[Finding]:
    """Wrappers, constructors and optimizers that no registry has; optimizers that do not work on shards."""
    for path, wrapper in _wrappers(subject):
        optimizer = wrapper.get("optimizer")
        kind = optimizer.get("type") if isinstance(optimizer, Mapping) else None
        for where, given, registry in (
            (f"{path}.type", wrapper.get("type"), OPTIM_WRAPPERS),
            (f"{path}.constructor", wrapper.get("constructor"), OPTIM_WRAPPER_CONSTRUCTORS),
        ):
            yield from unregistered(given, registry, where)
        if class_of(wrapper.get("constructor"), OPTIM_WRAPPER_CONSTRUCTORS) is MuonConstructor:
            pass  # it checks the type itself
        elif name_of(kind) == MuonWithAdamW.__name__:
            yield Finding(
                "error",
                f"{path}.constructor",
                f"{name_of(kind)} needs a constructor, which divides the parameters among Muon and AdamW.",
                advice=changed_lines(subject, path, {"constructor": MuonConstructor.__name__}),
            )
        else:
            yield from unregistered(kind, OPTIMIZERS, f"{path}.optimizer.type")
        if subject.sharding is not None and name_of(kind) in _UNEVEN:
            yield Finding(
                "warning",
                f"{path}.optimizer.type",
                f"torch's {name_of(kind)} needs whole parameters and fails on shards of uneven size.",
                advice=changed_lines(
                    subject, f"{path}.optimizer", {"type": "AdamW", "lr": 1e-3}, [*optimizer] if optimizer else []
                ),
            )


def parameter_groups(subject: Subject) -> Iterator[Finding]:
    """Param groups of the whole model; the optimizer is actually built, from parameters without memory."""
    if subject.sharding is None or subject.model is None:
        return
    given = subject.settings.get("optim_wrapper")
    if not isinstance(given, Mapping) or any(True for _ in unknown_optimizers(subject)):
        return
    try:
        built = build_on(subject.model, given)
        OptimizerBinding(subject.model, built)
    except MmfsdpError as error:
        path = str(error.context.get("config", "optim_wrapper"))
        yield Finding("error", f"optim_wrapper.{path}" if path.startswith("optimizer.") else path, error.message)
        return
    except Exception as error:  # whatever a user's constructor raises
        yield Finding("error", "optim_wrapper", f"cannot be built: {type(error).__name__}: {error}")
        return
    groups = [group["params"] for one in optim_wrappers_of(built).values() for group in one.optimizer.param_groups]
    yield from _of_flat_parameters(subject, groups)
    for name in ("paramwise_cfg", "constructor"):
        if given.get(name):
            yield Finding(
                "changed",
                f"optim_wrapper.{name}",
                f"param groups are those of the whole model: {len(groups)} here.",
                "saw prefixed names and flat shapes: layer decay and multipliers for norms, biases and names silently "
                "missed their parameters (149 of 152 groups in MAE's fine-tuning).",
            )


def keys_without_match(subject: Subject) -> Iterator[Finding]:
    """``custom_keys`` that match no parameter."""
    given = subject.settings.get("optim_wrapper")
    paramwise = given.get("paramwise_cfg") if isinstance(given, Mapping) else None
    keys = paramwise.get("custom_keys") if isinstance(paramwise, Mapping) else None
    if subject.model is None or not isinstance(keys, Mapping):
        return
    names = [name for name, _ in subject.model.named_parameters()]
    for key in keys:
        if not any(key in name for name in names):
            parts = {part for name in names for part in (name, *name.split("."))}
            yield Finding(
                "warning",
                f"optim_wrapper.paramwise_cfg.custom_keys[{key!r}]",
                f"no parameter name contains this key.{closest(key, parts, cutoff=0.75)}",
            )


def several_optimizers(subject: Subject) -> Iterator[Finding]:
    """OptimWrapperDict."""
    given = subject.settings.get("optim_wrapper")
    several = isinstance(given, Mapping) and "optimizer" not in given and any(path for path in _wrappers(subject))
    if several and subject.sharding is not None:
        yield Finding(
            "changed",
            "optim_wrapper",
            "several optimizers are supported, each with its own clipping, accumulation and schedulers.",
            "failed on OptimWrapperDict and its schedulers.",
        )
        if not given or not given.get("constructor"):
            yield Finding(
                "error",
                "optim_wrapper.constructor",
                "several optimizers need a constructor of yours, registered in OPTIM_WRAPPER_CONSTRUCTORS, that "
                "assigns parameters to each.",
            )


def mixed_precision(subject: Subject) -> Iterator[Finding]:
    """Autocast, mixed precision of the wrapper, and gradient scaling."""
    plan = subject.plan
    for path, wrapper in _wrappers(subject) if subject.sharding is not None else ():
        kind = class_of(wrapper.get("type", "OptimWrapper"), OPTIM_WRAPPERS)
        name = name_of(wrapper.get("type", "OptimWrapper"))
        amp = name == "AmpOptimWrapper" or (isinstance(kind, type) and issubclass(kind, AmpOptimWrapper))
        if plan is not None and plan.needs_grad_scaler and not amp:
            yield Finding(
                "error",
                f"{path}.type",
                "mixed_precision computes in float16, where small gradients become zero without a gradient scaler: "
                "training raises an error before the first step. bfloat16 needs none.",
                advice=changed_lines(subject, path, {"type": "AmpOptimWrapper"}),
            )
        if not amp:
            continue
        yield Finding(
            "changed",
            f"{path}.type",
            "runs on the CPU too; the engine determines the scaler, and its scale is resumed.",
            "failed on the CPU, lost the loss scale on resume, and used the plain scaler if named with a scope.",
        )
        low = [unit.precision.param_dtype for unit in plan.units if unit.precision.param_dtype] if plan else []
        cast = canonical_dtype(wrapper["dtype"]) if wrapper.get("dtype") else None
        if low and cast is not None and cast not in low:
            yield Finding(
                "warning",
                f"{path}.dtype",
                f"autocast uses {cast}, but parameters are gathered in {low[0]}. Use one dtype.",
                advice=changed_lines(subject, path, {"dtype": low[0]}),
            )
    for path, wrapper in _wrappers(subject):
        if name_of(wrapper.get("type")) == "ApexOptimWrapper" and subject.sharding is not None:
            yield Finding(
                "warning",
                f"{path}.type",
                "apex is not tested with sharded models and optimizers.",
                advice=changed_lines(
                    subject, path, {"type": "AmpOptimWrapper"}, [key for key in wrapper if key not in _OF_AMP]
                ),
            )


def _wrappers(subject: Subject) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield path and config of each optimizer wrapper."""
    given = subject.settings.get("optim_wrapper")
    if not isinstance(given, Mapping):
        return
    if "optimizer" in given:
        yield "optim_wrapper", given
        return
    for key, item in given.items():
        if isinstance(item, Mapping) and "optimizer" in item:
            yield f"optim_wrapper.{key}", item


def optimizer_of(settings: Mapping[str, Any]) -> str | None:
    """Return the name of a config's optimizer in `mmfsdp.planning.OPTIMIZERS`, or None if it is not there.

    Also None for several optimizers, and for an optimizer that is built already.
    """
    given = settings.get("optim_wrapper")
    optimizer = given.get("optimizer") if isinstance(given, Mapping) else None
    if not isinstance(optimizer, Mapping):
        return None
    return optimizer_named(name_of(optimizer.get("type")), optimizer)


def build_on(model: nn.Module, given: Mapping[str, Any]) -> Any:
    """Return the optimizer wrapper of a config, without MMEngine's log; raises whatever its constructor raises."""
    with quiet():
        return build_optim_wrapper(model, plainest(given))


def plainest(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config of the optimizer and its groups only, because optimizer wrappers may need devices."""
    config: dict[str, Any] = copied(given)
    if "optimizer" not in config:
        return config
    kept = ("optimizer", "paramwise_cfg", "constructor")
    plainest: dict[str, Any] = copied({"type": "OptimWrapper"} | {key: config[key] for key in kept if key in config})
    return plainest


def _of_flat_parameters(subject: Subject, groups: list[Any]) -> Iterator[Finding]:
    plan, model = subject.plan, subject.model
    if plan is None or model is None or plan.use_orig_params or len(groups) < 2:
        return
    path = subject.sharding.path if subject.sharding is not None else "strategy"
    group_of = {id(param): index for index, group in enumerate(groups) for param in group}
    params = dict(model.named_parameters())
    for unit in plan.units:
        held = {group_of.get(id(params[param.fqn])) for param in unit.params}
        if len(held) > 1:
            yield Finding(
                "error",
                f"{path}.use_orig_params",
                f"the optimizer has different settings for parameters of unit {unit.fqn or '(root)'!r}, but False "
                "makes them one parameter.",
                "silently applied the settings of some to all of them.",
                changed_lines(subject, path, {"use_orig_params": True}),
            )
            return


FINDINGS = (
    clipping,
    accumulation,
    unknown_optimizers,
    parameter_groups,
    keys_without_match,
    several_optimizers,
    mixed_precision,
)
"""All findings of this module."""
