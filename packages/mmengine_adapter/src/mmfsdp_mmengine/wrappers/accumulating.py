"""Trains on a batch in parts: the optimizer wrapper accumulates over them as if they were iterations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.optim import OptimWrapper

from mmfsdp.errors import ConfigError
from mmfsdp_mmengine.configs.global_batch import Parts
from mmfsdp_mmengine.optimizers.binding import optim_wrappers_of

__all__ = ["train_in_parts"]

_SETTINGS = ("_accumulative_counts", "_max_counts", "_remainder_counts")


def train_in_parts(
    parts: Parts, train: Callable[[Any], dict[str, torch.Tensor]], optim_wrapper: Any
) -> dict[str, torch.Tensor]:
    """Train on each part, and update parameters after the last one. Collective: every rank, with as many parts.

    Args:
        parts: The parts of a batch.
        train: Computes a part and calls ``update_params`` of the optimizer wrappers.
        optim_wrapper: The optimizer wrapper, or several by name.

    Returns:
        The mean of what ``train`` returned.

    Raises:
        ConfigError: The model's own ``train_step`` does not update parameters through ``update_params``.
    """
    wrappers = [*optim_wrappers_of(optim_wrapper).values()]
    with _counting_parts(wrappers, len(parts)):
        logs = [train(part) for part in parts]
    return {name: sum(log[name] for log in logs) / len(logs) for name in logs[0]}  # type: ignore[misc]


@contextmanager
def _counting_parts(wrappers: Sequence[Any], num: int) -> Iterator[None]:
    """Let optimizer wrappers count parts in place of iterations, for one iteration."""
    if not all(isinstance(wrapper, OptimWrapper) for wrapper in wrappers):
        raise ConfigError(_UNCOUNTED, config="strategy.global_batch_size")
    done = [wrapper._inner_count for wrapper in wrappers]
    before = [{name: getattr(wrapper, name) for name in _SETTINGS} for wrapper in wrappers]
    for wrapper, count, settings in zip(wrappers, done, before, strict=True):
        wrapper._inner_count = count * num
        for name, value in settings.items():
            setattr(wrapper, name, value * num if value > 0 else value)
    try:
        yield
        if any(wrapper._inner_count != (count + 1) * num for wrapper, count in zip(wrappers, done, strict=True)):
            raise ConfigError(_UNCOUNTED, config="strategy.global_batch_size")
    finally:
        for wrapper, count, settings in zip(wrappers, done, before, strict=True):
            wrapper._inner_count = count + 1
            for name, value in settings.items():
                setattr(wrapper, name, value)


_UNCOUNTED = (
    "global_batch_size divides this batch into parts, and needs a step that calls update_params() of each OptimWrapper "
    "once. The model's own train_step, or its optimizer wrapper, does not. Leave global_batch_size out, and set "
    "train_dataloader.batch_size and accumulative_counts for the number of ranks."
)
