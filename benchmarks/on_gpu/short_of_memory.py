"""Trains a rank of MPT-30b on a GPU that is too small for the allocator's cache, and counts and forecasts retries.

``python -m benchmarks.on_gpu.short_of_memory GIB`` trains as llm-foundry does, with FSDP1 as one of 8 ranks, of which
the others are missing: nothing is sent, and kernels and allocations are real. What it prints on an H100 is in
``short_of_memory.jsonl``: of each step, seconds and retries of each micro-batch.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from tools.measured_on_gpu import measured_with_little_memory
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision
from torch.testing._internal.distributed.fake_pg import FakeStore

import mmfsdp
from benchmarks.published.models import Decoder, Shape
from benchmarks.published.rebuilding import MPTS
from mmfsdp.rehearsal.allocator.device_memory import workspaces_of
from mmfsdp.rehearsal.allocator.retries import retries_of
from mmfsdp.rehearsal.allocator.waiting import released_late
from mmfsdp.rehearsal.allocator.wrapping import wrapped_units

__all__ = ["forecasts", "main", "train"]

RANKS, MICRO_BATCHES, METRICS = 8, 3, 2
_GIB = 1 << 30


def main() -> None:
    """Train with the memory that the command line states."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gib", type=float, help="what the allocator may take")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    torch.cuda.set_device(0)
    torch.cuda.set_per_process_memory_fraction(options.gib * _GIB / torch.cuda.mem_get_info()[1])
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        train(_shape(), torch.device("cuda", 0), options.steps)
    finally:
        dist.destroy_process_group()


def train(shape: Shape, device: torch.device, steps: int) -> list[list[tuple[float, int]]]:
    """Train, and return seconds and retries of each micro-batch, by step."""
    with torch.device("meta"):
        model = Decoder(shape, shape.positions)
    options: dict[str, Any] = {
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "use_orig_params": True,
        "backward_prefetch": BackwardPrefetch.BACKWARD_POST,
        "param_init_fn": lambda module: _materialise(module, device),
        "device_id": device,
    }
    for place, block in enumerate(model.blocks):
        model.blocks[place] = FullyShardedDataParallel(checkpoint_wrapper(block), **options)
    sharded = FullyShardedDataParallel(model, **options)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-5, foreach=False)
    found: list[list[tuple[float, int]]] = []
    for _ in range(steps):
        found.append([])
        for _ in range(MICRO_BATCHES):
            begun, before = _now(device), _retries(device)
            tokens = torch.randint(0, shape.vocabulary, (1, shape.positions), device=device)
            logits = sharded(tokens)
            F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
            _measure(logits.detach(), tokens)
            del logits
            found[-1].append((round(_now(device) - begun, 3), _retries(device) - before))
        print(found[-1], flush=True)
        sharded.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return found


def forecasts(shape: Shape | None = None) -> list[tuple[int, int]]:
    """Return the least and the most retries that are forecast for a step, for each GiB that was measured."""
    shape = shape or _shape()
    with torch.device("meta"):
        model, tokens = Decoder(shape, shape.positions), torch.empty(1, shape.positions, dtype=torch.int64)
    kept: list[torch.Tensor] = []

    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        while kept:  # after the backward of the micro-batch before
            _measure(kept.pop(), tokens)
        logits = model(tokens)
        kept.append(logits.detach())
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    config = {
        "engine": "fsdp1",
        "wrap": {"kind": "module_class", "classes": ["Block"]},
        "precision": {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
        "activation_checkpointing": {"mode": "full"},
        "prefetch": {"backward": "post"},
    }
    step = mmfsdp.rehearse(
        config,
        model,
        tokens,
        mesh=RANKS,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, foreach=False),
        max_norm=1.0,
        accumulate=MICRO_BATCHES,
        reduce_each=True,
        device="h100",
    )
    late, units = released_late(step.allocations, step.phases), wrapped_units(step.plan)
    workspaces = workspaces_of(step.device)[1]
    return [
        retries_of(step.allocations, late, step.phases, int(line["gib"] * _GIB), (0, 0), workspaces, units).number
        for line in measured_with_little_memory()
    ]


def _shape() -> Shape:
    dim, layers, heads = MPTS["MPT-30b"]
    return Shape(
        dim, layers, heads, 50368, 4 * dim, norm="layer", is_gated=False, positions=8192, is_tied=True, packed=True
    )


def _measure(logits: torch.Tensor, tokens: torch.Tensor) -> None:
    """Compute what llm-foundry computes as metrics."""
    with torch.no_grad():
        for _ in range(METRICS):
            F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten(), reduction="sum")


def _materialise(module: nn.Module, device: torch.device) -> None:
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # a tied one is made once
    for part in module.modules():
        for name, param in [*part.named_parameters(recurse=False)]:
            if param.is_meta:
                if id(param) not in made:
                    made[id(param)] = param, nn.Parameter(torch.randn_like(param, device=device))
                setattr(part, name, made[id(param)][1])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _retries(device: torch.device) -> int:
    return int(torch.cuda.memory_stats()["num_alloc_retries"]) if device.type == "cuda" else 0


if __name__ == "__main__":
    main()
