"""A run on a GPU beside its forecast: the watch is quiet where all is as planned; a full GPU says what to change."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.gpu.loops import WRAP, Net
from torch import nn

import mmfsdp
from mmfsdp.rehearsal import FirstSteps, ForecastWatch, Rehearsal, advise, explain_out_of_memory
from mmfsdp.rehearsal.allocator.device_memory import workspaces_of
from mmfsdp.rehearsal.allocator.retries import retries_of

WIDTH, DEPTH, ROWS = 2048, 6, 16384
CONFIG = {"wrap": WRAP, "precision": "bf16"}


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def step(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    loss(model, x).backward()
    mmfsdp.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.usefixtures("on_cuda")
def test_a_run_as_planned_is_quiet_and_another_is_not(device: torch.device) -> None:
    net, x = Net(WIDTH, DEPTH), torch.randn(ROWS, 16, device=device)
    forecast = mmfsdp.rehearse(CONFIG, copy.deepcopy(net), x, mesh=1, loss=loss, max_norm=1.0)
    model = mmfsdp.shard(net, CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.cuda.reset_peak_memory_stats()
    watch, first, lines, found = ForecastWatch(forecast, model, optimizer, every=2), FirstSteps(forecast), [], None
    for _ in range(8):
        step(model, x, optimizer)
        found = first.step() or found
        lines += watch.step()
    assert lines == []
    assert found is not None
    assert "peak" in found
    more = torch.randn(2 * ROWS, 16, device=device)
    for _ in range(4):
        step(model, more, optimizer)
        lines += watch.step()
    assert any(line.startswith("The peak is") for line in lines), lines  # one rank gathers nothing that differs


def train(forecast: Rehearsal, model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    with explain_out_of_memory(forecast, model, optimizer):
        for _ in range(2):
            step(model, x, optimizer)


@pytest.mark.usefixtures("on_cuda")
def test_a_full_gpu_says_where_and_what_to_change(device: torch.device) -> None:
    net, x = Net(WIDTH, DEPTH), torch.randn(ROWS, 16, device=device)
    forecast = advise(CONFIG, copy.deepcopy(net), x, mesh=1, loss=loss, max_norm=1.0)
    model = mmfsdp.shard(net, CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())
    # As much as it needs but for a fifth of the activations.
    limit = 0.8 * forecast.peak.nbytes / torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit)
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            train(forecast, model, x, optimizer)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    [note] = caught.value.__notes__
    assert "ran out of memory in" in note
    assert "activation_checkpointing" in note


@pytest.mark.usefixtures("on_cuda")
def test_a_gpu_that_is_too_small_for_the_cache_is_forecast_and_named(device: torch.device) -> None:
    net, x = Net(WIDTH, DEPTH), torch.randn(ROWS, 16, device=device)
    forecast = mmfsdp.rehearse(CONFIG, copy.deepcopy(net), x, mesh=1, loss=loss, max_norm=1.0)
    limit = int(0.93 * forecast.reserved()[1])
    workspaces = workspaces_of(forecast.device)[1]
    expected = retries_of(forecast.allocations, forecast.allocations, forecast.phases, limit, (0, 0), workspaces)
    model = mmfsdp.shard(net, CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())
    watch, first, lines, found = ForecastWatch(forecast, model, optimizer, every=2), FirstSteps(forecast), [], None
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    try:
        for _ in range(8):
            before = torch.cuda.memory_stats()["num_alloc_retries"]
            step(model, x, optimizer)
            found = first.step() or found
            lines += watch.step()
        made = torch.cuda.memory_stats()["num_alloc_retries"] - before
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert expected.number[0] > 0
    assert 0 < made <= 2 * expected.number[1], (made, expected)
    assert any(line.startswith("The GPU is full") for line in lines), lines
    assert found is not None
    assert "The GPU is full" in found
