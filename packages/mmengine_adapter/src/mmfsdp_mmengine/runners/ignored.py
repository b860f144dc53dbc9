"""Warns of settings that would shard the model, but that the runner at hand ignores, as MMEngine's runners do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from mmengine.runner import FlexibleRunner, Runner

from mmfsdp_mmengine.registry import ours_for

__all__ = ["warn_of_ignored"]


def warn_of_ignored(runner: Runner | FlexibleRunner) -> None:
    """Log what of a runner's config is ignored, though it names a strategy or wrapper that shards. Not collective.

    Args:
        runner: A runner whose logger is built.
    """
    for warning in _warnings(runner, runner.cfg or {}):
        runner.logger.warning(warning)


def _warnings(runner: Runner | FlexibleRunner, config: Any) -> Iterator[str]:
    if isinstance(runner, FlexibleRunner):
        if _names(config.get("model_wrapper_cfg"), "MMFullyShardedDataParallel") and not _shards(config):
            yield (
                "FlexibleRunner ignores model_wrapper_cfg, so the model is not sharded. Write "
                "strategy=dict(type='FSDPStrategy', model_wrapper=dict(...)), or use the plain Runner."
            )
        return
    wrapped = _names(config.get("model_wrapper_cfg"), "MMFullyShardedDataParallel")
    if _shards(config) and not wrapped:
        yield (
            "The plain Runner ignores strategy, so the model is not sharded. Write runner_type='FlexibleRunner', and "
            "start a script that reads it, as OpenMMLab's tools/train.py does; or write model_wrapper_cfg="
            "dict(type='MMFullyShardedDataParallel', ...) instead of strategy."
        )
    ranks = os.environ.get("WORLD_SIZE", "1")
    if wrapped and not runner.distributed and ranks != "1":
        yield (
            f"launcher is 'none', so each of the {ranks} processes trains the whole model by itself and writes the "
            "same files. Write launcher='pytorch', or start OpenMMLab's tools/train.py with --launcher pytorch."
        )


def _shards(config: Any) -> bool:
    return _names(config.get("strategy"), "FSDPStrategy")


def _names(setting: Any, name: str) -> bool:
    """Whether the setting's type is a class of ours, or its name in any scope."""
    kind = ours_for(setting.get("type")) if hasattr(setting, "get") else None
    return str(getattr(kind, "__name__", kind)).rpartition(".")[2] == name
