"""The subject of a diagnosis (a config, its sharding, model and plan), and functions that read it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.nn as nn
from mmengine.logging import MMLogger
from mmengine.registry import HOOKS, MODEL_WRAPPERS, STRATEGIES, DefaultScope, Registry

from mmfsdp.frontends import Finding
from mmfsdp.planning import ShardPlan
from mmfsdp_mmengine.configs.lookup import unknown_name, why_scope_fails
from mmfsdp_mmengine.configs.packages import what_to_install
from mmfsdp_mmengine.registry import ours_for
from mmfsdp_mmengine.strategy import FSDPStrategy
from mmfsdp_mmengine.wrappers.fsdp import MMFullyShardedDataParallel

__all__ = [
    "Sharding",
    "Subject",
    "class_of",
    "hooks_of",
    "in_scope",
    "name_of",
    "quiet",
    "sharding_of",
    "types_in",
    "unregistered",
]


_ABOUT_SCOPES = ("Failed to import `", "Failed to search registry with scope")
"""How MMEngine's messages about a scope begin whose package cannot be imported."""


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
    written: Mapping[str, Any] | None = None
    """The content of a config in Python style, in which imported objects are names as the config imports them. None for
    other configs."""
    inherited: frozenset[str] = frozenset()
    """The settings at the top level that only a config in ``_base_`` has."""

    def inherits(self, name: str) -> bool:
        """Return whether a setting at the top level comes from ``_base_`` alone, so that the file cannot change it."""
        return name in self.inherited

    def argument(self, name: str) -> Any:
        """Return an argument of the wrapper, or None."""
        return None if self.sharding is None else self.sharding.arguments.get(name)


def name_of(value: Any) -> str:
    """Return the bare name of a ``type``: a name with or without a scope, or a class."""
    name = value if isinstance(value, str) else getattr(value, "__name__", "")
    return name.rpartition(".")[2]


def in_scope(settings: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Return a context in which registries look names up as runners of this config do."""
    scope: AbstractContextManager[None] = DefaultScope.overwrite_default_scope(
        settings.get("default_scope") or "mmengine"
    )
    return scope


@contextmanager
def quiet(*, about_scopes: bool = False) -> Iterator[None]:
    """Silence MMEngine's logger, which reports each parameter of an optimizer and each scope without a registry.

    Args:
        about_scopes: Silence only its messages about scopes, which findings explain better.
    """
    logger = MMLogger.get_current_instance()

    def passes(record: logging.LogRecord) -> bool:
        return about_scopes and not record.getMessage().startswith(_ABOUT_SCOPES)

    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)


def class_of(value: Any, registry: Registry) -> Any:
    """Return the object for a ``type``, or None if the current scope's registry and its parents do not have it."""
    if not isinstance(value, str):
        return value
    try:
        with quiet(), registry.switch_scope_and_registry(None) as known:
            return known.get(value)
    except Exception:  # importing the scope's modules may raise anything; `unregistered` reports it
        return None


def unregistered(value: Any, registry: Registry, path: str) -> Iterator[Finding]:
    """Yield an error if ``value`` is a name that the current scope's registry and its parents do not have.

    What prevents the import of the scope's modules is an error of the scope, the same for every name.
    """
    if not isinstance(value, str):
        return
    message = ""
    try:
        with quiet(), registry.switch_scope_and_registry(None) as known:
            if _found(value, known):
                return
            reason = "" if Registry.split_scope_key(value)[0] else why_scope_fails(value, known)
            message = unknown_name(value, known).message
    except Exception as error:  # importing the package's modules may raise anything
        reason = f"importing the modules of the default scope failed with {type(error).__name__}: {error}. "
        reason += what_to_install(error) or "Repair or reinstall the package."
    if reason:
        path, message = "default_scope", f"No name of it can be looked up: {reason}"
    yield Finding("error", path, message)


def _found(name: str, registry: Registry) -> bool:
    """Return whether a registry has a name; what prevents the import of its modules is raised."""
    try:
        return registry.get(name) is not None
    except KeyError:
        return False
    except RuntimeError as error:
        if not str(error).startswith("Failed to get "):  # which MMEngine says of a name that is no dotted path either
            raise
        return False


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


def types_in(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield path and value of every ``type`` below a config value: names, and classes in configs in Python style."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key == "type" and not isinstance(item, Mapping | list | tuple):
                yield f"{path}.type" if path else "type", item
            else:
                yield from types_in(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from types_in(item, f"{path}[{index}]")


def _means(given: Any, registry: Registry, ours: type) -> bool:
    found = ours_for(class_of(given, registry))
    return name_of(given) == ours.__name__ or (isinstance(found, type) and issubclass(found, ours))
