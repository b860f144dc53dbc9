"""What `fit()` prints trains on real ranks as it is: as one process does, and with the memory that it says."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.families import FAMILIES, make
from tests.distributed.measured import measure, optimizer_of

import mmfsdp
from mmfsdp.testing import run_ranks

STEPS = 3


@dataclass(frozen=True)
class Search:
    """A search, and what it must find: the number of micro-batches, and settings by section."""

    family: str
    ranks: int
    samples: int
    memory: int | str
    choices: dict[str, list[Any]]
    accumulate: int
    found: dict[str, Any]
    device: str = "cpu"
    reduces: bool = False

    @property
    def config(self) -> dict[str, Any]:
        return {"precision": "fp32", "wrap": {"kind": "module_class", "classes": [*FAMILIES[self.family].layer]}}

    def batch(self, begin: int, end: int) -> Any:
        """Samples of the batch of all ranks."""
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return FAMILIES[self.family].batch(self.ranks * self.samples)[begin:end]


ZERO2 = {"sharding": [{"strategy": "SHARD_GRAD_OP"}], "activation_checkpointing": [{"mode": "full"}]}
SEARCHES = {
    "fastest": Search("llama", 2, 2, "1GiB", {**ZERO2, "accumulate": [1, 2]}, 1, {}),
    # What needs least memory is printed if nothing fits.
    "smallest": Search("llama", 2, 2, 1, {**ZERO2, "accumulate": [1, 2]}, 2, {}, reduces=True),
    "hybrid": Search(
        "llama",
        4,
        2,
        "1GiB",
        {"sharding": [{"strategy": "HYBRID_SHARD", "shard_size": 2}], "activation_checkpointing": [None]},
        1,
        {"sharding": {"strategy": "HYBRID_SHARD", "shard_size": 2}},
    ),
    "offload": Search(
        "llama",
        2,
        2,
        1,
        {"sharding": [{"strategy": "FULL_SHARD"}], "activation_checkpointing": [None], "accumulate": [1]},
        1,
        {"cpu_offload": {"enabled": True}},
        device="h100",
    ),
}


def losses(search: Search, model: torch.nn.Module, parts: list[Any], *, is_sharded: bool) -> list[float]:
    """Train on micro-batches, and return the mean loss of each step."""
    optimizer = optimizer_of(model.parameters())
    found = []
    for _ in range(STEPS):
        total = 0.0
        for place, part in enumerate(parts):
            waits = is_sharded and place < len(parts) - 1 and not search.reduces
            with mmfsdp.no_sync(model) if waits else contextlib.nullcontext():
                loss = FAMILIES[search.family].loss(model, part) / len(parts)
                loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found


def trained(rank: int, name: str, pasted: str) -> tuple[list[float], int]:
    search = SEARCHES[name]
    config = mmfsdp.ShardConfig.from_file(pasted)
    mine = search.batch(rank * search.samples, (rank + 1) * search.samples)
    model = mmfsdp.shard(make(search.family), config)
    found = losses(search, model, [*mine.chunk(search.accumulate)], is_sharded=True)
    size = search.samples // search.accumulate
    return found, measure(rank, search.family, config, size, search.accumulate, reduces=search.reduces)[0]


@pytest.mark.sample("offload")
@pytest.mark.parametrize("name", SEARCHES)
def test_what_is_printed_trains(name: str, tmp_path: Path) -> None:
    search = SEARCHES[name]
    found = mmfsdp.fit(
        make(search.family), search.batch(0, search.samples), memory=search.memory, ranks=search.ranks,
        config=search.config, choices=search.choices, count=1, device=search.device,
        loss=FAMILIES[search.family].loss, optimizer=optimizer_of, max_norm=1.0,
    )  # fmt: skip
    option = found.options[0] if found.options else found.smallest
    assert option is not None
    assert (option.accumulate, option.reduces) == (search.accumulate, search.reduces)
    assert search.found.items() <= option.settings.items()
    pasted = tmp_path / "fit.yaml"
    lines = str(found).splitlines()
    begin = lines.index(f"# {option}")
    pasted.write_text("\n".join(lines[begin : begin + 2 + len(option.yaml.splitlines())]))
    real = run_ranks(trained, search.ranks, name, str(pasted))
    parts = search.batch(0, search.ranks * search.samples).chunk(search.ranks * search.accumulate)
    alone = losses(search, make(search.family), [*parts], is_sharded=False)
    mean = [sum(values) / search.ranks for values in zip(*(mine for mine, _ in real), strict=True)]
    assert mean == pytest.approx(alone, rel=1e-5)
    if search.device == "cpu":
        assert option.nbytes == pytest.approx(max(peak for _, peak in real), rel=0.05)
