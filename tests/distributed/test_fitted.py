"""What `fit()` prints trains on real ranks as it is: as one process does, and with the memory that it says."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.families import FAMILIES, make
from tests.distributed.measured import measure, optimizer_of

import mmfsdp
from mmfsdp.testing import run_ranks

FAMILY, RANKS, SAMPLES, STEPS = "llama", 2, 2, 2
CASE = FAMILIES[FAMILY]
CONFIG = {"precision": "fp32", "wrap": {"kind": "module_class", "classes": [*CASE.layer]}}
CHOICES: dict[str, list[Any]] = {
    "sharding": [{"strategy": "SHARD_GRAD_OP"}],
    "activation_checkpointing": [{"mode": "full"}],
    "accumulate": [1, 2],
}


def tokens() -> torch.Tensor:
    """A row for each sample of each rank."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return CASE.batch(RANKS * SAMPLES)


def losses(model: torch.nn.Module, parts: tuple[torch.Tensor, ...], *, is_sharded: bool) -> list[float]:
    """Train on micro-batches, and return the mean loss of each step."""
    optimizer = optimizer_of(model.parameters())
    found = []
    for _ in range(STEPS):
        total = 0.0
        for place, part in enumerate(parts):
            waits = is_sharded and place < len(parts) - 1
            with mmfsdp.no_sync(model) if waits else contextlib.nullcontext():
                loss = CASE.loss(model, part) / len(parts)
                loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found


def trained(rank: int, pasted: str, accumulate: int) -> tuple[list[float], int]:
    config = mmfsdp.ShardConfig.from_file(pasted)
    mine = tokens()[rank * SAMPLES : (rank + 1) * SAMPLES]
    found = losses(mmfsdp.shard(make(FAMILY), config), mine.chunk(accumulate), is_sharded=True)
    return found, measure(rank, FAMILY, config, SAMPLES // accumulate, accumulate)[0]


@pytest.mark.parametrize(("memory", "accumulate"), [("1GiB", 1), (1, 2)], ids=["fastest", "smallest"])
def test_what_is_printed_trains(memory: int | str, accumulate: int, tmp_path: Path) -> None:
    """The fastest settings, and the smallest ones, which are printed if nothing fits."""
    found = mmfsdp.fit(
        make(FAMILY), tokens()[:SAMPLES], memory=memory, ranks=RANKS, config=CONFIG, choices=CHOICES, count=1,
        device="cpu", loss=CASE.loss, optimizer=optimizer_of, max_norm=1.0,
    )  # fmt: skip
    option = found.options[0] if found.options else found.smallest
    assert option is not None
    assert option.accumulate == accumulate
    pasted = tmp_path / "fit.yaml"
    lines = str(found).splitlines()
    begin = lines.index(f"# {option}")
    pasted.write_text("\n".join(lines[begin : begin + 1 + len(option.yaml.splitlines())]))
    real = run_ranks(trained, RANKS, str(pasted), accumulate)
    alone = losses(make(FAMILY), tokens().chunk(RANKS * accumulate), is_sharded=False)
    assert [sum(values) / RANKS for values in zip(*(mine for mine, _ in real), strict=True)] == pytest.approx(alone)
    assert option.nbytes == pytest.approx(max(peak for _, peak in real), rel=0.05)
