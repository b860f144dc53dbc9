"""Cost of `mmfsdp.recording`: processor time of a training step with it over one without, and bytes written.

Of units alone, which are the blocks here, and of their submodules, too. On a GPU it is the time until the GPU is done.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

import mmfsdp
from benchmarks.measuring import sized, spread
from benchmarks.models import Transformer, global_batch
from benchmarks.on_ranks import device, finish

__all__ = ["main"]

IS_CUDA = device().type == "cuda"
WIDTH, DEPTH, BATCHES, TOKENS, PAIRS = sized((256, 6, (16, 64), 32, 40), (32, 2, (4,), 8, 2))
if IS_CUDA:
    WIDTH, DEPTH, BATCHES, TOKENS, PAIRS = 1024, 12, (16, 64), 512, 10
LAYERS = sized(32, 2)
DEPTHS = ((1, "units"), (2, "units and submodules"))
UNWATCHED = nn.utils.clip_grad_norm_  # a recording replaces this name, and would see the other loop clip


def main() -> dict[str, Any]:
    """Measure in one process with one thread, and return the ratios."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for batch, (depth, what), every in product(BATCHES, DEPTHS, (1, 10)):
        with tempfile.TemporaryDirectory() as folder:
            model, optimizer = build()
            with mmfsdp.recording(folder, model, optimizer, every=every, depth=depth):
                recorded = steps(model, optimizer, batch, every, nn.utils.clip_grad_norm_)
                plain = steps(*build(), batch, every, UNWATCHED)
                ratio = spread(in_turn(recorded, plain, max(2, PAIRS // every)))
            lines = (Path(folder) / "rank00000.jsonl").read_bytes().splitlines()
        each = statistics.mean(map(len, lines))
        name = f"{batch * TOKENS} tokens, {what}, every {every}"
        results[name] = {"ratio": asdict(ratio), "bytes of a tensor": each}
        print(f"{name:44}: time over that without {ratio}; {each:.0f} bytes a tensor", flush=True)
    results["bytes of a step"] = bytes_of_a_step()
    print(f"a step of {LAYERS} layers: {results['bytes of a step'] / 1e6:.2f} MB", flush=True)
    return results


def bytes_of_a_step() -> int:
    """Return what the second step of a model with as many layers as Llama 7B adds to a record; width adds digits.

    A block here has 12 parameters, and one of Llama 9.
    """
    torch.manual_seed(0)
    model = Transformer(32, LAYERS).to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank00000.jsonl"
        with mmfsdp.recording(folder, model, optimizer):
            step = steps(model, optimizer, BATCHES[0], 1, nn.utils.clip_grad_norm_)
            step()
            first = path.stat().st_size
            step()
            return path.stat().st_size - first


def in_turn(ours: Callable[[], object], theirs: Callable[[], object], pairs: int) -> list[float]:
    """Return the ratios of the processor times of two functions that are called in turn, after two calls of each."""

    def seconds(function: Callable[[], object]) -> float:
        clock = time.perf_counter if IS_CUDA else time.process_time
        began = clock()
        function()
        finish()
        return clock() - began

    return [seconds(ours) / seconds(theirs) for _ in range(pairs + 2)][2:]


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model with the weights of seed 0, and its optimizer."""
    torch.manual_seed(0)
    model = Transformer(WIDTH, DEPTH).to(device())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: int, count: int, clip: Callable[..., object]
) -> Callable[[], None]:
    """Return a function that takes some training steps."""
    inputs, labels = (part.to(device()) for part in global_batch(0, batch, TOKENS))

    def run() -> None:
        for _ in range(count):
            F.cross_entropy(model(inputs), labels).backward()
            clip(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return run


if __name__ == "__main__":
    main()
