"""A model's own steps for `mmfsdp.prove`, of the plain model, one that is sharded, or one with DDP: train and val."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch.nn as nn
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.structures import BaseDataElement
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from mmfsdp import no_sync
from mmfsdp.errors import ShardStateError
from mmfsdp.runtime import find_sharded_model
from mmfsdp_mmengine.wrappers.forward_steps import forward_batch, forwards_reach, overrides

__all__ = ["OwnEvaluation", "OwnStep", "own_labels"]


class OwnStep:
    """Calls a model's ``train_step`` with an optimizer wrapper that does not clip, which is left to the caller.

    Args:
        ways: For each optimizer, by name: what makes the context of mixed precision, and how many calls make a step.
    """

    def __init__(self, ways: Mapping[str, tuple[Callable[[], Any], int]]) -> None:
        self._ways = dict(ways)
        self._wrappers: WeakKeyDictionary[Optimizer, _Casting] = WeakKeyDictionary()

    def __call__(self, model: nn.Module, batch: Any, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        """Take a step, or with accumulation a part of one. Collective: every rank."""
        several = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        found = {name: self._wrapper(name, each) for name, each in zip(self._ways, several, strict=True)}
        wrapper: Any = OptimWrapperDict(**found) if len(found) > 1 else next(iter(found.values()))
        with _reached(model) as inner:
            inner.train_step(tree_map(own_labels, batch), wrapper)

    def _wrapper(self, name: str, optimizer: Optimizer) -> _Casting:
        found = self._wrappers.get(optimizer)
        if found is None:
            found = self._wrappers[optimizer] = _Casting(*self._ways[name], optimizer)
        return found


class OwnEvaluation:
    """Calls a model's ``val_step`` as MMEngine's loop of validation does.

    Args:
        sample: Makes a batch as the data loader of validation gives it.
    """

    def __init__(self, sample: Callable[[], Any]) -> None:
        self._sample = cache(sample)

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """Evaluate with the own batch; the one that is given is for training. Collective: every rank."""
        data = tree_map(own_labels, self._sample())
        with _reached(model) as inner:
            if overrides(inner, "val_step"):
                return inner.val_step(data)
            return forward_batch(model, inner.data_preprocessor(data, False), "predict")


@contextmanager
def _reached(model: nn.Module) -> Iterator[Any]:
    """Yield the module whose steps to call; until the end its calls of itself go through the wrappers around it."""
    is_wrapped = isinstance(model, DistributedDataParallel | FullyShardedDataParallel)
    inner: Any = model.module if is_wrapped else model
    with nullcontext() if _is_plain(model) else forwards_reach(_Way(model), inner, through_wrapper=is_wrapped):
        yield inner


class _Way:
    """Routes a model's calls of itself through its wrappers, and accumulates its gradients as they do."""

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

    def __init__(self, cast: Callable[[], Any], accumulate: int, optimizer: Optimizer) -> None:
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
    """Copy labels, because preprocessors replace parts of them; return other leaves of a batch as they are."""
    return copy.deepcopy(leaf) if isinstance(leaf, BaseDataElement) else leaf
