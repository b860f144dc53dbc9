"""Divides the order of an epoch's samples among ranks, from any sample on, as samplers do from the first one on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch.utils.data import DistributedSampler

__all__ = ["order_of", "own_samples", "samples_left", "whole_order"]

Order = Callable[[int], Sequence[int]]
"""Returns the indices of an epoch's samples in the order in which all ranks together see them."""


def samples_left(
    order: Sequence[int], consumed: int, *, ranks: int, rank: int, end: Literal["drop", "keep", "repeat"]
) -> list[int]:
    """Return the samples that one rank still sees in an epoch.

    All ranks together see ``order[consumed:]``: each takes every n-th sample, the first rank from the first one on.

    Args:
        order: The whole epoch.
        consumed: How many samples all ranks have seen together.
        ranks: How many ranks there are.
        rank: The rank.
        end: If the samples cannot be divided: ``drop`` the last ones, ``keep`` them, so that some ranks see one more,
            or ``repeat`` the first ones of the order.
    """
    left = max(len(order) - consumed, 0)
    beyond = -left % ranks
    if beyond and end == "drop":
        return list(order[consumed : len(order) - left % ranks][rank::ranks])
    own = list(order[consumed + rank :: ranks])
    if end == "repeat" and beyond and rank >= ranks - beyond:
        own.append(order[(rank - ranks + beyond) % len(order)])
    return own


def own_samples(sampler: DistributedSampler[Any], order: Sequence[int], consumed: int = 0) -> list[int]:
    """Return the samples that the rank of a sampler of torch still sees in an epoch; see `samples_left`."""
    end: Literal["drop", "repeat"] = "drop" if sampler.drop_last else "repeat"
    return samples_left(order, consumed, ranks=sampler.num_replicas, rank=sampler.rank, end=end)


def whole_order(sampler: Any, **alone: Any) -> list[int]:
    """Return all samples of an epoch, each once, in the order that a sampler divides among ranks.

    Args:
        sampler: The sampler. Not changed.
        **alone: The values that its attributes have where there is one rank.
    """
    one = copy.copy(sampler)
    vars(one).update(alone)
    one.num_samples = one.total_size = len(one.dataset)
    return list(one)


def order_of(sampler: Any) -> Order | None:
    """Return the order that a ``DistributedSampler`` divides; ``None`` for one that does not divide it as torch's does.

    A class of the user's may draw samples in another way. Whether it does is found by comparing what this rank gets.
    """

    def order(epoch: int) -> Sequence[int]:
        there = copy.copy(sampler)
        there.set_epoch(epoch)
        return whole_order(there, num_replicas=1, rank=0, drop_last=False)

    if not isinstance(sampler, DistributedSampler):
        return None
    if type(sampler) is DistributedSampler:
        return order
    try:
        for epoch in (0, 1):
            own = copy.copy(sampler)
            own.set_epoch(epoch)
            if list(own) != own_samples(sampler, order(epoch)):
                return None
    except Exception:  # whatever the class expects of itself
        return None
    return order
