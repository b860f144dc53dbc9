"""Implements the ``sync_bn`` setting: batch norm over the batches of all ranks."""

from __future__ import annotations

import torch.nn as nn
from mmengine.model import convert_sync_batchnorm, revert_sync_batchnorm
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from mmfsdp.errors import ConfigError, closest

__all__ = ["synchronise_batch_norm"]

_KINDS = ("torch", "mmcv", "revert")


def synchronise_batch_norm(model: nn.Module, kind: str | None, device_type: str, world_size: int) -> nn.Module:
    """Return the model with its batch norm layers converted; parameters stay the same objects.

    Args:
        model: A model that is not sharded yet. Changed in place, unless it is a batch norm layer itself.
        kind: ``'torch'`` or ``'mmcv'``: use the SyncBatchNorm of that package. ``'revert'``: replace SyncBatchNorm by
            plain batch norm. None: keep the layers.
        device_type: The type of device that the model runs on.
        world_size: Number of ranks. On one rank, layers are reverted.

    Raises:
        ConfigError: ``kind`` is unknown, mmcv is not installed, or the model would run SyncBatchNorm on the CPU.
    """
    if kind not in (None, *_KINDS):
        raise ConfigError(
            f"sync_bn must be one of {', '.join(map(repr, _KINDS))} or None, got {kind!r}.{closest(kind, _KINDS)}",
            config="sync_bn",
        )
    if kind == "revert" or world_size == 1:
        # mmcv's class has the same name; mmcv may not be installed.
        if any(type(module).__name__ == "SyncBatchNorm" for module in model.modules()):
            model = revert_sync_batchnorm(model)
        return model
    layers = [name or "(root)" for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    synchronised = [name for name in layers if kind or isinstance(model.get_submodule(_path(name)), SyncBatchNorm)]
    if synchronised and device_type == "cpu":
        raise ConfigError(
            f"SyncBatchNorm does not run on the CPU, but {', '.join(synchronised[:3])}"
            f"{' ...' if len(synchronised) > 3 else ''} would need it. Set sync_bn='revert' for plain batch norm; "
            "SyncBuffersHook then averages the statistics after each epoch.",
            config="sync_bn",
        )
    if kind is None:
        return model
    try:
        converted: nn.Module = convert_sync_batchnorm(model, kind)
    except ImportError as error:
        raise ConfigError(
            f"sync_bn='mmcv' needs mmcv, which cannot be imported: {error}. Install mmcv, or use sync_bn='torch'.",
            config="sync_bn",
        ) from error
    return converted


def _path(name: str) -> str:
    return "" if name == "(root)" else name
