"""DataPosition: after a resume on any number of ranks every sample of an epoch is seen once, and in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset

import mmfsdp
from mmfsdp.errors import ConfigError, StateDictError
from mmfsdp.saving.data.order import own_samples


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def position(
    length: int, ranks: int, rank: int, batch: int, sampler: type = DistributedSampler, **options: Any
) -> mmfsdp.DataPosition:
    workers = options.pop("num_workers", 0)
    data = Numbers(length)
    own = sampler(data, num_replicas=ranks, rank=rank, **options)
    return mmfsdp.DataPosition(DataLoader(data, batch_size=batch, sampler=own, num_workers=workers))


def steps_of(positions: list[mmfsdp.DataPosition]) -> Iterator[list[int]]:
    """Yield what all ranks together see in each step of the current epoch."""
    for batches in zip(*positions, strict=True):
        yield [int(index) for batch in batches for index in batch]


def seen(steps: list[list[int]]) -> list[int]:
    return sorted(index for step in steps for index in step)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [1, 2, 7, 12, 23, 24])
def test_from_the_beginning_the_shares_are_those_of_torch(length: int, drop_last: bool) -> None:
    for ranks in range(1, 6):
        for rank in range(ranks):
            torchs = DistributedSampler(Numbers(length), ranks, rank, shuffle=False, drop_last=drop_last)
            if length < ranks:
                continue  # torch repeats the data set more than once, or has nothing
            assert own_samples(torchs, range(length)) == list(torchs)


RANKS_AND_BATCHES = [((2, 6), (3, 4)), ((2, 6), (1, 12)), ((3, 4), (4, 3)), ((4, 3), (2, 6))]


@pytest.mark.parametrize(("before", "after"), RANKS_AND_BATCHES)
@pytest.mark.parametrize("length", [48, 44])
def test_other_ranks_see_the_same_steps(length: int, before: tuple[int, int], after: tuple[int, int]) -> None:
    """The global batch is 12; three ranks cannot divide the last 8 of 44 samples, and see one more."""
    for consumed in range(4):
        whole = [position(length, ranks=before[0], rank=rank, batch=before[1], seed=3) for rank in range(before[0])]
        steps = [sorted(step) for step in steps_of(whole)]
        running = [position(length, ranks=before[0], rank=rank, batch=before[1], seed=3) for rank in range(before[0])]
        first = [sorted(step) for step in islice(steps_of(running), consumed)]
        [state] = {repr(each.state_dict()): each.state_dict() for each in running}.values()  # equal on all ranks
        resumed = [position(length, ranks=after[0], rank=rank, batch=after[1]) for rank in range(after[0])]
        for each in resumed:
            each.load_state_dict(state)
        found = [*first, *(sorted(step) for step in steps_of(resumed))]
        assert found[:3] == steps[:3]
        if length == 48:
            assert found == steps
            assert seen(found) == list(range(48))
        else:
            own = {*range(44)}.difference(*found[:3])
            assert {*found[3]} >= own
            assert len(found[3]) == 8 + (after[0] == 3)
        assert {each.epoch for each in resumed} == {1}
        following = [sorted(step) for step in steps_of(whole)]
        assert [sorted(step) for step in steps_of(resumed)][:3] == following[:3]


@pytest.mark.parametrize("drop_last", [False, True])
def test_what_cannot_be_divided_is_repeated_or_left_out(drop_last: bool) -> None:
    running = [position(23, ranks=2, rank=rank, batch=4, drop_last=drop_last) for rank in range(2)]
    first = list(islice(steps_of(running), 1))
    resumed = [position(23, ranks=4, rank=rank, batch=2, drop_last=drop_last) for rank in range(4)]
    for each in resumed:
        each.load_state_dict(running[0].state_dict())
    found = seen([*first, *steps_of(resumed)])
    assert len(found) == (20 if drop_last else 24)
    assert len({*found}) == (20 if drop_last else 23)


def test_a_position_at_the_end_of_an_epoch_has_nothing_left() -> None:
    [running] = [position(8, ranks=1, rank=0, batch=4)]
    batches = iter(running)
    next(batches), next(batches)
    resumed = position(8, ranks=1, rank=0, batch=4)
    resumed.load_state_dict(running.state_dict())
    # The loop runs what follows an epoch, which the run that saved had not done yet.
    assert (list(resumed), resumed.epoch, len(resumed)) == ([], 1, 2)
    assert len(list(resumed)) == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_random_numbers_go_on_as_if_nothing_had_happened(workers: int) -> None:
    def train(where: mmfsdp.DataPosition, steps: int) -> list[Any]:
        return [(batch.tolist(), torch.rand(1).item()) for batch in islice(where, steps)]

    torch.manual_seed(1)
    whole = train(position(32, ranks=1, rank=0, batch=4), 8)
    torch.manual_seed(1)
    running = position(32, ranks=1, rank=0, batch=4, num_workers=workers)
    batches = iter(running)
    first = [(next(batches).tolist(), torch.rand(1).item()) for _ in range(3)]
    state, random = running.state_dict(), torch.get_rng_state()
    torch.manual_seed(2)
    resumed = position(32, ranks=1, rank=0, batch=4, num_workers=workers)
    resumed.load_state_dict(state)
    torch.set_rng_state(random)
    assert [*first, *train(resumed, 5)] == whole
    assert (resumed.inexact is not None) == (workers > 0)


class Reversed(DistributedSampler[int]):
    """A sampler of a user, which divides another order."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(len(self.dataset)))[::-1]  # type: ignore[arg-type]
        return iter((order + order)[: self.total_size][self.rank :: self.num_replicas])


class Blocks(DistributedSampler[int]):
    """A sampler of a user that gives each rank a block."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank * self.num_samples, (self.rank + 1) * self.num_samples))


def test_a_sampler_of_the_users_is_compared_with_what_it_should_give() -> None:
    assert position(12, ranks=2, rank=1, batch=2, sampler=Reversed).is_elastic
    with pytest.raises(ConfigError, match="order in which a Blocks gives samples cannot be resumed"):
        position(12, ranks=2, rank=1, batch=2, sampler=Blocks)


class Lengths(BatchSampler):
    """Batches of a user, such as those of similar lengths."""


class Stream(IterableDataset[int]):
    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 12:
            self.at += 1
            yield self.at - 1
        self.at = 0


class Stateful(Stream):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: DataLoader(Numbers(8), batch_size=2, shuffle=True), "order in which a RandomSampler gives samples"),
        (lambda: DataLoader(Numbers(8), batch_size=2), "order in which a SequentialSampler gives samples"),
        (
            lambda: DataLoader(Numbers(8), batch_sampler=Lengths(DistributedSampler(Numbers(8), 1, 0), 2, False)),
            "order in which a DistributedSampler gives",
        ),
        (lambda: DataLoader(Stream(), batch_size=2), "data set Stream is iterable and has no state_dict"),
        (lambda: DataLoader(Stateful(), batch_size=2, num_workers=2), "2 worker processes have copies of the data set"),
    ],
)
def test_what_cannot_be_resumed_is_refused_at_once(loader: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mmfsdp.DataPosition(loader())


def test_an_iterable_data_set_goes_on_where_it_was() -> None:
    running = mmfsdp.DataPosition(DataLoader(Stateful(), batch_size=4))
    batches = iter(running)
    assert next(batches).tolist() == [0, 1, 2, 3]
    resumed = mmfsdp.DataPosition(DataLoader(Stateful(), batch_size=4))
    resumed.load_state_dict(running.state_dict())
    assert not resumed.is_elastic
    assert [batch.tolist() for batch in resumed] == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert resumed.epoch == 1
    assert len(list(resumed)) == 3
    assert resumed.state_dict() == {"epoch": 2, "consumed": 0, "source": None}


def test_a_position_in_other_data_is_refused() -> None:
    saved = position(12, ranks=1, rank=0, batch=2, seed=5).state_dict()
    with pytest.raises(StateDictError, match=r"number of samples in the data set was 12 .* and is 13 now"):
        position(13, ranks=1, rank=0, batch=2).load_state_dict(saved)
    with pytest.raises(StateDictError, match=r"setting shuffle of the sampler was True .* and is False now"):
        position(12, ranks=1, rank=0, batch=2, shuffle=False).load_state_dict(saved)
    streamed = mmfsdp.DataPosition(DataLoader(Stateful(), batch_size=4))
    with pytest.raises(StateDictError, match="that of an iterable data set"):
        streamed.load_state_dict(saved)
    with pytest.raises(StateDictError, match="that of an iterable data set"):
        position(12, ranks=1, rank=0, batch=2).load_state_dict(streamed.state_dict())
