"""Logs the parameters that no loss of a training step reaches."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.logging import print_log

from mmfsdp.runtime import LossReach
from mmfsdp_mmengine.optimizers.binding import optim_wrappers_of

__all__ = ["unreached_logged"]


@contextmanager
def unreached_logged(reach: LossReach, optim_wrapper: Any) -> Iterator[None]:
    """Log trainable parameters that no loss inside the context reaches, in MMEngine's words.

    Args:
        reach: Tracks the model.
        optim_wrapper: An optimizer wrapper or an OptimWrapperDict, whose ``update_params`` gets the losses.
    """
    losses: list[torch.Tensor] = []
    wrappers = list(optim_wrappers_of(optim_wrapper).values())

    def noting(update: Any) -> Any:
        def update_params(loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            losses.append(loss)
            return update(loss, *args, **kwargs)

        return update_params

    for wrapper in wrappers:
        vars(wrapper)["update_params"] = noting(wrapper.update_params)
    try:
        yield
    finally:
        for wrapper in wrappers:
            vars(wrapper).pop("update_params")
    for name, shape in reach.unreached(losses).items():
        print_log(f"{name} with shape {shape} is not in the computational graph \n", "current", logging.ERROR)
