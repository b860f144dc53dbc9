"""Refuses settings of the environment (``env_cfg``) that neither MMEngine nor torch knows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed as dist
from mmengine.utils.dl_utils import set_multi_processing

from mmfsdp_mmengine.configs.unknown import refuse_unknown

__all__ = ["check_dist_cfg", "check_environment"]

_OF_LAUNCHERS = dict.fromkeys(("rank", "world_size"), "The launcher tells it.")
_OF_RUNNERS = dict.fromkeys(("distributed",), "The launcher tells it.")


def check_environment(setup: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Check the names of a strategy's ``env_kwargs``, which a runner makes from ``env_cfg``.

    Args:
        setup: MMEngine's function that takes them.
        given: The settings.

    Raises:
        ConfigError: A name is unknown; the error suggests the nearest one.
    """
    refuse_unknown("env_cfg", given, _names_of(setup), "env_cfg")
    check_dist_cfg(given.get("dist_cfg") or ())
    accepted = [name for name in _names_of(set_multi_processing) if name not in _OF_RUNNERS]
    refuse_unknown("mp_cfg", given.get("mp_cfg") or (), accepted, "env_cfg.mp_cfg", _OF_RUNNERS)


def check_dist_cfg(given: Iterable[str]) -> None:
    """Check the names in ``env_cfg.dist_cfg``.

    Raises:
        ConfigError: A name is unknown; the error suggests the nearest one.
    """
    of_torch = [name for name in _names_of(dist.init_process_group) if name not in _OF_LAUNCHERS]
    refuse_unknown("dist_cfg", given, [*of_torch, "port", "init_backend"], "env_cfg.dist_cfg", _OF_LAUNCHERS)


def _names_of(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]
