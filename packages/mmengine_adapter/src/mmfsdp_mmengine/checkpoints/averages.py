"""Averaged weights of a sharded model: each rank averages its own shard, and checkpoints hold the averages."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn as nn
from mmengine.model import BaseAveragedModel
from mmengine.registry import MODELS

from mmfsdp import load_model_state_dict, model_state_dict
from mmfsdp.basics import WRAPPER_PREFIX
from mmfsdp.errors import ConfigError, StateDictError, closest
from mmfsdp.runtime import find_sharded_model
from mmfsdp.state import LoadReport, LocalView, compare_shapes, exchanged, whole_value
from mmfsdp_mmengine.checkpoints.live_content import with_own_counters

__all__ = ["RecordedLoad", "ShardAverages", "averaged_model_class", "with_averages"]

_live: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ShardAverages]] = weakref.WeakKeyDictionary()


def averaged_model_class(config: Mapping[str, Any]) -> type:
    """Return the class of averaged model that ``config`` names, after checking that it accepts the arguments.

    Args:
        config: ``type`` (a registered name or a class) and its arguments.

    Raises:
        ConfigError: There is no such class, it is not an averaged model, or it does not accept an argument.
    """
    given = config["type"]
    with MODELS.switch_scope_and_registry(None) as registry:
        found = registry.get(given) if isinstance(given, str) else given
        known = [name for name, cls in registry.module_dict.items() if _averages(cls)]
        known += [name for name, cls in MODELS.module_dict.items() if _averages(cls) and name not in known]
    if not _averages(found):
        problem = "is not registered in MODELS" if found is None else f"is {found!r}, not a BaseAveragedModel"
        raise ConfigError(
            f"EMAHook: ema_type {given!r} {problem}.{closest(given, known)} Registered: {', '.join(sorted(known))}.",
            config="custom_hooks.EMAHook.ema_type",
        )
    arguments = {name: value for name, value in config.items() if name != "type"}
    signature = inspect.signature(found)
    try:
        signature.bind(model=None, **arguments)
    except TypeError as error:
        hints = [closest(name, signature.parameters) for name in arguments if name not in signature.parameters]
        raise ConfigError(
            f"EMAHook: {found.__name__}{signature} does not accept these arguments: {error}.{''.join(hints)}",
            config="custom_hooks.EMAHook",
        ) from None
    cls: type = found
    return cls


class ShardAverages:
    """An averaged model of this rank's part of a sharded model.

    The user's class averages plain tensors, which takes the memory of one shard per rank.

    Args:
        model: The sharded model or a wrapper around it.
        config: ``type`` and arguments of the averaged model.

    Attributes:
        averaged: The averaged model.

    Raises:
        ConfigError: See `averaged_model_class`.
    """

    def __init__(self, model: nn.Module, config: Mapping[str, Any]) -> None:
        averaged_model_class(config)
        self._state = find_sharded_model(model)
        self._view = LocalView(model)
        self.averaged: Any = MODELS.build({**config}, default_args={"model": self._view.tree()})
        _live[self._state.module] = weakref.ref(self)

    def are_of(self, model: Any) -> bool:
        """Return whether these are the averages of ``model``."""
        return isinstance(model, nn.Module) and find_sharded_model(model) is self._state

    def source(self) -> nn.Module:
        """Return the source of the averages: this rank's part of the model, which shares the model's memory."""
        return self._view.tree()

    def content(self, weights: Mapping[str, Any], kind: Literal["full", "sharded"]) -> dict[str, Any]:
        """Return ``state_dict`` and ``ema_state_dict`` as MMEngine saves them. Collective: every rank.

        The averages are under ``state_dict``, and the trained weights under ``ema_state_dict``.

        Args:
            weights: The model's state dict of that kind.
            kind: See `mmfsdp.model_state_dict`.
        """
        with exchanged(self._view, self.averaged.module):
            averages = model_state_dict(self._state.module, kind)
            if kind == "sharded":  # shards share the model's memory, which holds the averages only now
                averages = {name: _copy(value) for name, value in averages.items()}
        trained = {f"{WRAPPER_PREFIX}{name}": value for name, value in weights.items()}
        return {"state_dict": averages, "ema_state_dict": {**self._own(), **trained}}

    def check(self, averages: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Raise if `load` or `follow` could not use all of a checkpoint. Not collective.

        Args:
            averages: The state dict to load the averages from, or the weights to start averaging from.
            own: The state of the averaged model itself; None to start averaging anew.

        Raises:
            StateDictError: Keys or shapes do not match.
        """
        held = self.source()
        params = {name for name, _ in held.named_parameters(remove_duplicate=False)}
        wanted = {name: tensor.shape for name, tensor in held.state_dict().items() if name not in params}
        for param in self._state.plan.all_params():
            wanted |= dict.fromkeys((param.fqn, *param.aliases), torch.Size(param.shape))
        offered = with_own_counters(self._state.module, averages)
        shapes = {name: value.shape for name, value in offered.items() if hasattr(value, "shape")}
        if own is not None:
            wanted |= dict.fromkeys(self._own())
            shapes |= {name: None for name in own if not name.startswith(WRAPPER_PREFIX)}
        report = compare_shapes(wanted, shapes)
        if not report.clean:
            raise StateDictError(
                f"EMAHook(strict_load=True): this checkpoint does not match the averages: {report}. With "
                "strict_load=False, whatever does not match starts from the model's own values."
            )

    def load(self, averages: Mapping[str, Any], own: Mapping[str, Any], *, strict: bool) -> LoadReport:
        """Load averages. Collective: every rank.

        Args:
            averages: A state dict of the model, with whole tensors or this model's own shards.
            own: State of the averaged model itself, such as ``steps``.
            strict: Raise if keys or shapes do not match.

        Raises:
            StateDictError: With ``strict``, keys or shapes do not match; raised on every rank.
        """
        with exchanged(self._view, self.averaged.module):
            offered = with_own_counters(self._state.module, averages)
            report = load_model_state_dict(self._state.module, offered, strict=strict)
        with torch.no_grad():
            for name, value in self._own().items():
                if name in own and isinstance(value, torch.Tensor):
                    value.copy_(whole_value(own[name]))
        return report

    def follow(self) -> None:
        """Copy the model's weights into the averages, as before the first step. Not collective."""
        self.averaged.module.load_state_dict(self._view.tree().state_dict())

    def _own(self) -> dict[str, Any]:
        return {
            name: value for name, value in self.averaged.state_dict().items() if not name.startswith(WRAPPER_PREFIX)
        }


class RecordedLoad:
    """Stands for an averaged model while a hook loads a checkpoint, and keeps the loaded state.

    Each rank's averages need all ranks to load, and may not exist yet.

    Attributes:
        module: The averaged model's inner model; loading into it is recorded too.
        averages: The averages, by the model's own names; None if nothing was loaded.
        own: The state of the averaged model itself; None if it was not loaded.
    """

    def __init__(self) -> None:
        self.module = _RecordingModule(self)
        self.averages: dict[str, Any] | None = None
        self.own: dict[str, Any] | None = None

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Keep the state of an averaged model."""
        self.own = {name: value for name, value in state_dict.items() if not name.startswith(WRAPPER_PREFIX)}
        self.averages = {
            name.removeprefix(WRAPPER_PREFIX): value for name, value in state_dict.items() if name not in self.own
        }


class _RecordingModule(nn.Module):
    def __init__(self, record: RecordedLoad) -> None:
        super().__init__()
        vars(self)["record"] = record

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], *args: Any) -> None:
        vars(self)["record"].averages = dict(state_dict)


def with_averages(model: nn.Module, content: Mapping[str, Any], kind: Literal["full", "sharded"]) -> dict[str, Any]:
    """Return a checkpoint's content, with the model's averages added if it has any. Collective: every rank.

    Args:
        model: The sharded model.
        content: Has the model's state dict under ``state_dict``. Not changed.
        kind: Kind of that state dict, see `mmfsdp.model_state_dict`.
    """
    reference = _live.get(find_sharded_model(model).module)
    averages = None if reference is None else reference()
    return dict(content) if averages is None else {**content, **averages.content(content["state_dict"], kind)}


def _averages(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, BaseAveragedModel)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
