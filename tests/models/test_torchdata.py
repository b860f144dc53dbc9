"""DataPosition with torchdata's StatefulDataLoader: a sampler's position on any ranks, an iterable one's on as many."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import mmfsdp
from mmfsdp.saving.loop.run_state import _is_of_rank

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it


class Shard(IterableDataset[int]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(100 * self.rank, 100 * self.rank + 24))


def position(ranks: int, rank: int, workers: int) -> mmfsdp.DataPosition:
    dataset = TensorDataset(torch.arange(24))
    sampler = DistributedSampler[Any](dataset, ranks, rank, seed=2)
    return mmfsdp.DataPosition(StatefulDataLoader(dataset, batch_size=8 // ranks, sampler=sampler, num_workers=workers))


def steps(positions: list[mmfsdp.DataPosition]) -> Iterator[list[int]]:
    for batches in zip(*positions, strict=True):
        yield sorted(int(index) for [batch] in batches for index in batch)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_goes_on_on_other_ranks(workers: int) -> None:
    whole = list(steps([position(2, rank, workers) for rank in range(2)]))
    running = [position(2, rank, workers) for rank in range(2)]
    first = list(islice(steps(running), 1))
    resumed = [position(4, rank, workers) for rank in range(4)]
    for each in resumed:
        each.load_state_dict(running[0].state_dict())
    assert all(each.is_elastic for each in resumed)
    assert [*first, *steps(resumed)] == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_data_set_goes_on_on_its_rank(workers: int) -> None:
    def loader() -> StatefulDataLoader[int]:
        return StatefulDataLoader(Shard(3), batch_size=4, num_workers=workers)

    whole = [batch.tolist() for batch in loader()]
    running = mmfsdp.DataPosition(loader())
    first = [batch.tolist() for batch in islice(running, 2)]
    resumed = mmfsdp.DataPosition(loader())
    resumed.load_state_dict(running.state_dict())
    assert [*first, *(batch.tolist() for batch in resumed)] == whole
    # Given as it is, its state counts as that of one rank, though two ranks may have the same.
    assert _is_of_rank(loader())
