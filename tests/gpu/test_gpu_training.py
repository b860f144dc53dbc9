"""Training through the plan on a GPU has the losses of the same model without it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.gpu.loops import WRAP, Net, losses
from torch import nn

import mmfsdp


def reference(device: torch.device, **options: Any) -> list[float]:
    return losses(Net().to(device), device, **options)


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "replicate"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"activation_checkpointing": "full"},
        {"init": {"device": "auto"}, "prefetch": {"backward": "post", "forward": 1}},
    ],
    ids=["plain", "recomputed", "prefetch"],
)
def test_losses_are_those_of_the_model_alone(device: torch.device, engine: str, settings: dict[str, Any]) -> None:
    if engine == "replicate" and "prefetch" in settings:
        pytest.skip("DDP gathers nothing")
    model = mmfsdp.shard(Net(), {"engine": engine, "wrap": WRAP, **settings})
    assert {param.device for param in model.parameters()} == {device}
    assert losses(model, device) == pytest.approx(reference(device), rel=1e-5)


class Tagger(nn.Module):
    """cuDNN wants the weights of a recurrent network in one piece of memory, and torch moves them there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cells = nn.LSTM(16, 32, 2, bidirectional=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.cells(x)[0])
        return found


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "replicate"])
def test_a_recurrent_network_learns(device: torch.device, engine: str) -> None:
    config = {"engine": engine, "wrap": {"kind": "module_name", "patterns": ["cells"]}}
    found = losses(mmfsdp.shard(Tagger(), config), device)
    assert found == pytest.approx(losses(Tagger().to(device), device), rel=1e-5)


@pytest.mark.parametrize("mode", ["full", "ops"])
def test_activations_are_offloaded(device: torch.device, mode: str) -> None:
    config = {"wrap": WRAP, "activation_checkpointing": {"mode": mode, "offload": True}}
    assert losses(mmfsdp.shard(Net(), config), device) == pytest.approx(reference(device), rel=1e-5)


def test_parameters_are_offloaded_to_pinned_memory(device: torch.device) -> None:
    model = mmfsdp.shard(Net(), {"wrap": WRAP, "cpu_offload": True})
    assert {param.device.type for param in model.parameters()} == {"cpu"}
    if device.type == "cuda":
        assert all(param.to_local().is_pinned() for param in model.parameters())  # type: ignore[attr-defined]
    assert losses(model, device) == pytest.approx(reference(device), rel=1e-5)


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_follows_full_precision(device: torch.device, engine: str, precision: str) -> None:
    model = mmfsdp.shard(Net(), {"engine": engine, "wrap": WRAP, "precision": precision})
    scaler = mmfsdp.GradScaler(device.type, init_scale=1024.0) if precision == "fp16" else None
    found = losses(model, device, steps=10, scaler=scaler)
    assert found == pytest.approx(reference(device, steps=10), rel=0.05)
    assert {param.dtype for param in model.parameters()} == {torch.float32}


def test_overflow_in_fp16_skips_the_step(device: torch.device) -> None:
    model = mmfsdp.shard(Net(), {"wrap": WRAP, "precision": "fp16"})
    before = {name: value.clone() for name, value in mmfsdp.model_state_dict(model).items()}
    scaler = mmfsdp.GradScaler(device.type, init_scale=2.0**60)
    losses(model, device, steps=1, scaler=scaler)
    after = mmfsdp.model_state_dict(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert scaler.get_scale() < 2.0**60


def test_compiled(device: torch.device) -> None:
    model = mmfsdp.shard(Net(), {"wrap": WRAP})
    compiled: Any = torch.compile(model)
    found = losses(compiled, device, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
    assert found == pytest.approx(reference(device), rel=1e-4)


def test_clipping_and_accumulation(device: torch.device) -> None:
    def norms(model: nn.Module, clip: Callable[..., torch.Tensor], hold: Callable[..., Any]) -> list[float]:
        found = []
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for part in range(2):
                x = torch.randn(8, 16, generator=generator).to(device)
                with hold(model) if part == 0 else contextlib.nullcontext():
                    model(x).square().mean().backward()
            found.append(float(clip(model.parameters(), 1.0)))
            model.zero_grad()
        return found

    wanted = norms(Net().to(device), torch.nn.utils.clip_grad_norm_, contextlib.nullcontext)
    found = norms(mmfsdp.shard(Net(), {"wrap": WRAP}), mmfsdp.clip_grad_norm_, mmfsdp.no_sync)
    assert found == pytest.approx(wanted, rel=1e-5)
