"""The subject of a diagnosis (a config, its sharding, model and plan), and functions that read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.nn as nn
from mmengine.registry import HOOKS, MODEL_WRAPPERS, STRATEGIES, Registry

from mmfsdp.planning import ShardPlan
from mmfsdp_mmengine.strategy import FSDPStrategy
from mmfsdp_mmengine.wrappers.fsdp import MMFullyShardedDataParallel

__all__ = ["Sharding", "Subject", "class_of", "hooks_of", "name_of", "names_in", "sharding_of"]


@dataclass(frozen=True, slots=True)
class Sharding:
    """The part of a config that shards the model."""

    path: str
    """Where the wrapper's arguments are: ``strategy.model_wrapper``, or ``model_wrapper_cfg``."""
    arguments: Mapping[str, Any]
    """The wrapper's arguments, including ``type``."""
    strategy: Mapping[str, Any] = field(default_factory=dict)
    """The strategy's arguments; empty with the plain Runner."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A config with everything that findings need."""

    settings: dict[str, Any]
    """The config's content."""
    sharding: Sharding | None
    """None if the config shards nothing."""
    model: nn.Module | None
    """The model on the meta device, if it can be built."""
    plan: ShardPlan | None
    """The plan; None if there is none because of an error."""

    @property
    def scope(self) -> str | None:
        """The default scope of registries."""
        return self.settings.get("default_scope")

    def argument(self, name: str) -> Any:
        """Return an argument of the wrapper, or None."""
        return None if self.sharding is None else self.sharding.arguments.get(name)


def name_of(value: Any) -> str:
    """Return the bare name of a ``type``: a name with or without a scope, or a class."""
    name = value if isinstance(value, str) else getattr(value, "__name__", "")
    return name.rpartition(".")[2]


def class_of(value: Any, registry: Registry) -> Any:
    """Return the object for a ``type``, or None if the registry does not have it."""
    if not isinstance(value, str):
        return value
    try:
        return registry.get(value)
    except (ImportError, KeyError):
        return None


def sharding_of(settings: Mapping[str, Any]) -> Sharding | None:
    """Return how a config shards, or None if it does not."""
    strategy, wrapper = settings.get("strategy"), settings.get("model_wrapper_cfg")
    if isinstance(strategy, Mapping) and _means(strategy.get("type"), STRATEGIES, FSDPStrategy):
        given = strategy.get("model_wrapper")
        return Sharding("strategy.model_wrapper", given if isinstance(given, Mapping) else {}, strategy)
    if isinstance(wrapper, Mapping) and _means(wrapper.get("type"), MODEL_WRAPPERS, MMFullyShardedDataParallel):
        return Sharding("model_wrapper_cfg", wrapper)
    return None


def hooks_of(settings: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], Any]]:
    """Yield path, config and class (None if unknown) of every configured hook."""
    custom, default = settings.get("custom_hooks") or (), settings.get("default_hooks") or {}
    entries = [(f"custom_hooks[{index}]", hook) for index, hook in enumerate(custom)]
    entries += [(f"default_hooks.{key}", hook) for key, hook in default.items()]
    for path, hook in entries:
        if isinstance(hook, Mapping):
            yield path, hook, class_of(hook.get("type"), HOOKS)


def names_in(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield path and name of every named ``type`` below a config value."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key == "type" and isinstance(item, str):
                yield f"{path}.type", item
            else:
                yield from names_in(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from names_in(item, f"{path}[{index}]")


def _means(given: Any, registry: Registry, ours: type) -> bool:
    found = class_of(given, registry)
    return name_of(given) == ours.__name__ or (isinstance(found, type) and issubclass(found, ours))
