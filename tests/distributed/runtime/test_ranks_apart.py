"""Ranks that do different things, or die: the others are told what they waited for, and the usual causes."""

from __future__ import annotations

import multiprocessing
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mmfsdp
from mmfsdp.errors import LostRankError
from mmfsdp.testing import RankError, run_ranks

SECONDS = 3.0
X = torch.ones(2, 6)
WRAP = {"kind": "module_name", "patterns": ["parts.*"]}


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in "abc")
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, *, skip: bool = False, fail: bool = False) -> torch.Tensor:
        x = self.body(x)
        for place, part in enumerate(self.parts):
            if place == 1 and fail:
                raise ValueError("a bad sample")
            if place != 1 or not skip:
                x = part(x)
        return self.head(x)


def apart(rank: int, case: str, config: dict[str, Any]) -> str:
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    model = mmfsdp.shard(Chain(), {"wrap": WRAP, **config}, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).sum().backward()
    optimizer.step()
    try:
        if case == "batches":  # 7 samples on 2 ranks, round_up=False
            for batch in torch.ones(7, 6)[rank::2]:
                model(batch[None]).sum().backward()
        elif case == "evaluation":
            with torch.no_grad():
                for batch in torch.ones(7, 6)[rank::2]:
                    model(batch[None])
        elif case == "skip":
            model(X, skip=rank == 1).sum().backward()
        elif case == "error":
            model(X, fail=rank == 1).sum().backward()
        else:
            loss = model(X).sum()
            if case == "backward" and rank == 0:
                loss.backward()
            elif case == "clip":
                loss.backward()
                if rank == 0:
                    mmfsdp.clip_grad_norm_(model, 1.0)
    except LostRankError as error:
        return error.message if error.context["rank"] == rank else "another rank"
    except ValueError as error:
        return str(error)
    return ""


def run_apart(case: str, config: dict[str, Any]) -> list[str]:
    """Call `apart` on two ranks, a second time if gloo does not end it.

    On a busy machine a rank was seen to wait four minutes for an all-reduce of the group whose timeout is 3 seconds.
    """
    try:
        return run_ranks(apart, 2, case, config, timeout=120)
    except RankError as error:
        if "did not end" not in str(error):
            raise
        return run_ranks(apart, 2, case, config, timeout=120)


@pytest.mark.sample("fsdp2-clip", "fsdp1-skip", "fsdp2-backward", "fsdp1-evaluation")
@pytest.mark.parametrize("case", ["batches", "evaluation", "skip", "error", "backward", "clip"])
@pytest.mark.parametrize("config", [{}, {"engine": "fsdp1"}], ids=["fsdp2", "fsdp1"])
def test_a_rank_that_waits_in_vain_is_told_why(config: dict[str, Any], case: str) -> None:
    """Fails without `Waiting`: gloo says "Timed out waiting 3000ms for send operation to complete"."""
    if case == "skip" and config:
        pytest.skip("what FSDP1 reduces in backward cannot be named: torch has no place for it")
    if case == "evaluation":
        config = {**config, "sharding": "FULL_SHARD"}
    first, second = run_apart(case, config)
    assert first.startswith("The other ranks did not take part while this rank was ")
    assert "different numbers of batches" in first
    assert "computing the norm" in first if case == "clip" else "the shard unit" in first or "a shard unit" in first
    assert second == {"error": "a bad sample"}.get(case, first and second)


def survivor(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    model = mmfsdp.shard(Chain(), {"wrap": WRAP})
    model(X).sum().backward()
    if rank == 1:
        os._exit(1)
    try:
        for _ in range(2):
            model(X).sum().backward()
    except LostRankError as error:
        Path(folder, "message").write_text(error.message)
    os._exit(0)


def test_a_rank_that_died(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")  # that of run_ranks, with what it has imported
    processes = [context.Process(target=survivor, args=(rank, str(tmp_path)), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    message = (tmp_path / "message").read_text()
    assert "another rank failed or was killed" in message
