"""Steps without gradients as they were rehearsed: evaluation, and generation with a cache, on two real ranks."""

from __future__ import annotations

import copy
import statistics
from typing import Any

import pytest
import torch
from torch import nn

import mmfsdp
from mmfsdp.errors import ConfigError
from mmfsdp.rehearsal.measured.measuring import cpu_peak
from mmfsdp.runtime import find_sharded_model
from mmfsdp.testing import run_ranks

WIDTH, VOCABULARY, ROWS, PROMPT, MADE = 64, 128, 8, 48, 12
CONFIG = {"wrap": {"kind": "module_class", "classes": "Block"}}


class Block(nn.Module):
    """Attention to what is in a cache, and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, cache: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        new = torch.stack((key, value))
        held = new if cache is None else torch.cat((cache, new), dim=2)
        weights = (query @ held[0].transpose(1, 2) / WIDTH**0.5).softmax(-1)
        x = x + self.out(weights @ held[1])
        return x + self.down(nn.functional.gelu(self.up(x))), held


class Decoder(nn.Module):
    """Returns logits, and what later calls attend to."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.dropout = nn.Dropout(0.5)

    def forward(self, tokens: torch.Tensor, caches: Any = (None,) * 3) -> tuple[torch.Tensor, list[torch.Tensor]]:
        x, kept = self.dropout(self.embed(tokens)), []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, held = block(x, cache)
            kept.append(held)
        return self.head(x), kept


def generate(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Append tokens one by one."""
    logits, caches = model(tokens)
    for _ in range(MADE):
        last = logits[:, -1:].argmax(-1)
        logits, caches = model(last, caches)
        tokens = torch.cat((tokens, last), dim=1)
    return tokens


def evaluate(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return logits alone: whoever evaluates keeps no cache."""
    logits: torch.Tensor = model(tokens)[0]
    return logits


def measured(rank: int, call: Any, optimizer: str | None) -> list[tuple[float, int]]:
    """Return the peaks of a real step and of its rehearsal, and how often units are gathered in the latter."""
    net, tokens = Decoder(), torch.randint(0, VOCABULARY, (ROWS, PROMPT))
    step = mmfsdp.rehearse(
        CONFIG, net, tokens, mesh=2, rank=rank, loss=call, optimizer=optimizer, device_type="cpu", train=False
    )
    model = mmfsdp.shard(copy.deepcopy(net), CONFIG).eval()
    held: list[Any] = [tokens, *model.parameters(), *model.buffers()]
    if optimizer:
        made = torch.optim.AdamW(model.parameters())
        evaluate(model.train(), tokens).mean().backward()
        made.step()
        made.zero_grad()
        model.eval()
        held += [value for state in made.state.values() for value in state.values()]

    def run() -> None:
        with torch.no_grad():
            call(model, tokens)

    run()
    for group in find_sharded_model(model).groups:  # the root stays gathered: no backward frees it
        held += [param.unsharded_param for param in group.fsdp_params]
    assert step.static.get("optimizer state", 0) > 0 if optimizer else "optimizer state" not in step.static
    assert {item.phase for item in step.collectives} == {"forward"}
    assert {item.name for item in step.collectives} == {"all_gather"}
    # The median, as gloo's thread may free a copy earlier or later.
    real = statistics.median(cpu_peak(run, held) for _ in range(3))
    return [(real, step.peak.nbytes), (len(step.collectives), 3 * (1 if call is evaluate else 1 + MADE))]


@pytest.mark.sample("evaluate-None")
@pytest.mark.parametrize(("call", "optimizer"), [(evaluate, None), (evaluate, "adamw"), (generate, None)])
def test_steps_without_gradients(call: Any, optimizer: str | None) -> None:
    for (real, expected), (gathers, calls) in run_ranks(measured, 2, call, optimizer):
        assert expected == pytest.approx(real, rel=0.005)
        assert gathers == calls  # one for each block and call, none for the root


def test_what_belongs_to_training_is_refused() -> None:
    with pytest.raises(ConfigError, match="train=False has no gradients: drop max_norm"):
        mmfsdp.rehearse(None, nn.Linear(2, 2), torch.empty(1, 2), train=False, max_norm=1.0)
