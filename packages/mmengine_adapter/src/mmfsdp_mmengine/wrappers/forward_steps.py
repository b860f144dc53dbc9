"""Runs a model's training and validation steps such that every forward goes through the wrapper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.nn as nn
from mmengine.model import BaseModel

__all__ = ["forward_batch", "forwards_reach", "overrides"]


def overrides(module: nn.Module, step: str) -> bool:
    """Return whether a model overrides ``train_step``, ``val_step`` or ``test_step``."""
    own = getattr(type(module), step, None)
    return step in vars(module) or (own is not None and own is not getattr(BaseModel, step))


def forward_batch(model: nn.Module, data: Any, mode: str) -> Any:
    """Call the model with a batch that a data preprocessor returned.

    Args:
        model: The wrapper, or the model itself.
        data: A dict of keyword arguments, or a list or tuple of positional ones.
        mode: ``'loss'`` or ``'predict'``.

    Raises:
        TypeError: The batch has another type.
    """
    if isinstance(data, Mapping):
        return model(**data, mode=mode)
    if isinstance(data, list | tuple):
        return model(*data, mode=mode)
    raise TypeError(
        f"The data_preprocessor of {type(model).__name__} must return a dict, list or tuple, but it returned "
        f"{type(data).__name__}."
    )


@contextmanager
def forwards_reach(wrapper: Any, module: nn.Module, *, through_wrapper: bool) -> Iterator[None]:
    """Redirect the module's calls of itself to ``wrapper``, and lend it the wrapper's ``no_sync``.

    Args:
        wrapper: The wrapper, or what calls it and has its ``no_sync``.
        module: The wrapped module.
        through_wrapper: Whether only the wrapper's forward synchronises; a module that is sharded itself synchronises
            in its own forward.
    """
    lent: dict[str, Any] = {"no_sync": wrapper.no_sync}
    if through_wrapper:
        own = vars(module).get("forward")

        def forward(*args: Any, **kwargs: Any) -> Any:
            # The wrapper calls the module's forward: restore the original meanwhile.
            vars(module).pop("forward")
            if own is not None:
                vars(module)["forward"] = own
            try:
                return wrapper(*args, **kwargs)
            finally:
                vars(module)["forward"] = forward

        lent["forward"] = forward
    before = {name: vars(module)[name] for name in lent if name in vars(module)}
    vars(module).update(lent)
    try:
        yield
    finally:
        for name in lent:
            vars(module).pop(name, None)
        vars(module).update(before)
