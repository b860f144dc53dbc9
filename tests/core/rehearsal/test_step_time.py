"""The time of a step: FLOPs against torch's counter, streams and collectives worked out by hand."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import mmfsdp
from mmfsdp.basics import human_bytes
from mmfsdp.errors import ConfigError, ShardStateError
from mmfsdp.rehearsal import (
    Collective,
    Device,
    FirstSteps,
    Link,
    Links,
    Operator,
    Range,
    Rehearsal,
    calibrate,
    devices,
    measure,
    measure_links,
    write_device,
)
from mmfsdp.rehearsal.timing.device_names import device_of
from mmfsdp.rehearsal.timing.links import collective_seconds
from mmfsdp.rehearsal.timing.roofline import operator_seconds
from mmfsdp.rehearsal.timing.step_time import human_seconds
from mmfsdp.rehearsal.timing.streams import Work, replay
from mmfsdp.testing import single_rank

ROWS = 2 * 16
TOKENS = torch.zeros(2, 16, dtype=torch.long)


class Block(nn.Module):
    """Causal attention of two heads, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.mix = nn.Linear(8, 24), nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.mix(found.transpose(1, 2).flatten(2).transpose(1, 2)).transpose(1, 2)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(50, 8), nn.ModuleList([Block(), Block()]), nn.Linear(8, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def rehearse(engine: str = "fsdp2", **settings: Any) -> Rehearsal:
    config = {"engine": engine, "wrap": {"kind": "module_class", "classes": "Block"}}
    return mmfsdp.rehearse(config, Words(), TOKENS, **{"mesh": 16, "max_norm": 1.0, **settings})


@pytest.fixture(scope="module")
def step() -> Rehearsal:
    return rehearse()


def test_flops_are_those_that_torch_counts(step: Rehearsal) -> None:
    with FlopCounterMode(display=False) as counter:
        Words()(TOKENS).mean().backward()
    wanted = {str(operator): count for operator, count in counter.get_flop_counts()["Global"].items()}
    mine: dict[str, int] = {}
    for item in step.operators:
        if item.flops and "attention" not in item.name:  # torch counts that of the CPU from 2.15 on, and no mask
            name = item.name.replace("::", ".")
            mine[name] = mine.get(name, 0) + item.flops
    assert mine == {name: count for name, count in wanted.items() if "attention" not in name}
    assert {*mine} == {"aten.addmm", "aten.mm", "aten.convolution", "aten.convolution_backward"}


def test_causal_attention_counts_what_is_not_masked(step: Rehearsal) -> None:
    forward = [item for item in step.operators if "attention" in item.name and item.phase == "forward"]
    # Two products of 16 x 16 x 4 for each of 2 samples and 2 heads, of which half is needed.
    assert [item.flops for item in forward] == [2 * 2 * 2 * 2 * 16 * 16 * 4 // 2] * 2
    assert [item.unit for item in forward] == ["layers.0", "layers.1"]


def test_operators_read_and_write_bytes(step: Rehearsal) -> None:
    product = next(item for item in step.operators if item.name == "aten::addmm")
    assert product.shapes == ((24,), (ROWS, 8), (8, 24))
    assert product.nbytes == 4 * (24 + ROWS * 8 + 8 * 24 + ROWS * 24)
    embedding = next(item for item in step.operators if item.name == "aten::embedding")
    assert embedding.nbytes == 4 * 2 * ROWS * 8 + 8 * ROWS  # the rows that it looks up, not the whole table
    assert all(not item.nbytes for item in step.operators if item.name in ("aten::view", "aten::t", "aten::empty"))
    sent = [item.name for item in step.operators if "::" not in item.name]
    assert sent == [item.name for item in step.collectives]


def test_copies_around_a_gather_count_what_they_copy(step: Rehearsal) -> None:
    """Into the buffer goes the rank's shard, out of it the whole unit."""
    copies = {item.name: item.nbytes for item in step.operators if item.role == "gather" and item.unit == "layers.0"}
    whole = next(item.nbytes for item in step.collectives if item.name == "all_gather" and item.unit == "layers.0")
    ranks = step.plan.mesh.shard
    assert copies["fsdp::all_gather_copy_in"] == 2 * whole / ranks
    assert copies["fsdp::split_with_sizes_copy"] == 2 * whole


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "replicate"])
def test_times_add_up(engine: str, step: Rehearsal) -> None:
    found = step if engine == "fsdp2" else rehearse(engine)
    for name in devices():
        time = found.time(name)
        assert 0 < time.low < time.seconds < time.high
        assert sum(time.spent.values()) == pytest.approx(time.seconds)
        assert sum(time.exposed.values()) == pytest.approx(time.spent["communication"])
        assert max(span.end for span in time.spans) <= time.seconds * (1 + 1e-9)
        for stream in {span.stream for span in time.spans}:
            own = sorted((span.begin, span.end) for span in time.spans if span.stream == stream)
            assert all(end <= begin + 1e-12 for (_, end), (begin, _) in pairwise(own)), stream


def test_what_bounds_a_step(step: Rehearsal) -> None:
    assert step.time("h100").bound == "launches"  # the model is tiny
    slow = Links(Link(1e6, 1e-6), Link(1e6, 1e-6))
    assert step.time("h100", slow).bound == "communication"
    one = Range(1.0, 1.0, 1.0)
    ideal = Device(
        "ideal", {"float32": 1e9}, 1e30, 0, slow, "", one, one, one, issue=Range(0.0, 0.0, 0.0), smallest=0.0
    )
    time = step.time(ideal, Links(Link(1e30, 0.0), Link(1e30, 0.0), base=0.0))
    assert time.seconds == pytest.approx(sum(item.flops for item in step.operators) / 1e9)
    assert (time.bound, time.utilization) == ("compute", pytest.approx(1.0))


def test_it_prints_and_becomes_json(step: Rehearsal) -> None:
    time = step.time("a100")
    assert f"Step on a100: {human_seconds(time.seconds)} (" in str(time)
    assert "layers." in str(time)
    described = json.loads(json.dumps(time.describe()))
    assert described["seconds"] == time.seconds
    assert {item["unit"] for item in described["exposed"]} == {*time.exposed}
    assert len(described["spans"]) == len(time.spans)
    with pytest.raises(ConfigError, match=r"'h10' is not a device that is known.* Did you mean 'h100'"):
        step.time("h10")


def work(role: str, unit: str | None, seconds: float, *, sends: str = "", phase: str = "forward") -> Work:
    return Work(sends or "aten::op", unit, phase, role, seconds, 0.0, is_sent=bool(sends))


def gathering(unit: str, seconds: float, phase: str = "forward") -> list[Work]:
    return [work("gather", unit, seconds, sends="all_gather", phase=phase)]


def test_gathers_hide_behind_what_computes() -> None:
    found = replay(
        [
            *gathering("a", 2),
            work("gather", "a", 0.5),  # copies out
            work("compute", "a", 3),
            *gathering("b", 4),
            work("gather", "b", 0.5),
            work("compute", "b", 3),
        ]
    )
    # a arrives at 2, is copied out and computed until 5.5; b is gathered from 2 to 6, which 0.5 of is not hidden.
    assert dict(found.exposed) == {"a": 2, "b": 0.5}
    assert found.seconds == 9.5


@pytest.mark.parametrize(("phase", "begins"), [("forward", [0, 1, 2, 12]), ("backward", [0, 2, 12, 22])])
def test_gathers_do_not_run_ahead_of_buffers(phase: str, begins: list[float]) -> None:
    works = gathering("a", 1, phase)
    for unit, following in (("a", "b"), ("b", "c"), ("c", "d"), ("d", None)):
        works.append(work("gather", unit, 1, phase=phase))  # copies out
        if following:
            works += gathering(following, 1, phase)
        works.append(work("compute", unit, 9, phase=phase))
    found = replay(works)
    # a is copied out from 1 to 2, b from 11 to 12, c from 21 to 22. Forward keeps one buffer more.
    assert [span.begin for span in found.spans if span.name == "all_gather"] == begins


def test_gradients_are_sent_while_the_next_unit_computes() -> None:
    def reducing(unit: str, seconds: float) -> list[Work]:
        copied, sent = (
            work("reduce", unit, 0.5, phase="backward"),
            work("reduce", unit, seconds, sends="reduce_scatter"),
        )
        after = work("reduce", unit, 0.25, phase="backward")
        return [copied, Work(sent.name, unit, "backward", "reduce", seconds, 0.0, is_sent=True), after]

    found = replay(
        [
            work("compute", "b", 3, phase="backward"),
            *reducing("b", 2),
            work("compute", "a", 1, phase="backward"),
            *reducing("a", 2),
            work("compute", None, 1, phase="optimizer"),
        ]
    )
    # b is sent from 3.5 to 5.75, a computed until 4.5; its gradients wait for the buffer and are sent from 6.25 on.
    assert dict(found.exposed) == {"b": 1.25, "a": 2.25}
    assert found.seconds == 9.5
    assert [span.begin for span in found.spans if span.name == "reduce_scatter"] == [3.5, 6.25]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_short_sides_cost_less_where_units_multiply_more_slowly(dtype: str) -> None:
    """A tile waits for memory as long, however fast it is computed: products of adapters have few columns."""
    device, sides = device_of("a100"), (8192, 256, 4096)
    product = Operator(
        "aten::mm", 2 * 8192 * 256 * 4096, 0, "", None, "forward", 0, dtype, shapes=(sides[:2], sides[1:])
    )
    seconds, bound = operator_seconds(product, device, "usual")
    filling = device.filling * device.peak(dtype) / device.peak("bfloat16")
    usual = 0.745 if dtype == "float32" else device.products[1]  # power does not limit full float32
    share = usual * 256 / (256 + filling)
    assert bound == "compute"
    assert seconds == pytest.approx(product.flops / device.peak(dtype) / share)
    assert filling == pytest.approx(220.0 if dtype == "bfloat16" else 13.75)


def test_a_cpu_that_issues_slowly_bounds_the_step() -> None:
    works = [Work("aten::op", "", "forward", "compute", 1.0, 3.0) for _ in range(4)]
    found = replay(works)
    assert (found.seconds, found.spent["launches"]) == (13.0, 9.0)
    assert replay(works, is_async=False).seconds == 16.0


@pytest.mark.parametrize(
    ("name", "ranks", "stride", "seconds"),
    [
        ("all_gather", 1, 0, 0.0),
        ("all_gather", 4, 1, 0.75 + 3 * 0.01),  # a ring within the node
        ("reduce_scatter", 8, 1, 7 / 8 / 0.8 + 6 * 0.01 + 0.1),  # 4 ranks a node share 4 x 0.2 of the network
        ("all_gather", 2, 4, 0.5 / 0.2 + 0.1),  # one rank a node
        ("all_reduce", 2, 1, 2 * (0.5 + 0.01)),
        ("all_reduce", 64, 1, 2 / 0.8 + 2 * (3 * 0.01 + 4 * 0.1)),  # a tree has fewer steps
        ("broadcast", 4, 1, 1 + 3 * 0.01),
    ],
)
def test_collectives(name: str, ranks: int, stride: int, seconds: float) -> None:
    links = Links(Link(1.0, 0.01), Link(0.2, 0.1), ranks_per_node=4, base=0.0)
    item = Collective(name, 1, ranks, stride, None, "forward", 1)
    assert collective_seconds(item, links, 1.0) == pytest.approx(seconds)


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("one_thread")
def test_a_calibrated_step_takes_about_as_long_as_real_ones(step: Rehearsal, tmp_path: Path) -> None:
    own = rehearse(mesh=1, device_type="cpu")
    config, model = {"wrap": {"kind": "module_class", "classes": "Block"}}, Words()
    found = measure(config, model, TOKENS, max_norm=1.0, clock=time.process_time, budget=1e-3)
    device, predicted = found.device, found.predicted
    assert {*device.measured} == {*own.calls} == {item.signature for item in own.operators if item.nbytes}
    assert {*device.issues} == {"forward", "backward", "clipping", "optimizer", "gather", "reduce"}
    assert own.time(device).seconds == predicted.seconds
    assert all(param.grad is None for param in model.parameters())
    assert -0.6 < found.error < 1.5  # benchmarks/bench_step_time.py shows how close it is
    assert f"({found.error:+.1%}); peak " in str(found)
    assert found.rehearsal.peak == own.peak
    assert found.peak == pytest.approx(own.peak.nbytes, rel=0.2)  # the convolution has scratch memory
    with pytest.raises(ConfigError, match="at least 3 steps"):
        measure(config, model, TOKENS, steps=2)
    with single_rank(), pytest.raises(ShardStateError, match="between 2 or more ranks"):
        measure_links()
    write_device(device, tmp_path / "own.toml")
    assert own.time(str(tmp_path / "own.toml")) == predicted
    slower = replace(device, measured={name: 10 * seconds for name, seconds in device.measured.items()})
    assert own.time(slower).compute == pytest.approx(10 * predicted.compute)
    lasting = replace(device, issues={**device.issues, "gather": device.issues["gather"] + 1})
    views = [item for item in own.operators if item.role == "gather" and not item.nbytes]
    gathers = [item for item in own.operators if item.role == "gather" and item.nbytes]
    assert own.time(lasting).seconds - predicted.seconds == pytest.approx(len(gathers) + len(views) / 3)
    with pytest.raises(ConfigError, match="for 'cuda'"):
        calibrate(step)
    with pytest.raises(ShardStateError, match="together in a process group"):
        calibrate(together=True)


def test_a_file_that_is_no_device(tmp_path: Path, step: Rehearsal) -> None:
    (tmp_path / "other.toml").write_text("name = 1")
    with pytest.raises(ConfigError, match="is not a device that a calibration wrote: KeyError"):
        step.time(str(tmp_path / "other.toml"))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        step.time(str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match=r"ends in \.toml"):
        write_device(Device("a", {"float32": 1.0}, 1.0, 0, Links(Link(1.0, 1.0), Link(1.0, 1.0)), ""), "a.json")


def test_the_first_steps_beside_the_predicted_one(step: Rehearsal) -> None:
    moments = iter([0.0, 9.0, 10.0, 12.0, 20.0, 0.0])
    watch = FirstSteps(step, device="h100", steps=3, clock=lambda: next(moments))
    lines = [watch.step() for _ in range(6)]
    assert lines[:4] == [lines[5]] * 4 == [None] * 4
    predicted = human_seconds(step.time("h100").seconds)
    assert lines[4] is not None
    assert f"step {predicted} predicted, 2 s measured (-99.9%); peak {human_bytes(step.peak.nbytes)}" in lines[4]
    with pytest.raises(ConfigError, match="at least 1 step, got 0"):
        FirstSteps(step, steps=0)
