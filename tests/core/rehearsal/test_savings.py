"""What `advise` says a change saves is the difference of two rehearsals of the whole model, to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mmfsdp
from mmfsdp.errors import ConfigError
from mmfsdp.rehearsal import Rehearsal, advise, report
from mmfsdp.rehearsal.fitting.changes import with_units
from mmfsdp.rehearsal.timing.step_time import human_seconds

WIDTH, WORDS = 256, 20_000
BLOCKS = {"kind": "module_class", "classes": "Block"}
CONFIG: dict[str, Any] = {"wrap": BLOCKS, "precision": "bf16", "activation_checkpointing": {"mode": "full"}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, depth: int = 8, fewest: int = 0) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.fewest = fewest

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        assert len(self.blocks) >= self.fewest
        return self.head(x[:, -1])


def on_meta(**settings: Any) -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        return Net(**settings), torch.empty(1, 4096, dtype=torch.int64)


@pytest.fixture(scope="module")
def advised() -> Rehearsal:
    return advise(CONFIG, *on_meta(), mesh=8)


@pytest.mark.exhaustive
def test_a_saving_is_the_difference_of_two_rehearsals(advised: Rehearsal) -> None:
    [saving] = advised.savings
    assert (saving.what, saving.source) == ("embed, head as units of their own", "rehearsed")
    changed = mmfsdp.rehearse({**CONFIG, **saving.settings}, *on_meta(), mesh=8)
    assert advised.peak.nbytes - saving.nbytes == changed.peak.nbytes


def test_it_is_printed_to_be_pasted(advised: Rehearsal, tmp_path: Path) -> None:
    text = str(advised)
    pasted = tmp_path / "changes.yaml"
    pasted.write_text(next(line for line in text.splitlines() if line.startswith("    wrap:")))
    assert mmfsdp.ShardConfig.from_file(pasted) == mmfsdp.ShardConfig(**advised.savings[0].settings)
    assert json.loads(json.dumps(advised.describe()))["savings"][0]["nbytes"] == advised.savings[0].nbytes
    page = report(advised)
    assert "What lowers the peak most" in page
    assert "embed, head as units of their own" in page


def test_a_fused_optimizer_follows_from_the_record() -> None:
    model, batch = on_meta(depth=2)
    config = {"sharding": "NO_SHARD", "precision": "bf16"}
    step = advise(config, model, batch[:, :1], mesh=1)
    [saving] = [saving for saving in step.savings if saving.source == "derived"]
    assert step.peak.phase == "optimizer"
    assert "fused=True" in saving.write

    def fused(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, fused=True)

    true = mmfsdp.rehearse(config, model, batch[:, :1], optimizer=fused)
    assert step.peak.nbytes - saving.nbytes == pytest.approx(true.peak.nbytes, abs=64)  # it counts steps on the device


@pytest.mark.exhaustive
def test_shards_in_cpu_memory_are_a_saving_if_they_are_most_of_the_peak() -> None:
    model, batch = on_meta(depth=2)
    config = {"wrap": BLOCKS, "precision": "bf16"}
    step = advise(config, model, batch[:, :1], mesh=2)
    saving = step.savings[0]
    assert saving.settings == {"cpu_offload": {"enabled": True}}
    true = mmfsdp.rehearse({**config, **saving.settings}, model, batch[:, :1], mesh=2)
    assert step.peak.nbytes - saving.nbytes == true.peak.nbytes
    before, after = (human_seconds(found.time("h100").seconds) for found in (step, true))
    assert saving.what.endswith(f"with steps of {after} in place of {before} on h100")
    for shards in (True, False):  # half of the parameters are kept whole, or activations are what is held
        settings = {**config, "sharding": {"strategy": "HYBRID_SHARD", "shard_size": 2}} if shards else config
        found = advise(settings, model, batch[:, :1] if shards else batch, mesh=4, count=4).savings
        assert not any("cpu_offload" in saving.settings for saving in found)


@pytest.mark.exhaustive
def test_gradients_may_be_reduced_with_each_micro_batch() -> None:
    model, batch = on_meta(depth=4)
    config = {"wrap": BLOCKS, "precision": "bf16"}
    step = advise(config, model, batch[:, :1], mesh=8, accumulate=2)
    [saving] = [saving for saving in step.savings if "reduced" in saving.what]
    assert saving.what == "gradients reduced with each of 2 micro-batches, which sends them as often"
    assert saving.write.startswith("no mmfsdp.no_sync() in the training loop")
    true = mmfsdp.rehearse(config, model, batch[:, :1], mesh=8, accumulate=2, reduce_each=True)
    assert step.peak.nbytes - saving.nbytes == true.peak.nbytes
    whole = advise(config, model, batch[:, :1], mesh=1, accumulate=2)  # one rank has whole gradients in any case
    assert not any("reduced" in saving.what for saving in whole.savings)


@pytest.mark.exhaustive
def test_short_copies_that_fail_are_not_used() -> None:
    model, batch = on_meta(fewest=8)
    config = {"wrap": BLOCKS, "precision": "bf16", "activation_checkpointing": {"mode": "every_n", "n": 2}}
    step = advise(config, model, batch, mesh=8)
    assert (
        step.peak.nbytes - step.savings[0].nbytes
        == mmfsdp.rehearse({**config, **step.savings[0].settings}, model, batch, mesh=8).peak.nbytes
    )


def test_wrong_questions() -> None:
    model, batch = on_meta(depth=1)
    with pytest.raises(ConfigError, match="Give the config that the plan was made of"):
        advise(mmfsdp.plan(model, None, 1), model, batch)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="count is a number of changes"):
        advise(None, model, batch, count=0)


@pytest.mark.parametrize("stated", ["block.*", ["block.*"]])
def test_further_units_join_those_of_the_same_policy(stated: Any) -> None:
    """`fit()` adds units up to three times, and prints one policy."""
    given = {"wrap": {"kind": "any_of", "policies": ["auto", {"kind": "module_name", "patterns": stated}]}}
    wrap = with_units(given, ["block.*", "head"])
    assert wrap == {"kind": "any_of", "policies": ["auto", {"kind": "module_name", "patterns": ["block.*", "head"]}]}
    assert with_units({}, ["head"])["policies"] == ["auto", {"kind": "module_name", "patterns": ["head"]}]
    assert with_units({"wrap": wrap}, ["neck"])["policies"][0] == "auto"
