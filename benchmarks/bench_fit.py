"""How long searches for settings that fit take: Llamas of 8 and 6.7 billion parameters on 64 ranks, on one core."""

from __future__ import annotations

import argparse
import cProfile
import pstats
import resource
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mmfsdp
from benchmarks.measuring import sized

__all__ = ["main"]


_MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "8 B": ("80GiB", {"intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}),
    "6.7 B": ("40GiB", {}),
}
"""The memory of a device, and sizes that differ from those of the first Llama."""


def main(arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Search and return the processor seconds; ``arguments`` are the command line's, without the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=_MODELS, nargs="+", default=sized([*_MODELS], ["6.7 B"]))
    parser.add_argument("--layers", type=int, default=sized(32, 2))
    parser.add_argument("--samples", type=int, default=sized(8, 1), help="of 4,096 tokens, on each rank")
    parser.add_argument("--ranks", type=int, default=sized(64, 2))
    parser.add_argument("--count", type=int, default=sized(3, 1), help="settings to find")
    parser.add_argument("--profile", action="store_true", help="print the functions that take most, which slows all")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    loop = _seconds(_loop)
    print(f"20 million additions in Python take {loop:.2f} s here")
    return {"loop": loop, **{name: _search(name, options) for name in options.model}}


def _search(name: str, options: argparse.Namespace) -> dict[str, Any]:
    memory, sizes = _MODELS[name]
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=options.layers, use_cache=False, **sizes))
    tokens = torch.empty(options.samples, 4096, dtype=torch.int64, device="meta")
    batch = {"input_ids": tokens, "labels": tokens}
    found: list[mmfsdp.rehearsal.Fit] = []

    def search() -> None:
        found.append(mmfsdp.fit(model, batch, memory=memory, ranks=options.ranks, count=options.count))

    with cProfile.Profile() if options.profile else _Unprofiled() as profile:
        seconds = _seconds(search)
    if isinstance(profile, cProfile.Profile):
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    fit = found[0]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    best = fit.options[0] if fit.options else fit.smallest
    taken = f"{seconds:.1f} s of the processor, {peak / 1e6:.0f} MB"
    print(f"{name}: {fit.considered} combinations, {fit.rehearsed} rehearsed: {taken}")
    print(f"{best}\n{best.yaml}")
    return {
        "seconds": seconds,
        "considered": fit.considered,
        "rehearsed": fit.rehearsed,
        "best": best.describe(),
        "peak": peak,
    }


class _Unprofiled:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _seconds(function: Any) -> float:
    began = time.process_time()
    function()
    return time.process_time() - began


def _loop() -> None:
    """20 million additions: what tells fast processors from slow ones."""
    total = 0
    for number in range(20_000_000):
        total += number


if __name__ == "__main__":
    main(sys.argv[1:])
