"""Findings about what is kept: checkpoints, resuming, weights to start from, averaged weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from mmengine.registry import HOOKS, MODELS, DefaultScope

from mmfsdp.errors import MmfsdpError, closest
from mmfsdp.frontends import Finding
from mmfsdp_mmengine.configs.arguments import state_dict_settings
from mmfsdp_mmengine.doctor.subject import Subject, class_of, hooks_of, name_of
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
        return  # told as a wrong argument
    path = "strategy.state_dict_cfg" if in_strategy else "state_dict_cfg"
    if kind == "sharded":
        yield Finding("changed", path, "a directory of torch's DCP.", "not registered, or failed.")
    elif isinstance(given, Mapping) and len(given) < 3:
        yield Finding("changed", path, f"{kind!r}; parts may be left out.", "a type alone failed, or meant 'local'.")


def resuming(subject: Subject) -> Iterator[Finding]:
    """Resuming failed on every real config."""
    if subject.sharding is not None and subject.settings.get("resume"):
        yield Finding(
            "changed",
            "resume",
            "exact, on any number of ranks; from the newest complete checkpoint if none is named.",
            "failed, or lost the loss scale, the place in the data and schedulers.",
        )


def starting_weights(subject: Subject) -> Iterator[Finding]:
    """``load_from``: what it names, and whether it is there."""
    given = subject.settings.get("load_from")
    if subject.sharding is None or not isinstance(given, str):
        return
    remote = "://" in given
    if not remote and not Path(given).exists():
        yield Finding("warning", "load_from", f"there is nothing at {given!r}, seen from here.")
    if remote or Path(given).suffix in _WHOLE:
        here = "bare weights, a 'module.' prefix and revise_keys are understood; each rank reads what it holds."
        yield Finding("changed", "load_from", here, "revise_keys was ignored; with 'local' whole files failed.")
    else:
        yield Finding(
            "changed",
            "load_from",
            "directories of any kind, safetensors and Hugging Face shards load, on any number of ranks.",
            "only directories of the same kind and number of ranks.",
        )


def averaged_weights(subject: Subject) -> Iterator[Finding]:
    """EMAHook and what is derived from it."""
    if subject.sharding is None:
        return
    with DefaultScope.overwrite_default_scope(subject.scope):
        for path, hook, cls in hooks_of(subject.settings):
            is_ema = isinstance(cls, type) and issubclass(cls, _STOCK_EMA)
            if not is_ema and name_of(hook.get("type")) != "EMAHook":
                continue
            if is_ema and not issubclass(cls, EMAHook):
                yield Finding(
                    "error",
                    f"{path}.type",
                    f"{cls.__name__} derives from MMEngine's own EMAHook, which copies the sharded model. Derive it "
                    "from mmengine.hooks.EMAHook, or import the module that defines it before mmfsdp_mmengine.",
                    advice="from mmengine.hooks import EMAHook",
                )
                continue
            yield Finding(
                "changed",
                path,
                "each rank averages its own shard; saved, resumed and exported.",
                "a deep copy of the wrapped model, which failed; resuming with it was an error.",
            )
            kind = hook.get("ema_type")
            if isinstance(kind, str) and class_of(kind, MODELS) is None:
                hint = closest(name_of(kind), MODELS.module_dict)
                yield Finding("error", f"{path}.ema_type", f"{kind!r} is not registered.{hint}")


def unknown_hooks(subject: Subject) -> Iterator[Finding]:
    """Hooks that no registry has."""
    with DefaultScope.overwrite_default_scope(subject.scope):
        for path, hook, cls in hooks_of(subject.settings):
            kind = hook.get("type")
            if isinstance(kind, str) and cls is None:
                hint = closest(name_of(kind), HOOKS.module_dict)
                yield Finding("error", f"{path}.type", f"{kind!r} is not registered.{hint}")


def published(subject: Subject) -> Iterator[Finding]:
    """``published_keys`` of the checkpoint hook."""
    given = subject.sharding.strategy.get("state_dict_cfg", "local") if subject.sharding is not None else "full"
    for path, hook, _ in hooks_of(subject.settings):
        if name_of(hook.get("type")) == "CheckpointHook" and hook.get("published_keys") and given != "full":
            yield Finding("changed", f"{path}.published_keys", "works for directories.", "failed on directories.")


FINDINGS = (kind_of_checkpoints, resuming, starting_weights, averaged_weights, unknown_hooks, published)
"""What is looked for here."""
