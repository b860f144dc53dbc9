"""A model's own ``train_step`` as a step for `mmfsdp.prove`: the plain model, one that is sharded, or one with DDP."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn as nn
from mmengine.optim import OptimWrapper
from mmengine.structures import BaseDataElement
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from mmfsdp import no_sync
from mmfsdp.errors import ShardStateError
from mmfsdp.runtime import find_sharded_model
from mmfsdp_mmengine.wrappers.forward_steps import forwards_reach

__all__ = ["OwnStep", "own_labels"]


class OwnStep:
    """Calls a model's ``train_step`` with an optimizer wrapper that does not clip, which is left to the caller.

    Args:
        cast: Makes the context of mixed precision.
        accumulate: How many calls make a step of the optimizer.
    """

    def __init__(self, cast: Callable[[], Any], accumulate: int) -> None:
        self._cast, self._accumulate = cast, accumulate
        self._wrappers: WeakKeyDictionary[torch.optim.Optimizer, _Casting] = WeakKeyDictionary()

    def __call__(self, model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
        """Take a step, or with accumulation a part of one. Collective: every rank."""
        wrapper = self._wrappers.get(optimizer)
        if wrapper is None:
            wrapper = self._wrappers[optimizer] = _Casting(self._cast, optimizer, self._accumulate)
        is_wrapped = isinstance(model, DistributedDataParallel | FullyShardedDataParallel)
        inner: Any = model.module if is_wrapped else model
        reach = nullcontext() if _is_plain(model) else forwards_reach(_Way(model), inner, through_wrapper=is_wrapped)
        with reach:
            inner.train_step(tree_map(own_labels, batch), wrapper)


class _Way:
    """What a model's own step calls in place of itself, and what accumulates its gradients."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        held: AbstractContextManager[None] = (
            self._model.no_sync() if isinstance(self._model, DistributedDataParallel) else no_sync(self._model)
        )
        return held


class _Casting(OptimWrapper):
    """An optimizer wrapper whose forwards run in a context of mixed precision."""

    def __init__(self, cast: Callable[[], Any], optimizer: torch.optim.Optimizer, accumulate: int) -> None:
        super().__init__(optimizer, accumulative_counts=accumulate)
        self._cast = cast

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        with super().optim_context(model), self._cast():
            yield


def _is_plain(model: nn.Module) -> bool:
    """Return whether a model is neither sharded nor within DDP."""
    if isinstance(model, DistributedDataParallel):
        return False
    try:
        find_sharded_model(model)
    except ShardStateError:
        return True
    return False


def own_labels(leaf: Any) -> Any:
    """Copy labels, parts of which preprocessors replace; return other leaves of a batch as they are."""
    return copy.deepcopy(leaf) if isinstance(leaf, BaseDataElement) else leaf
