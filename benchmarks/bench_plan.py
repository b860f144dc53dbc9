"""How long `plan()` takes on a meta-device model of 10,000 modules: median of 7 runs."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn

from benchmarks.measuring import sized
from mmfsdp import ShardPlan, plan

__all__ = ["main"]

# Shard units by class, by size, by name, and with everything switched on.
CONFIGS = {
    "module_class": {"wrap": {"kind": "module_class", "classes": "Block"}},
    "size": {"wrap": {"kind": "size", "min_num_params": 10_000}},
    "module_name": {"wrap": {"kind": "module_name", "patterns": "blocks.*"}},
    "all": {
        "wrap": {"kind": "module_class", "classes": "Block"},
        "precision": "bf16",
        "activation_checkpointing": "full",
        "sharding": {"ignored_parameters": "head.bias"},
    },
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.mlp = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.attention(self.norm(x)).chunk(3, -1)[0])


class Model(nn.Module):
    def __init__(self, depth: int, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def measure(model: nn.Module, config: dict, repeats: int) -> tuple[ShardPlan, list[float]]:
    seconds = []
    result = plan(model, config, 8)  # not counted: imports and caches
    for _ in range(repeats):
        start = time.perf_counter()
        result = plan(model, config, 8)
        seconds.append(time.perf_counter() - start)
    return result, seconds


def main(arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Measure and return seconds; ``arguments`` are the command line's, without the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=sized(2500, 20), help="blocks of four modules each")
    parser.add_argument("--repeats", type=int, default=sized(7, 2))
    options = parser.parse_args(arguments)
    with torch.device("meta"):
        model = Model(options.depth)
    num_modules = sum(1 for _ in model.modules())
    results = []
    for name, config in CONFIGS.items():
        result, seconds = measure(model, config, options.repeats)
        median, least, most = statistics.median(seconds), min(seconds), max(seconds)
        results.append({"config": name, "units": len(result.units), "median_s": median, "min_s": least, "max_s": most})
        print(
            f"plan() {name}: {num_modules:,} modules, {len(result.units):,} units: "
            f"median {median:.3f} s of {options.repeats} ({least:.3f} to {most:.3f})"
        )
    return {"modules": num_modules, "repeats": options.repeats, "results": results}


if __name__ == "__main__":
    main(sys.argv[1:])
