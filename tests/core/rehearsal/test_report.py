"""The page about rehearsals: its numbers are those of the rehearsals, it is whole, loads nothing and escapes names."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import mmfsdp
from mmfsdp.basics import human_bytes
from mmfsdp.basics.pages.markup import name_text
from mmfsdp.errors import ConfigError
from mmfsdp.planning import MeshSpec
from mmfsdp.rehearsal import (
    KINDS,
    Collective,
    Device,
    Link,
    Links,
    Operator,
    Range,
    Rehearsal,
    Span,
    StepTime,
    report,
)
from mmfsdp.rehearsal.reporting.curves import scaled_times
from mmfsdp.rehearsal.reporting.lanes import stream_lanes
from mmfsdp.rehearsal.reporting.looks import STYLE, key_of, texture_of
from mmfsdp.rehearsal.reporting.modules import module_tree
from mmfsdp.rehearsal.reporting.treemap import squarified
from mmfsdp.rehearsal.timing.device_names import device_of
from mmfsdp.rehearsal.timing.step_time import human_seconds, time_of

EVIL = "<script>alert(1)</script>&\"'"
VOID = {"meta", "br", "input", "wbr"}
CELL = re.compile(r'class="cell m-(\w+) p-([\w-]+)"[^>]*title="([^"]*): ([^",]*), .*?<b>(.*?)</b>')
"""Look, pattern, module, kind and label of a cell."""
CONFIG = {"wrap": {"kind": "module_class", "classes": "Block"}, "precision": "bf16"}


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block(64) for _ in range(4)))
        self.add_module(EVIL, nn.Linear(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, EVIL)(self.layers(x))


class Reader(HTMLParser):
    """Checks that tags match, and collects tags, attributes, text and the data of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.values: list[int] = []
        self.data: dict[str, str] = {}
        self.text = ""
        self.feed(page)
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack[-1:] == ["script"]:
            self.data[self.tags[-1][1].get("id", "")] = data
        elif self.stack[-1:] != ["style"]:
            self.text += data

    def all(self, name: str) -> list[str]:
        """Return the values of an attribute in the page."""
        return [attrs[name] for _, attrs in self.tags if name in attrs]


@pytest.fixture(scope="module")
def steps() -> tuple[Rehearsal, Rehearsal]:
    batch = torch.empty(32, 64, device="meta")
    return (
        mmfsdp.rehearse(CONFIG, Net(), batch, mesh=8, max_norm=1.0),
        mmfsdp.rehearse({**CONFIG, "activation_checkpointing": {"mode": "full"}}, Net(), batch, mesh=8, max_norm=1.0),
    )


@pytest.fixture(scope="module")
def pages(steps: tuple[Rehearsal, Rehearsal]) -> tuple[str, str]:
    return report(steps[0]), report(*steps, names=["plain", EVIL])


@pytest.mark.parametrize("place", [0, 1])
def test_is_whole_and_loads_nothing(pages: tuple[str, str], place: int) -> None:
    page, read = pages[place], Reader(pages[place])
    ids = read.all("id")
    assert len(ids) == len({*ids})
    named = [*read.all("aria-labelledby"), *read.all("data-series"), *re.findall(r"url\(#([^)]+)\)", page)]
    assert len(named) > 10
    assert {*named, *(link.removeprefix("#") for link in read.all("href"))} <= {*ids}
    assert not re.search(r"https?:|//[a-z]|@import|src=", page.replace('="//', ""))
    assert "default-src 'none'" in page
    assert "@media screen and (prefers-color-scheme: dark)" in page
    # Names are text, wherever they stand.
    assert "<script>alert" not in page
    assert EVIL in read.text
    assert [attrs for tag, attrs in read.tags if tag == "script" if attrs.get("type") != "application/json"] == [{}]


def test_numbers_are_those_of_the_rehearsal(steps: tuple[Rehearsal, Rehearsal], pages: tuple[str, str]) -> None:
    step, read = steps[0], Reader(pages[0])
    data = json.loads(read.data["memory0-data"])
    timeline = step.timeline(len(data["moments"]))
    assert data["moments"] == [moment for moment, _ in timeline]
    drawn = {kind["name"]: kind["bytes"] for kind in data["kinds"]}
    assert [
        {kind: found[place] for kind, found in drawn.items() if found[place]} for place in range(len(timeline))
    ] == [counts for _, counts in timeline]
    assert data["phases"] == [step.at(moment).phase for moment in data["moments"]]
    assert sum(map(int, read.all("data-bytes"))) == step.peak.nbytes
    rows = re.findall(r'<i class="swatch k-([\w-]+)"></i>[^<]+</th>.*?value="(\d+)".*?value="(\d+)"', pages[0])
    assert {kind: (int(peak), int(static)) for kind, peak, static in rows} == {
        key_of(kind): (step.peak.by_kind.get(kind, 0), step.static.get(kind, 0))
        for kind in {*step.peak.by_kind, *step.static}
    }
    assert f"Rank 0 holds most, {human_bytes(step.peak.nbytes)}, in {step.peak.phase}" in read.text
    assert re.search(r"<body><main>.*?<h1>(.*?)</h1>", pages[0], re.DOTALL)[1] == step.verdict(device_of("h100").memory)
    gathers = step.sent()["all_gather", 8, 1]
    assert re.search(rf'all_gather</th>.*?>8<.*?>{gathers[0]}<.*?value="{gathers[1]}"', pages[0])
    assert len(pages[0]) < 90_000


def test_the_curve_fills_its_chart_and_cells_have_names(
    steps: tuple[Rehearsal, Rehearsal], pages: tuple[str, str]
) -> None:
    step, page = steps[0], pages[0]
    top = json.loads(Reader(page).data["memory0-data"])["top"]
    assert max(step.reserved()) > 2 * step.peak.nbytes, "the allocator takes whole blocks of 2 MiB"
    assert step.peak.nbytes < top < 1.5 * step.peak.nbytes
    assert "above this chart" in page
    cells = CELL.findall(page)
    labels = {label for *_, label in cells}
    assert not labels & {*KINDS}
    assert {"up", "the loss"} <= labels


def test_colours_are_modules_and_patterns_are_kinds(pages: tuple[str, str]) -> None:
    for page in pages:
        cells = CELL.findall(page)
        assert all(texture == texture_of(kind) for _, texture, _, kind, _ in cells)
        looks = {module: look for look, _, module, _, _ in cells}
        assert {(module, look) for look, _, module, _, _ in cells} == {*looks.items()}, "the same in both maps"
        assert len({*looks.values()} - {"rest"}) > 2
        assert {*re.findall(r"swatch m-(\w+)", page)} == {*looks.values()}
    assert len({texture_of(kind) for kind in KINDS}) == len(KINDS)


def test_names_break_between_their_parts_only() -> None:
    assert name_text("model.layers.0.gate_proj") == "model.<wbr>layers.<wbr>0.<wbr>gate_<wbr>proj"
    assert name_text("work_dirs/epoch_1.pth") == "work_<wbr>dirs/<wbr>epoch_<wbr>1.<wbr>pth"
    assert name_text("layers.{0..31}.w") == "layers.<wbr>{0..31}.<wbr>w"
    assert name_text("0.25 <b>") == "0.25 &lt;b&gt;"


def test_equal_layers_are_one_module(steps: tuple[Rehearsal, Rehearsal], pages: tuple[str, str]) -> None:
    root = module_tree(steps[0])
    assert [*root.children] == ["layers", EVIL]
    [layer] = root.children["layers"].children.values()
    assert (layer.path, layer.modules, layer.unit is not None) == ("layers.{0..3}", 4, True)
    assert layer.children["up"].params == {"float32": 4 * 4 * (64 * 256 + 256)}
    assert root.total("held") == Counter(steps[0].peak.by_kind)
    assert root.total("kept") == Counter(steps[0].static)
    assert root.total("params").total() == 4 * steps[0].plan.param_numel
    shown = Reader(pages[0]).text
    assert "layers.{0..3} 4 \u00d7 unit: Block computes in bfloat16 reduces in float32" in shown
    assert "recomputed" not in shown


def test_layers_that_differ_stay_apart(steps: tuple[Rehearsal, Rehearsal]) -> None:
    model = nn.Sequential(*(nn.Linear(dim, dim) for dim in (4, 4, 8, 4)))
    step = replace(steps[0], plan=mmfsdp.plan(model, {"wrap": {"kind": "none"}}, 2), allocations=())
    assert [*module_tree(step).children] == ["{0..1,3}", "2"]
    assert "The rank holds nothing" in report(step)


def test_two_rehearsals_side_by_side(steps: tuple[Rehearsal, Rehearsal], pages: tuple[str, str]) -> None:
    first, second = steps
    read = Reader(pages[1])
    change = second.peak.nbytes - first.peak.nbytes
    assert change < 0
    assert f"At its peak, {EVIL} needs {human_bytes(-change)} less than plain" in read.text
    assert f'peak</th><td class="num"><data value="{first.peak.nbytes}"' in pages[1]
    assert f'<data value="{change}"' in pages[1]
    assert "activation_checkpointing: None ->" in read.text
    heights = [float(found) for found in re.findall(r"--scale:([\d.]+)", pages[1])]
    assert heights == [1.0, pytest.approx(second.peak.nbytes / first.peak.nbytes, abs=1e-4)]
    assert "memory1-data" in read.data
    times = [step.time("h100").seconds for step in steps]
    assert f"A step takes {times[1] / times[0]:.2f} times as long" in read.text


def test_boxes_of_streams_are_the_spans(steps: tuple[Rehearsal, Rehearsal], pages: tuple[str, str]) -> None:
    time = steps[0].time("h100")
    found = re.findall(r'<i class="span[^"]*"[^>]*left:([\d.]+)%;width:([\d.]+)%', pages[0])
    expected = [
        (100 * span.begin / time.seconds, 100 * (span.end - span.begin) / time.seconds)
        for stream in ("compute", "gather", "reduce")
        for span in time.spans
        if span.stream == stream
    ]
    assert len(expected) > 20
    assert [(float(left), float(width)) for left, width in found] == [pytest.approx(one, abs=1e-3) for one in expected]
    assert f'<data value="{time.seconds!r}"' in pages[0]
    assert time.coverage in Reader(pages[0]).text
    slower = report(steps[0], device="rtx4090")
    assert f'<data value="{steps[0].time("rtx4090").seconds!r}"' in slower


def test_thousands_of_spans_become_hundreds() -> None:
    spans = [Span("compute", "compute", f"layers.{place}", "forward", place, place + 0.9) for place in range(5000)]
    time = StepTime("h100", 5000, 1, 9, "", 1, {}, "compute", {}, 0, 0, 0, tuple(spans))
    boxes = re.findall(r"left:([\d.]+)%;width:([\d.]+)%\"></i>", stream_lanes(time, 5000.0).partition("track")[2])
    assert 100 < len(boxes) <= 400
    assert float(boxes[0][0]) == 0
    assert sum(map(float, boxes[-1])) == pytest.approx(100, abs=0.1)


def test_curves_are_what_other_numbers_of_ranks_rehearse(steps: tuple[Rehearsal, Rehearsal]) -> None:
    # A device without launches and small kernels, so that what is sent and what the optimizer reads decide.
    links = Links(Link(1e9, 1e-6), Link(1e8, 5e-6), 8)
    machine = Device("test", {"float32": 1e12}, 1e10, 0, links, "", issue=Range(0, 0, 0), smallest=0.0)
    few = steps[0]
    many = mmfsdp.rehearse(CONFIG, Net(), torch.empty(32, 64, device="meta"), mesh=64, max_norm=1.0)
    found = scaled_times(few.plan.mesh, few.operators, few.collectives, machine)
    assert [*found] == [1 << power for power in range(13)]
    assert found[8] == few.time(machine)
    truth = many.time(machine).seconds
    assert found[64].seconds == pytest.approx(truth, rel=0.03)
    assert abs(found[8].seconds / truth - 1) > 0.2
    assert {span.name for span in found[1].spans} == {"compute"}
    titles = Reader(report(few, device=machine)).all("title")
    assert any(told.startswith(f"4,096 ranks: {human_seconds(found[4096].seconds)} (") for told in titles)


def test_replicas_multiply_and_their_shards_stay() -> None:
    mesh = MeshSpec(replicate=2, shard=4)
    sent = [Collective("all_gather", 8, 4, 1, "a", "forward", 1), Collective("all_reduce", 8, 2, 4, "a", "backward", 2)]
    sent.append(Collective("all_reduce", 8, 8, 1, None, "clipping", 3))
    machine = Device("test", {"float32": 1e12}, 1e10, 0, Links(Link(1e9, 1e-6), Link(1e8, 5e-6), 8), "")
    operators = [
        Operator("all_gather", 0, 0, "a", "a", "forward", 1, "float32", "gather"),
        Operator("all_reduce", 0, 0, "a", "a", "backward", 2, "float32", "reduce"),
        Operator("all_reduce", 0, 0, "", None, "clipping", 3, "float32"),
    ]
    found = scaled_times(mesh, operators, sent, machine, ranks=(1, 2, 4, 8, 12, 64))
    assert [*found] == [4, 8, 12, 64]
    moved = [sent[0], replace(sent[1], ranks=16), replace(sent[2], ranks=64)]
    assert found[64] == time_of(operators, moved, machine)
    assert scaled_times(MeshSpec(), operators, sent, machine) == {}


def test_wrong_arguments(steps: tuple[Rehearsal, Rehearsal]) -> None:
    with pytest.raises(ConfigError, match=r"report\(\) needs a rehearsal"):
        report()
    with pytest.raises(ConfigError, match="names has 1 names for 2 rehearsals"):
        report(*steps, names=["a"])
    with pytest.raises(ConfigError, match="'h10' is not a device that is known"):
        report(steps[0], device="h10")


def test_kinds_look_different() -> None:
    rules = dict(re.findall(r"\.k-([\w-]+)\{(.*?)color:#\w+\}", STYLE))
    assert {key_of(kind) for kind in KINDS} <= {*rules}
    assert len({*rules.values()}) == len(rules)


def test_boxes_fill_the_rectangle_in_proportion() -> None:
    sizes = [900.0, 300.0, 299.0, 50.0, 7.0, 1.0, 1.0]
    boxes = squarified(sizes, 100, 52)
    for size, (left, top, width, height) in zip(sizes, boxes, strict=True):
        assert width * height == pytest.approx(5200 * size / sum(sizes))
        assert left >= -1e-9
        assert left + width <= 100 + 1e-9
        assert top >= -1e-9
        assert top + height <= 52 + 1e-9
    for place, (left, top, width, height) in enumerate(boxes):
        for other in boxes[place + 1 :]:
            beside = other[0] >= left + width - 1e-9 or left >= other[0] + other[2] - 1e-9
            assert beside or other[1] >= top + height - 1e-9 or top >= other[1] + other[3] - 1e-9
    assert squarified([], 1, 1) == []


def test_drawing_needs_no_torch() -> None:
    code = "import sys, mmfsdp.rehearsal.reporting.report_page; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
