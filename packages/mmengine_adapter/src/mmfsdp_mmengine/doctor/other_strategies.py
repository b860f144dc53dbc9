"""Translates a config's settings for DeepSpeed or ColossalAI into settings of FSDPStrategy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmfsdp_mmengine.configs.others import OTHER_OPTIM_WRAPPERS, OTHER_STRATEGIES
from mmfsdp_mmengine.doctor.subject import Subject, name_of

__all__ = ["optim_wrapper_of_others", "wrapper_of_others"]

_STAGES = {0: "NO_SHARD", 1: "SHARD_GRAD_OP", 2: "SHARD_GRAD_OP"}
_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
_OPTIMIZERS = {"DeepSpeedCPUAdam": "AdamW", "FusedAdam": "AdamW"}


def wrapper_of_others(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of the sharding wrapper that mean what another strategy was told; empty without one."""
    given = _settings(settings)
    zero = _section(given, "zero_optimization")
    found: dict[str, Any] = {}
    if zero.get("stage", 3 if zero else None) in _STAGES:
        found["sharding_strategy"] = _STAGES[zero["stage"]]
    if (precision := _precision(given)) is not None:
        found["mixed_precision"] = precision
    offloaded = (_section(zero, f"offload_{what}").get("device") for what in ("param", "optimizer"))
    if zero.get("cpu_offload") or any(device in ("cpu", "nvme") for device in offloaded):
        found["cpu_offload"] = True
    return found


def optim_wrapper_of_others(subject: Subject) -> dict[str, Any]:
    """Return changes of ``optim_wrapper`` that mean what another strategy was told; empty without one."""
    given = _settings(subject.settings)
    wrapper = subject.settings.get("optim_wrapper")
    wrapper = wrapper if isinstance(wrapper, Mapping) else {}
    found: dict[str, Any] = {}
    if name_of(wrapper.get("type")) in OTHER_OPTIM_WRAPPERS:
        found["type"] = "OptimWrapper"
    half = _section(given, "fp16")
    if _precision(given) == "fp16":
        found |= {"type": "AmpOptimWrapper", "dtype": "float16"}
        if half.get("loss_scale"):
            found["loss_scale"] = half["loss_scale"]
        elif scaling := {
            ours: value
            for ours, value in (
                ("init_scale", 2.0 ** half["initial_scale_power"] if "initial_scale_power" in half else None),
                ("growth_interval", half.get("loss_scale_window")),
            )
            if value is not None
        }:
            found["loss_scale"] = scaling
    if given.get("gradient_clipping") and not wrapper.get("clip_grad"):
        found["clip_grad"] = {"max_norm": given["gradient_clipping"]}
    if isinstance(counts := given.get("gradient_accumulation_steps"), int) and counts > 1:
        found["accumulative_counts"] = counts
    optimizer = wrapper.get("optimizer")
    if isinstance(optimizer, Mapping) and (kind := name_of(optimizer.get("type"))) in _OPTIMIZERS:
        found["optimizer"] = {**optimizer, "type": _OPTIMIZERS[kind]}
    return found


def _settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of another strategy; those beside its ``config`` win, as in MMEngine."""
    strategy = settings.get("strategy")
    if not isinstance(strategy, Mapping) or name_of(strategy.get("type")) not in OTHER_STRATEGIES:
        return {}
    config = strategy.get("config")
    if isinstance(config, str) and Path(config).is_file():
        config = json.loads(Path(config).read_text(encoding="utf-8"))
    return {**(config if isinstance(config, Mapping) else {}), **{k: v for k, v in strategy.items() if v is not None}}


def _section(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = given.get(name)
    return section if isinstance(section, Mapping) else {}


def _precision(given: Mapping[str, Any]) -> str | None:
    """Return the preset of the half precision that DeepSpeed or ColossalAI trains in, or None."""
    for name in _DTYPES:
        if _section(given, name).get("enabled", False) is True:
            return name
    mixed = given.get("mixed_precision")  # of ColossalAI, where a dict names its class
    kind = mixed if isinstance(mixed, str) else name_of(_section(given, "mixed_precision").get("type"))
    return {"bf16": "bf16", "BF16MixedPrecision": "bf16"}.get(kind, "fp16") if kind else None
