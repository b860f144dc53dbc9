"""A run that saves a DataPosition sees every sample of an epoch once, whatever ranks it stops and resumes on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import mmfsdp
from mmfsdp.testing import RankError, run_ranks

GLOBAL_BATCH, LENGTH = 12, 60


def train(rank: int, folder: str | None, stop: int) -> tuple[list[list[int]], dict[str, Any]]:
    """Train for three epochs, at most up to a step; return the samples that this rank sees in each step."""
    torch.manual_seed(0)
    model = mmfsdp.shard(nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = torch.randn(LENGTH, 6, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(rows, torch.arange(LENGTH))
    sampler = DistributedSampler[Any](dataset, seed=4)
    loader = DataLoader(dataset, batch_size=GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    data = mmfsdp.DataPosition(loader)
    manager = None
    if folder is not None:
        manager = mmfsdp.CheckpointManager(folder, model, optimizer, every_steps=3, state={"data": data})
    step, seen = 0 if manager is None else manager.resume(), []
    while data.epoch < 3 and step < stop:
        for batch, numbers in data:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            seen.append(numbers.tolist())
            if manager is not None:
                manager.step(step)
            if step == stop:
                break
    if manager is not None:
        manager.close()
    return seen, mmfsdp.model_state_dict(model, rank0_only=False)


def together(outcomes: list[Any]) -> list[list[int]]:
    return [
        sorted(index for own in step for index in own) for step in zip(*(seen for seen, _ in outcomes), strict=True)
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_sample_is_seen_once_on_other_ranks(ranks: int, tmp_path: Path) -> None:
    whole = run_ranks(train, 2, None, 100)
    for epoch in range(3):
        assert sorted(chain(*together(whole)[5 * epoch :][:5])) == list(range(LENGTH))
    first = run_ranks(train, 2, str(tmp_path), 8)  # within the second epoch; step 6 is saved
    rest = run_ranks(train, ranks, str(tmp_path), 100)
    assert [*together(first)[:6], *together(rest)] == together(whole)
    torch.testing.assert_close(rest[0][1], whole[0][1], rtol=1e-5, atol=1e-6)


class Stream(IterableDataset[int]):
    """Numbers of a rank, without an end; at the same place on every rank."""

    def __init__(self, rank: int) -> None:
        self.rank, self.at = rank, 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.at += 1
            yield 100 * self.rank + self.at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def stream(rank: int, folder: str, wrapped: bool) -> tuple[list[int], list[str]]:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mmfsdp.saving").addHandler(handler)
    dataset = Stream(rank)
    data: Any = mmfsdp.DataPosition(DataLoader(dataset, batch_size=2)) if wrapped else dataset
    with mmfsdp.CheckpointManager(folder, mmfsdp.shard(nn.Linear(2, 2)), state={"data": data}) as manager:
        step, numbers = manager.resume() + 1, []
        for batch in data:
            numbers.append(int(torch.as_tensor(batch).flatten()[-1]))
            if len(numbers) == 3:
                break
        manager.save(step)
    return numbers, lines


@pytest.mark.sample("False")
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_stream_is_of_its_rank_though_its_state_is_the_same_on_all(wrapped: bool, tmp_path: Path) -> None:
    size = 2 if wrapped else 1
    [(first, lines), (other, _)] = run_ranks(stream, 2, str(tmp_path), wrapped)
    assert (first, other) == ([size, 2 * size, 3 * size], [100 + size, 100 + 2 * size, 100 + 3 * size])
    assert lines == ["Each rank has its own state of 'data'. The run can only be resumed on 2 ranks."]
    assert run_ranks(stream, 2, str(tmp_path), wrapped)[1][0] == [100 + 4 * size, 100 + 5 * size, 100 + 6 * size]
    with pytest.raises(RankError, match="it cannot be restored on 1 ranks"):
        run_ranks(stream, 1, str(tmp_path), wrapped)
