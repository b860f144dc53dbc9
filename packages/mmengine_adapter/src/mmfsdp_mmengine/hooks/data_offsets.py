"""Begins a data loader at any sample of an epoch, so that a run resumes exactly with batches of another size."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

from mmengine.dataset import DefaultSampler, InfiniteSampler
from torch.utils.data import BatchSampler, DataLoader, Sampler

__all__ = ["begin_at"]


def begin_at(loader: DataLoader[Any], seen: int) -> bool:
    """Let the next iterator over a loader begin behind some samples. Not collective.

    Args:
        loader: The loader. With a `DefaultSampler` only its next epoch is a part of one; an `InfiniteSampler` has one
            epoch.
        seen: How many samples of the epoch all ranks have seen together.

    Returns:
        Whether the loader can do so: its sampler is one of these two, and batches are the sampler's next samples.
    """
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        return False
    sampler: Any = batches.sampler
    if type(sampler) is InfiniteSampler:
        sampler.indices = itertools.islice(sampler._infinite_indices(), seen + sampler.rank, None, sampler.world_size)
    elif type(sampler) is DefaultSampler:
        batches.sampler = _Rest(batches, seen)
    else:
        return False
    return True


class _Rest(Sampler[int]):
    """What is left of an epoch of a `DefaultSampler`, whose place in the batch sampler it gives back."""

    def __init__(self, batches: BatchSampler, seen: int) -> None:
        self._batches, self._seen = batches, seen
        self._whole: Any = batches.sampler

    def __iter__(self) -> Iterator[int]:
        self._batches.sampler = whole = self._whole
        alone = copy.copy(whole)  # the same sampler for one rank yields all samples, and repeats none
        alone.rank, alone.world_size = 0, 1
        alone.num_samples = alone.total_size = len(whole.dataset)
        order = list(alone)
        left = order[self._seen :]
        if whole.round_up:
            left += itertools.islice(itertools.cycle(order), -len(left) % whole.world_size)
        return iter(left[whole.rank :: whole.world_size])

    def __len__(self) -> int:
        return len(self._whole)
