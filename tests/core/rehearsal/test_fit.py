"""Searches for settings that fit: short copies tell the truth, and what is found is what trying everything finds."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mmfsdp
from mmfsdp.errors import ConfigError, RehearsalError
from mmfsdp.frontends import TrainingStep
from mmfsdp.rehearsal import Fit
from mmfsdp.rehearsal.fitting.bounds import Known, resharded_seconds
from mmfsdp.rehearsal.fitting.candidates import Choice, choices_for
from mmfsdp.rehearsal.fitting.dividing import all_micro_batches, micro_batch, samples_of
from mmfsdp.rehearsal.fitting.fastest import REFINED, refined
from mmfsdp.rehearsal.fitting.probing import Prober
from mmfsdp.rehearsal.fitting.rates import rates_of
from mmfsdp.rehearsal.fitting.searching import search
from mmfsdp.rehearsal.rehearsing import rehearse_once
from mmfsdp.rehearsal.running.fake_run import Target
from mmfsdp.rehearsal.timing.device_names import device_of

WIDTH, ROWS = 2048, 8192
RANKS = 4
FULL = {"mode": "full"}


class Block(nn.Module):
    """A layer whose even copies, told by their place, keep more than the odd ones."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.place = place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.gelu(self.up(x))
        return x + self.down(torch.tanh(y) if self.place % 2 == 0 else y)


class Net(nn.Module):
    def __init__(self, depth: int = 8, needs: int = 0) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(3000, WIDTH), nn.Linear(WIDTH, 3000, bias=False)
        self.blocks = nn.ModuleList(Block(place) for place in range(depth))
        self.needs = needs

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        if len(self.blocks) < self.needs:  # what a model with a fixed number of layers does
            x = torch.cat([x] * 9, -1)[..., :WIDTH]
        return self.head(x)


def on_meta(**settings: Any) -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        return Net(**settings), torch.empty(4, ROWS // 4, dtype=torch.int64)


def prober(model: nn.Module, batch: torch.Tensor, ranks: int = RANKS) -> Prober:
    return Prober(model, TrainingStep(batch, max_norm=1.0), ranks, device_of("h100"))


CHOICES = [
    Choice({"precision": "bf16", "sharding": sharding, **more}, 1)
    for sharding, more in (
        ({"strategy": "FULL_SHARD"}, {}),
        ({"strategy": "FULL_SHARD"}, {"activation_checkpointing": FULL}),
        ({"strategy": "_HYBRID_SHARD_ZERO2", "shard_size": 2}, {}),
        ({"strategy": "NO_SHARD"}, {"activation_checkpointing": FULL}),
    )
]


@pytest.fixture(scope="module")
def whole() -> Prober:
    """Rehearses the whole model only, and remembers."""
    tried = prober(*on_meta())
    tried.distrust()
    return tried


@pytest.mark.exhaustive
def test_short_copies_tell_the_peak_and_the_time_of_the_whole_model(whole: Prober) -> None:
    short = prober(*on_meta())
    assert [(stack.fqn, stack.depth) for stack in short.stacks] == [("blocks", 8)]
    for choice in (CHOICES[0], CHOICES[3]):
        told, true = short.estimate(choice), whole.estimate(choice)
        assert told.peak.nbytes == true.peak.nbytes == true.steps[0][1].peak.nbytes
        assert told.seconds == pytest.approx(true.seconds, rel=1e-3)


@pytest.mark.parametrize("known", ["FULL_SHARD", "HYBRID_SHARD"])
def test_the_time_on_another_mesh_follows(known: str) -> None:
    """Of a step so small that every message and every copy of shards counts."""
    model, batch = on_meta(depth=1)
    tried = prober(model, batch[:1, :64])
    wrap = {"kind": "module_class", "classes": "Block"}
    names = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
    choices = {
        name: Choice(
            {"wrap": wrap, "sharding": {"strategy": name} | ({"shard_size": 2} if "HYBRID" in name else {})}, 1
        )
        for name in names
    }
    step, seconds = tried.estimate(choices[known]).steps[0][1], set()
    for choice in choices.values():
        derived = resharded_seconds(step, tried.plan(choice), tried.device)
        assert derived == pytest.approx(tried.estimate(choice).seconds, rel=1e-3)
        seconds.add(round(derived, 6))
    assert len(seconds) == len(names)


@pytest.mark.parametrize("place", [1, 2])
def test_what_is_found_is_what_trying_everything_finds(whole: Prober, place: int) -> None:
    everything = {choice.key: whole.estimate(choice) for choice in CHOICES}
    memory = sorted(estimate.nbytes for estimate in everything.values())[place]
    found = search(whole, CHOICES, memory, 2)
    best = min(estimate.seconds for estimate in everything.values() if estimate.nbytes <= memory)
    assert best <= found.fits[0].estimate.seconds <= 1.03 * best
    assert all(everything[item.choice.key].nbytes <= memory for item in found.fits)
    faster = {key: e for key, e in everything.items() if e.nbytes > memory and e.seconds < best}
    assert (found.faster.choice.key if found.faster else None) == max(
        faster, key=lambda key: faster[key].seconds, default=None
    )


def learning(tried: Prober, every: Sequence[Choice]) -> Iterator[tuple[Known, Choice, Choice]]:
    """Yield what is known from each choice alone, and with those before, with that choice and every other one."""
    told = Known(tried.device)
    for known in every:
        for bounds in (Known(tried.device), told):
            bounds.learn(known, tried.plan(known), tried.estimate(known))
            for choice in every:
                yield bounds, known, choice


@pytest.mark.exhaustive
def test_bounds_are_bounds_and_a_search_with_micro_batches_finds_what_trying_everything_finds() -> None:
    model, batch = on_meta(depth=2)
    tried = prober(model, batch)
    shardings = [{"strategy": "FULL_SHARD"}, {"strategy": "HYBRID_SHARD", "shard_size": 2}]
    every = [
        Choice({"precision": "bf16", "sharding": sharding, **more}, accumulate)
        for sharding in shardings
        for more, accumulate in (({}, 1), ({}, 2), ({"activation_checkpointing": FULL}, 4))
    ]
    every.append(replace(every[1], reduces=True))
    true = {choice.key: tried.estimate(choice) for choice in every}
    for bounds, known, choice in learning(tried, every):
        assert bounds.memory(choice, tried.plan(choice)) <= true[choice.key].nbytes, (known, choice)
    assert sum(estimate.carried > 0 for estimate in true.values()) == 4  # those with micro-batches whose gradients wait
    waiting, reduced = true[every[1].key], true[every[-1].key]
    assert waiting.nbytes > reduced.nbytes
    assert waiting.seconds < reduced.seconds
    for memory in sorted(estimate.nbytes for estimate in true.values())[1:-1:3]:
        found = search(tried, every, memory, 1)
        best = min(estimate.seconds for estimate in true.values() if estimate.nbytes <= memory)
        assert best <= found.fits[0].estimate.seconds <= 1.03 * best
        assert found.fits[0].estimate.nbytes <= memory


@pytest.mark.exhaustive
@pytest.mark.parametrize(("rows", "ranks"), [(ROWS, RANKS), (64, RANKS), (ROWS, 1)])
def test_bounds_of_time_are_bounds(rows: int, ranks: int) -> None:
    """Of layers that compute little again, because their last product is not, beside a head that never does.

    With few rows the CPU takes longer than the device, and on a single rank nothing slows the device down.
    """
    model, _ = on_meta(depth=5)
    tried = prober(model, torch.empty(4, rows // 4, dtype=torch.int64, device="meta"), ranks)
    modes: list[dict[str, Any]] = [{"mode": "ops"}, {"mode": "every_n", "n": 2}, FULL]
    every = [
        *(
            Choice({"precision": "bf16", "sharding": {"strategy": strategy}}, accumulate)
            for strategy, accumulate in (("FULL_SHARD", 1), ("SHARD_GRAD_OP", 1), ("FULL_SHARD", 2), ("FULL_SHARD", 4))
        ),
        *(Choice({"precision": "bf16", "activation_checkpointing": mode}, 1) for mode in modes),
        Choice({"precision": "bf16", "activation_checkpointing": FULL}, 4),
        Choice({"precision": "fp32"}, 1),
        Choice({"precision": "fp32", "activation_checkpointing": FULL}, 2),
    ]
    near = 0
    for bounds, known, choice in learning(tried, every):
        bound, seconds = bounds.seconds(choice, tried.exact_plan(choice)), tried.estimate(choice).seconds
        assert bound <= seconds * 1.001, (known, choice)
        near += bound > 0.8 * seconds
    assert near > len(every) ** 2 / (2 if ranks > 1 else 10)  # one rank's optimizer takes as long as its layers


@pytest.mark.exhaustive
def test_one_step_tells_what_the_second_of_two_tells() -> None:
    """A parameter without a gradient has no state, which one step alone cannot know."""
    model, batch = on_meta(depth=1)
    idle = copy.deepcopy(model)
    idle.register_parameter("idle", nn.Parameter(torch.empty(1000, 1000, device="meta")))
    for given, accumulate in ((model, 2), (idle, 1)):
        plan = mmfsdp.plan(given, {"precision": "bf16"}, mesh=RANKS)
        options = {"optimizer": "adamw", "max_norm": 1.0, "accumulate": accumulate}
        two = mmfsdp.rehearse(plan, given, batch, **options, device_type="cuda")
        one = rehearse_once(given, TrainingStep(batch, **options), Target(plan, device_type="cuda"))
        assert (one.peak.by_kind, one.device_bytes()) == (two.peak.by_kind, two.device_bytes())
        assert one.time("h100").seconds == two.time("h100").seconds


def test_what_is_as_good_is_found_with_the_simplest() -> None:
    """The text of the third choice is longer, and its step is that of the first."""
    model, batch = on_meta(depth=1)
    same = {"strategy": "FULL_SHARD", "reshard_after_forward": None}
    simple, divided = Choice({"sharding": "FULL_SHARD", "precision": "bf16"}, 1), Choice({"precision": "bf16"}, 4)
    every = [Choice({"precision": "bf16", "sharding": same}, 1), divided, simple]
    found = search(prober(model, batch), every, 80 << 30, 2)
    assert [(item.choice, item.as_good) for item in found.fits] == [(simple, (every[0],)), (divided, ())]


def test_if_nothing_fits_the_smallest_is_found(whole: Prober) -> None:
    least = min(whole.estimate(choice).nbytes for choice in CHOICES)
    found = search(whole, CHOICES, least - 1, 2)
    assert not found.fits
    assert found.smallest is not None
    assert found.smallest.estimate.nbytes == least


def test_if_nothing_fits_shards_are_offloaded() -> None:
    model, batch = on_meta(depth=2)
    config = {"precision": "bf16", "sharding": {"strategy": "FULL_SHARD"}, "wrap": "auto", "prefetch": {}}
    wanted = {"activation_checkpointing": [FULL], "accumulate": [1]}
    found = mmfsdp.fit(model, batch, memory=3_042_000_000, margin=0, ranks=RANKS, config=config, choices=wanted)
    (option,) = found.options
    assert option.settings["cpu_offload"] == {"enabled": True}
    assert option.nbytes <= found.memory < found.faster.nbytes  # type: ignore[union-attr]
    assert option.rehearsal.cpu_bytes > option.rehearsal.plan.param_bytes()
    nothing = mmfsdp.fit(model, batch, memory="1GiB", ranks=RANKS, config=config, choices=wanted, count=1)
    assert nothing.smallest.settings == option.settings  # type: ignore[union-attr]
    assert (found.considered, nothing.considered) == (2, 2)


def test_finer_units_need_less() -> None:
    model, batch = on_meta(depth=2)
    config = {**CHOICES[1].settings, "wrap": {"kind": "module_class", "classes": "Block"}}
    step = mmfsdp.rehearse(config, model, batch[:1, :512], mesh=RANKS)
    finer = next(refined(Choice(config, 1), step, REFINED))
    assert "blocks.*.up" in finer.settings["wrap"]["policies"][-1]["patterns"]
    again = mmfsdp.rehearse(finer.settings, model, batch[:1, :512], mesh=RANKS)
    assert again.device_bytes()[1] < step.device_bytes()[1]
    assert not [*refined(Choice(config, 1), step, REFINED, step.peak.nbytes)]
    assert not [*refined(Choice(config, 1), step, ())]


def test_micro_batches_after_the_second_are_as_the_second() -> None:
    model, batch = on_meta(depth=2)
    tried = prober(model, batch)
    choice = Choice({"precision": "bf16"}, 4)
    step = mmfsdp.rehearse(choice.settings, model, batch[:1], mesh=RANKS, max_norm=1.0, accumulate=4)
    estimate = tried.estimate(choice)
    assert estimate.peak.nbytes == step.peak.nbytes
    assert estimate.seconds == pytest.approx(step.time("h100").seconds, rel=0.05)


def test_the_user_says_which_dimension_counts_samples() -> None:
    tokens_first = {"x": torch.zeros(6, 4, 3), "mask": torch.zeros(6, 4), "scale": torch.zeros(2)}
    half = micro_batch(tokens_first, 2, 1)
    assert [*map(tuple, (half["x"].shape, half["mask"].shape, half["scale"].shape))] == [(6, 2, 3), (6, 2), (2,)]
    assert (samples_of(tokens_first, 1), samples_of(tokens_first, 0)) == (4, 1)
    model, batch = on_meta(depth=1)
    for given in (3, -1):
        with pytest.raises(ConfigError, match=f"got {given}; their shapes are \\("):
            mmfsdp.fit(model, batch, ranks=RANKS, batch_dim=given)


def test_lists_with_an_entry_for_each_sample_are_divided_as_tensors_are() -> None:
    sample = object()
    apart = {"inputs": [torch.zeros(3, 8, 8)] * 4, "data_samples": [sample] * 4}  # as MMEngine's pseudo_collate gives
    stacked = {"inputs": torch.zeros(4, 3, 8, 8), "data_samples": [sample] * 4}  # as its default_collate does
    for batch in (apart, stacked):
        assert samples_of(batch) == 4
        for count, divided in ((2, micro_batch(batch, 2)), (8, all_micro_batches(batch, 2))):
            assert (samples_of(divided), len(divided["inputs"]), len(divided["data_samples"])) == (count,) * 3
    # Lists of tensors have samples in the tensors; a list of another length is no list of samples.
    assert samples_of({"views": [torch.zeros(8, 4), torch.zeros(8, 2)]}) == 8
    assert samples_of({"x": torch.zeros(8, 4), "wanted": ["depth", "normals"]}) == 8
    assert samples_of([torch.zeros(8, 4), "mode"]) == 8


def test_a_batch_is_stated_as_for_a_rehearsal() -> None:
    model, batch = on_meta(depth=2)
    wanted = {
        "config": {"precision": "bf16", "sharding": "FULL_SHARD"},
        "choices": {"activation_checkpointing": [None]},
    }
    given = {**wanted, "memory": "60GiB", "ranks": RANKS, "price": 2.0}
    whole, divided = mmfsdp.fit(model, batch, **given), mmfsdp.fit(model, batch[:2], accumulate=2, **given)
    assert divided.describe() == whole.describe()
    assert {option.accumulate * option.samples for option in divided.options} == {4}
    mixed = {"ids": batch, "other": torch.empty(3, device="meta")}
    with pytest.raises(ConfigError, match="share no size in dimension 0"):
        mmfsdp.fit(model, mixed, accumulate=2, ranks=RANKS)


@pytest.fixture(scope="module")
def fitted() -> Fit:
    model, batch = on_meta()
    wanted = {"activation_checkpointing": [None, FULL], "accumulate": [1]}
    config = {"precision": "bf16", "sharding": {"strategy": "FULL_SHARD"}}
    found = {"memory": 4900 << 20, "margin": 0.25, "price": 3.6}
    return mmfsdp.fit(model, batch, **found, ranks=RANKS, config=config, choices=wanted, count=1)


def test_what_is_printed_can_be_pasted(fitted: Fit, tmp_path: Path) -> None:
    model, batch = on_meta()
    text = str(fitted)
    option = fitted.options[0]
    lines = text.splitlines()
    begin = lines.index(f"# {option}")
    pasted = tmp_path / "fit.yaml"
    pasted.write_text("\n".join(lines[begin : lines.index("", begin)]))
    config = mmfsdp.ShardConfig.from_file(pasted)
    assert config == mmfsdp.ShardConfig.from_dict(option.settings)
    part = batch[: option.samples]
    again = mmfsdp.rehearse(config, model, part, mesh=RANKS, accumulate=option.accumulate)
    assert again.peak == option.rehearsal.peak
    assert fitted.faster is not None
    assert fitted.faster.seconds < option.seconds
    assert option.nbytes <= fitted.room == 3675 << 20 < fitted.faster.nbytes
    assert "1.25 GiB of activations" in text
    assert "of activations of blocks.{0..7}.up" in fitted.faster.reason()
    assert "of the CUDA context and NCCL" in fitted.faster.reason()
    assert fitted.faster.reason() in text.replace("\n", " ")
    assert json.loads(json.dumps(fitted.describe()))["options"][0]["settings"] == option.settings


def test_what_a_job_trains_and_costs(fitted: Fit) -> None:
    """Of 4 ranks with 4 samples of 2,048 tokens each; a rank's hour costs 3.6."""
    option = fitted.options[0]
    rates = option.rates
    assert option.settings["activation_checkpointing"] == FULL
    assert rates.samples_per_second == pytest.approx(RANKS * 4 / option.seconds)
    assert rates.tokens_per_second == pytest.approx(ROWS / option.seconds)
    assert rates.price_per_billion_tokens == pytest.approx(3.6 / 3600 * option.seconds / ROWS * 1e9)
    products = 8 * 2 * 2 * WIDTH * 2 * WIDTH + 2 * WIDTH * 3000  # forward, for a token
    peak = fitted.device.peak("bfloat16")
    assert rates.utilization == pytest.approx(3 * products * ROWS / peak / option.seconds, rel=1e-3)
    again = 8 * 2 * WIDTH * 2 * WIDTH  # the last product of a block is not needed again
    share = (3 * products + again) * ROWS / peak / option.rehearsal.time().seconds
    assert option.rehearsal.time().utilization == pytest.approx(share, rel=1e-3)
    assert f"# {rates}\n" in str(fitted)
    assert "of the peak (MFU)" in str(rates)
    assert "per billion tokens" in str(rates)
    images = rates_of(0.5, 0.1, 8, None, 2, 3.6)
    assert (
        str(images) == "32 samples per second in all, 20.0% of the peak (MFU), 7.20 per hour, 62.50 per million samples"
    )


def test_a_twentieth_of_what_torch_reports_of_a_gpu_stays_free() -> None:
    model, batch = on_meta(depth=1)
    choices = {"accumulate": [1], "activation_checkpointing": [None]}
    found = mmfsdp.fit(model, batch, ranks=2, config={**CHOICES[0].settings, "wrap": "auto"}, choices=choices)
    assert (found.margin, found.room) == (0.03, round(0.97 * int(79.1 * (1 << 30))))  # an H100's


def test_what_the_config_states_stays() -> None:
    given = {"precision": "fp32", "sharding": {"strategy": "HYBRID_SHARD"}, "wrap": {"kind": "none"}}
    found = [*choices_for(given, 16, 2, outside=["head"])]
    assert {json.dumps(c.settings["wrap"]) for c in found} == {'{"kind": "none"}'}
    assert {c.settings["precision"] for c in found} == {"fp32"}
    assert [c.settings["sharding"]["shard_size"] for c in found[::12]] == [2, 4, 8]
    assert {(c.accumulate, c.reduces) for c in found} == {(1, False), (2, False), (2, True)}
    every = [*choices_for({}, 6, 6, outside=["head"])]
    assert {json.dumps(c.settings.get("wrap")) for c in every if "NO_SHARD" not in str(c)} == {
        "null",
        '{"kind": "any_of", "policies": ["auto", {"kind": "module_name", "patterns": ["head"]}]}',
    }
    assert not any("wrap" in c.settings for c in every if "NO_SHARD" in str(c))  # nothing is gathered
    assert {c.settings["sharding"].get("shard_size") for c in every} == {None, 2, 3}
    assert {c.accumulate for c in every} == {1, 2, 6}
    assert not any("wrap" in c.settings for c in choices_for({}, 1, 1, outside=["head"]))


@pytest.mark.exhaustive
def test_a_model_that_depends_on_its_number_of_layers_is_rehearsed_whole() -> None:
    model, batch = on_meta(needs=8)
    choices = {"activation_checkpointing": [None], "precision": ["bf16"], "accumulate": [1]}
    config = {"sharding": {"strategy": "FULL_SHARD"}, "wrap": "auto"}
    found = mmfsdp.fit(model, batch, ranks=2, config=config, choices=choices)
    assert len(found.options[0].rehearsal.plan.units) > 8
    assert found.rehearsed == 3  # two short copies, and the model


def test_wrong_questions() -> None:
    model, batch = on_meta(depth=2)
    with pytest.raises(ConfigError, match="'speed' is not searched"):
        mmfsdp.fit(model, batch, choices={"speed": [1]})
    with pytest.raises(ConfigError, match="states precision already"):
        mmfsdp.fit(model, batch, config={"precision": "bf16"}, choices={"precision": ["fp32"]})
    with pytest.raises(ConfigError, match="has no unit"):
        mmfsdp.fit(model, batch, memory="80")
    with pytest.raises(ConfigError, match="margin is a share of the memory, from 0 up to 1, got 1"):
        mmfsdp.fit(model, batch, margin=1)
    with pytest.raises(ConfigError, match="price is what a device costs for an hour, more than 0, got 0"):
        mmfsdp.fit(model, batch, price=0)
    with pytest.raises(ConfigError, match="ranks is a number"):
        mmfsdp.fit(model, batch, ranks=0)
    with pytest.raises(ConfigError, match="cannot be divided into 3"):
        mmfsdp.fit(model, batch, choices={"accumulate": [3]})
    with pytest.raises(ConfigError, match="precision is a list of the values to try, at least one, got 'bf16'"):
        mmfsdp.fit(model, batch, choices={"precision": "bf16"})
    with pytest.raises(ConfigError, match="numbers of micro-batches, each at least 1, got 0"):
        mmfsdp.fit(model, batch, choices={"accumulate": [0]})
    with pytest.raises(ConfigError, match="HYBRID_SHARD needs shard groups that divide 7 ranks"):
        mmfsdp.fit(model, batch, ranks=7, config={"sharding": "HYBRID_SHARD"})
    with pytest.raises(RehearsalError, match="embed"):
        mmfsdp.fit(model, [None], ranks=2)
