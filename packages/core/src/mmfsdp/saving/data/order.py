"""Divides the order of an epoch's samples among ranks, from any sample on: the arithmetic of `DataPosition`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DistributedSampler

__all__ = ["Division", "order_of", "share_of"]

Order = Callable[[int], Sequence[int]]
"""Returns the indices of an epoch's samples in the order in which all ranks together see them."""


@dataclass(frozen=True)
class Division:
    """How the ranks divide an order: each takes every n-th sample, beginning at its own place."""

    ranks: int
    place: int
    drop_last: bool
    """Leave samples out at the end if they cannot be divided; otherwise the first ones are seen twice."""


def share_of(order: Sequence[int], consumed: int, division: Division) -> list[int]:
    """Return the samples that one rank still sees in an epoch.

    All ranks together see ``order[consumed:]``, in this order. At the end samples are left out, or the first ones of
    the order are repeated, as `torch.utils.data.DistributedSampler` does.

    Args:
        order: The whole epoch.
        consumed: How many samples all ranks have seen together.
        division: How the ranks divide it.
    """
    left = max(len(order) - consumed, 0)
    beyond = -left % division.ranks
    if beyond and division.drop_last:
        return list(order[consumed : len(order) - left % division.ranks][division.place :: division.ranks])
    own = list(order[consumed + division.place :: division.ranks])
    if beyond and division.place >= division.ranks - beyond:
        own.append(order[(division.place - division.ranks + beyond) % len(order)])
    return own


def order_of(sampler: Any) -> Order | None:
    """Return the order that a ``DistributedSampler`` divides; ``None`` for one that does not divide it as torch's does.

    A class of the user's may draw samples in another way. Whether it does is found by comparing what this rank gets.
    """

    def order(epoch: int) -> Sequence[int]:
        # The same sampler for one rank yields all samples, and repeats none.
        alone = copy.copy(sampler)
        alone.set_epoch(epoch)
        alone.num_replicas, alone.rank, alone.drop_last = 1, 0, False
        alone.num_samples = alone.total_size = len(alone.dataset)
        return list(alone)

    if not isinstance(sampler, DistributedSampler):
        return None
    if type(sampler) is DistributedSampler:
        return order
    division = Division(sampler.num_replicas, sampler.rank, sampler.drop_last)
    try:
        for epoch in (0, 1):
            own = copy.copy(sampler)
            own.set_epoch(epoch)
            if list(own) != share_of(order(epoch), 0, division):
                return None
    except Exception:  # whatever the class expects of itself
        return None
    return order
