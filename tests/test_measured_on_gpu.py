"""What was measured on a GPU is what the rehearsal expects: whole steps, and kernels' memory of their own."""

from __future__ import annotations

import json
import re
import statistics
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.bench_on_gpu import figures_of, forecast
from benchmarks.on_gpu import short_of_memory
from benchmarks.on_gpu.cases import CASES
from benchmarks.published.models import Shape
from tools.measured_on_gpu import (
    DATA,
    DEVICES,
    FORECASTS,
    PAGE,
    error_of,
    measured,
    measured_with_little_memory,
    page,
    real_of,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from mmfsdp.rehearsal.recording.kernels.scratch import accelerator_scratch_bytes
from mmfsdp.rehearsal.recording.recurrent import NETWORKS, RECURRENT, run_recurrent
from mmfsdp.rehearsal.recording.step_records import CHANNELS_LAST, REORDERED, Operator
from mmfsdp.rehearsal.timing.device_names import device_of
from mmfsdp.rehearsal.timing.roofline import operator_seconds

FOUND = json.loads((DATA / FORECASTS).read_text(encoding="utf-8"))
KERNELS = {
    line["name"]: line["rows"]
    for line in map(json.loads, (DATA / "kernels.jsonl").read_text(encoding="utf-8").splitlines())
}
HOPPER = (9, 0)
MB = 1e6


def test_the_page_is_up_to_date() -> None:
    assert page() == PAGE.read_text(encoding="utf-8"), "run: python tools/measured_on_gpu.py"
    for device in DEVICES:
        assert {*measured(device)} == {*FOUND[device]} <= {*CASES}


def test_other_pages_say_what_this_one_and_that_of_published_runs_say() -> None:
    """The figures of docs/index.md and docs/howto/fit.md are those of the generated pages."""
    rows = [
        line.strip("|").split("|") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.count("|") == 8
    ]
    kinds = ("allocated memory", "reserved memory", "seconds of a step")
    worst = [max(float(row[5].rstrip("%")) for row in rows if row[0].startswith(kind)) for kind in kinds]
    index = (PAGE.parents[1] / "index.md").read_text(encoding="utf-8")
    assert [float(number) for number in re.findall(r"([\d.]+)%", index)] == worst
    inside = [row[6].split(" of ") for row in rows if row[0].startswith("reserved memory")]
    assert all(found == count for found, count in inside)
    published = (PAGE.parent / "published_runs.md").read_text(encoding="utf-8")
    theirs = re.findall(r"^\|reserved memory\|\d+\|\w+(?:\|[^|]*){4}\|(\d+) of (\d+)\|", published, flags=re.MULTILINE)
    fit = " ".join((PAGE.parents[1] / "howto" / "fit.md").read_text(encoding="utf-8").split())
    assert f"all {sum(int(found) for found, _ in theirs)} of which stay below it" in fit
    assert all(found == count for found, count in theirs)
    assert (
        f"and all {sum(int(count) for _, count in inside)} [steps that we measured](../appendix/measured_on_gpu.md)"
        in fit
    )


@pytest.mark.sample("h100-llama 0.2B, bf16, 64 ranks")
@pytest.mark.parametrize(
    ("device", "name"),
    [("h100", "ResNet-50, fp32"), ("h100", "llama 0.2B, bf16, 64 ranks"), ("h200", "GPT-2 medium, bf16, generating")],
)
def test_forecasts_are_those_of_the_code(device: str, name: str) -> None:
    again = figures_of(forecast(CASES[name], device))
    for kind, figures in FOUND[device][name].items():
        assert again[kind] == pytest.approx(figures, rel=0.005), "run: python -m benchmarks.bench_on_gpu"


def test_what_was_trained_with_little_memory_trains() -> None:
    shape = Shape(64, 2, 4, 1000, 256, norm="layer", is_gated=False, positions=64, is_tied=True, packed=True)
    dist.init_process_group("fake", rank=0, world_size=short_of_memory.RANKS, store=FakeStore())
    try:
        found = short_of_memory.train(shape, torch.device("cpu"), 1)
    finally:
        dist.destroy_process_group()
    assert [retries for _, retries in found[0]] == [0, 0, 0]
    assert short_of_memory.forecasts(shape) == [(0, 0)] * len(measured_with_little_memory())


def test_retries_are_forecast() -> None:
    for line, (_, high) in zip(measured_with_little_memory(), FOUND["short_of_memory"], strict=True):
        most = max(sum(retries for _, retries in step) for step in line["steps"][1:])
        assert 0.3 * high <= most <= 2 * high


@pytest.mark.parametrize("device", DEVICES)
def test_memory_is_forecast_well(device: str) -> None:
    lines, found = measured(device), FOUND[device]
    allocated = [abs(error_of("allocated", line, found[name]) or 0.0) for name, line in lines.items()]
    assert len(allocated) >= 27
    assert statistics.median(allocated) <= 0.001
    assert max(allocated) <= 0.01
    inside = [
        low <= (real_of("reserved", line) or 0.0) <= high
        for name, line in lines.items()
        for low, high in [found[name]["reserved"]]
    ]
    assert sum(inside) >= 0.9 * len(inside)


@pytest.mark.parametrize(
    ("kind", "dtype", "row"), [(row[0], row[1], row[2:]) for row in KERNELS["recurrent"][::5]], ids=str
)
def test_recurrent_networks_keep_and_take_what_they_did(kind: str, dtype: str, row: list[Any]) -> None:
    time, batch, width, hidden, layers, both, dropout, kept, forward, backward = row
    directions, size = 2 if both else 1, getattr(torch, dtype)
    cells = getattr(torch.nn, kind)(
        width, hidden, layers, bidirectional=both, dropout=dropout, dtype=size, device="meta"
    )
    inputs = torch.empty(time, batch, width, dtype=size, device="meta")
    state = torch.empty(layers * directions, batch, hidden, dtype=size, device="meta")
    weights = [*cells.parameters()]
    mode = {"RNN": NETWORKS["rnn_tanh.input"], "LSTM": NETWORKS["lstm.input"], "GRU": NETWORKS["gru.input"]}[kind]
    cell = state if kind == "LSTM" else None
    args = (inputs, weights, 4, None, state, cell, mode, hidden, 0, layers, False, dropout, True, both, [], None)
    _, _, _, reserve, packed = run_recurrent(RECURRENT[0], args)
    copied = packed.nbytes if dtype == "bfloat16" else 0  # in float32 the weights lay side by side already
    states = state.nbytes * (2 if kind == "LSTM" else 1)
    # What a block is rounded up to, and the four-layer networks, of which some keep a little more.
    assert reserve.nbytes + copied + states == pytest.approx(kept, rel=0.01 if layers < 4 else 0.2, abs=1.2 * MB)
    scratch = accelerator_scratch_bytes(HOPPER, RECURRENT[0], args, None)
    assert scratch == pytest.approx(forward, rel=0.1 if forward > 300 * MB else 0.45, abs=20 * MB)
    returned = inputs.nbytes + packed.nbytes + states
    assert backward == pytest.approx(forward + returned, rel=0.1, abs=2 * MB)


@pytest.mark.parametrize("row", [row for row in KERNELS["convolutions"] if row[1] == "first" and row[8] == 1], ids=str)
def test_convolutions_take_about_what_they_did(row: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)  # as they were measured
    dtype, _, batch, inputs, side, outputs, kernel, stride, groups, peak, kept, *_ = row
    x = torch.empty(batch, inputs, side, side, dtype=getattr(torch, dtype), device="meta")
    w = torch.empty(outputs, inputs // groups, kernel, kernel, dtype=x.dtype, device="meta")
    padding = kernel // 2 if stride != kernel else 0
    out = torch.nn.functional.conv2d(x, w, stride=stride, padding=padding, groups=groups)
    args = (x, w, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups)
    found = accelerator_scratch_bytes(HOPPER, "aten::convolution", args, out)
    is_patch = kernel == stride > 1 or (kernel == 1 and stride > 1)  # for these kernels may copy less
    assert found == pytest.approx(peak - kept, rel=0.15, abs=9 * MB) or (is_patch and found >= 0.9 * (peak - kept))


def times(row: list[Any]) -> list[tuple[float, float]]:
    """Return the seconds that forward and backward of a convolution are expected to take on an H100, and took."""
    name, order, batch, inputs, side, outputs, kernel, stride, groups, *_, forward, backward = row
    dtype, layout = getattr(torch, name), torch.channels_last if order == "last" else torch.contiguous_format
    x = torch.empty(batch, inputs, side, side, dtype=dtype, device="meta").to(memory_format=layout)
    w = torch.empty(outputs, inputs // groups, kernel, kernel, dtype=dtype, device="meta")
    padding = kernel // 2 if stride != kernel else 0
    y = torch.nn.functional.conv2d(x, w, stride=stride, padding=padding, groups=groups).to(memory_format=layout)
    args = (x, w, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups)
    wanted = (w,) if inputs == 3 else (x, w)
    found = []
    for operator, read, more, written, real in (
        ("aten::convolution", (x, w), (), (y,), forward),
        ("aten::convolution_backward", (y, x, w), ([True] * 3,), wanted, backward),
    ):
        given = (*((y, *args) if more else args), *more)
        flops = 2 * y.numel() * w[0].numel() * (len(wanted) if more else 1)
        kind = "tfloat32" if name == "float32" else name
        again = 2 * accelerator_scratch_bytes(HOPPER, operator, given, y)
        nbytes = sum(tensor.nbytes for tensor in (*read, *written))
        shapes = tuple(tuple(tensor.shape) for tensor in read)
        called = operator + (CHANNELS_LAST if order == "last" else "")
        works = [Operator(called, flops, nbytes, "", None, "forward", 0, kind, shapes=shapes)]
        works += [Operator(REORDERED, 0, again, "", None, "forward", 0, kind)] * bool(again)
        device = device_of("h100").by_itself()
        found.append((sum(operator_seconds(work, device, "usual")[0] for work in works), real / 1e6))
    return found


def test_convolutions_take_about_as_long_as_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)  # as they were measured
    pairs = [pair for row in KERNELS["convolutions"] if len(row) > 14 for pair in times(row)]
    errors = sorted(abs(expected / real - 1) for expected, real in pairs)
    assert len(errors) == 144
    assert statistics.median(errors) <= 0.2
    assert errors[int(0.8 * len(errors))] <= 0.5


@pytest.mark.parametrize(
    ("channels", "side", "forward", "backward"),
    [(64, 56, 0.0, 441.5625), (128, 28, 272.5625, 222.75), (256, 14, 218.25, 153.0), (512, 7, 729.0, 108.0)],
)
def test_full_float32_takes_what_a_trace_of_the_allocator_has(
    channels: int, side: int, forward: float, backward: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    x = torch.empty(128, channels, side, side, device="meta")
    w = torch.empty(channels, channels, 3, 3, device="meta")
    args = (x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    found = accelerator_scratch_bytes(HOPPER, "aten::convolution", args, x)
    again = accelerator_scratch_bytes(HOPPER, "aten::convolution_backward", (x, *args, [True] * 3), None)
    assert (found, again) == (forward * (1 << 20), backward * (1 << 20))


@pytest.mark.parametrize(("columns", "nbytes"), [(1024, 103_284_736), (4096, 138_412_032)])
def test_sums_over_rows_take_what_a_trace_of_the_allocator_has(columns: int, nbytes: int) -> None:
    args = (torch.empty(12608, columns, dtype=torch.bfloat16, device="meta"), [0])
    assert accelerator_scratch_bytes(HOPPER, "aten::sum", args, None) == nbytes
