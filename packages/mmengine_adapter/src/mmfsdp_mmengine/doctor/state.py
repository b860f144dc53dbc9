"""Findings about checkpoints, resuming, initial weights and averaged weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from mmengine.registry import HOOKS, MODELS

from mmfsdp.errors import MmfsdpError
from mmfsdp.frontends import Finding
from mmfsdp_mmengine.configs.arguments import state_dict_settings
from mmfsdp_mmengine.doctor.subject import Subject, hooks_of, name_of, unregistered
from mmfsdp_mmengine.hooks.ema import EMAHook

__all__ = ["FINDINGS"]

_STOCK_EMA = next(base for base in EMAHook.__mro__ if base.__module__.startswith("mmengine."))
_WHOLE = (".pth", ".pt", ".bin", ".ckpt")


def kind_of_checkpoints(subject: Subject) -> Iterator[Finding]:
    """``state_dict_cfg`` as a dict, or sharded."""
    if subject.sharding is None:
        return
    in_strategy = bool(subject.sharding.strategy)
    given = (subject.sharding.strategy if in_strategy else subject.settings).get("state_dict_cfg")
    try:
        kind = state_dict_settings(given).kind if given is not None else None
    except MmfsdpError:
        return  # reported as a wrong argument
    path = "strategy.state_dict_cfg" if in_strategy else "state_dict_cfg"
    if kind == "sharded":
        yield Finding("changed", path, "saves a directory in torch's DCP format.", "was not registered, or failed.")
    elif isinstance(given, Mapping) and len(given) < 3:
        yield Finding(
            "changed", path, f"means {kind!r}; parts may be left out.", "failed on a type alone, or used 'local'."
        )


def resuming(subject: Subject) -> Iterator[Finding]:
    """Resuming, which failed with stock MMEngine on every real config."""
    if subject.sharding is not None and subject.settings.get("resume"):
        yield Finding(
            "changed",
            "resume",
            "resumes exactly, on any number of ranks, from the newest complete checkpoint if none is named.",
            "failed, or lost the loss scale, the position in the data and schedulers.",
        )


def starting_weights(subject: Subject) -> Iterator[Finding]:
    """``load_from``: its format, and whether it exists."""
    given = subject.settings.get("load_from")
    if subject.sharding is None or not isinstance(given, str):
        return
    remote = "://" in given
    if not remote and not Path(given).exists():
        yield Finding("warning", "load_from", f"{given!r} does not exist on this machine.")
    if remote or Path(given).suffix in _WHOLE:
        here = "accepts bare weights, a 'module.' prefix and revise_keys; each rank reads only its part."
        yield Finding("changed", "load_from", here, "ignored revise_keys; with 'local' it failed on whole files.")
    else:
        yield Finding(
            "changed",
            "load_from",
            "loads directories of every kind, safetensors and Hugging Face shards, on any number of ranks.",
            "loaded only directories of the same kind and number of ranks.",
        )


def averaged_weights(subject: Subject) -> Iterator[Finding]:
    """EMAHook and hooks derived from it."""
    if subject.sharding is None:
        return
    for path, hook, cls in hooks_of(subject.settings):
        is_ema = isinstance(cls, type) and issubclass(cls, _STOCK_EMA)
        if not is_ema and name_of(hook.get("type")) != "EMAHook":
            continue
        if is_ema and not issubclass(cls, EMAHook):
            yield Finding(
                "error",
                f"{path}.type",
                f"{cls.__name__} derives from MMEngine's own EMAHook, which copies the sharded model. Derive it "
                "from mmengine.hooks.EMAHook, and import mmfsdp_mmengine before the module that defines it.",
            )
            continue
        yield Finding(
            "changed",
            path,
            "each rank averages its own shard, which is saved, resumed and exported.",
            "failed to copy the wrapped model, and could not resume.",
        )
        yield from unregistered(hook.get("ema_type"), MODELS, f"{path}.ema_type")


def unknown_hooks(subject: Subject) -> Iterator[Finding]:
    """Hooks that no registry has."""
    for path, hook, _ in hooks_of(subject.settings):
        yield from unregistered(hook.get("type"), HOOKS, f"{path}.type")


def published(subject: Subject) -> Iterator[Finding]:
    """``published_keys`` of the checkpoint hook."""
    given = subject.sharding.strategy.get("state_dict_cfg", "local") if subject.sharding is not None else "full"
    for path, hook, _ in hooks_of(subject.settings):
        if name_of(hook.get("type")) == "CheckpointHook" and hook.get("published_keys") and given != "full":
            yield Finding(
                "changed",
                f"{path}.published_keys",
                "works for checkpoint directories.",
                "failed on checkpoint directories.",
            )


FINDINGS = (kind_of_checkpoints, resuming, starting_weights, averaged_weights, unknown_hooks, published)
"""All findings of this module."""
