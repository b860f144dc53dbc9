"""`mmfsdp-cli convert` of every writer's layout against `cp` with `sync` of what is written, and the writer's own way.

``python -m benchmarks.bench_readers --gb 2 --peers ENVIRONMENTS`` takes the figures of README.md, where ENVIRONMENTS is
a folder with an environment for each of verl, torch_checkpointing, megatron-core, fairscale and deepspeed, under these
names.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench_convert import HERE, Command, compare, converting, copying
from benchmarks.measuring import sized

__all__ = ["main"]

MEMORY, RATIO, PEER_RATIO = 80, 1.3, 1 / 3  # MB; seconds over those of cp, of the writer's own way
TORCH = "torch"


@dataclass(frozen=True)
class Layout:
    """Who writes a layout, who merges it, and what our command takes."""

    writer: str = TORCH
    """The environment that writes it."""
    peer: str | None = TORCH
    """The environment that has what we compare with."""
    target: str = "out.pth"
    source: str = "."
    """The checkpoint within the directory that was written."""
    options: tuple[str, ...] = ()
    """SOURCE in them is that directory."""


LAYOUTS = {
    "verl": Layout(peer="verl", target="out", options=("--to", "hf", "--like", "SOURCE/huggingface")),
    "local_files": Layout(options=("--reference", "SOURCE.pth")),
    "sharded_files": Layout(),
    "local_dcp": Layout(options=("--reference", "SOURCE.pth")),
    "distributed_safetensors": Layout(target="out.safetensors"),
    "torch_checkpointing": Layout("torch_checkpointing", "torch_checkpointing"),
    "megatron": Layout("megatron-core", "megatron-core"),
    "fairscale": Layout("fairscale", "fairscale"),
    "stage2": Layout(peer="deepspeed"),
    "stage3": Layout(peer="deepspeed"),
    "universal": Layout("deepspeed", None, source="universal"),
    "legacy": Layout(source="model.pth"),
    "index": Layout(target="out.safetensors"),
}

QUICKLY = ["distributed_safetensors"]


def main(arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Measure and return seconds, megabytes and ratios for each layout whose writer is there."""
    parser = argparse.ArgumentParser()
    parser.add_argument("layouts", nargs="*", choices=[*LAYOUTS, []], metavar="LAYOUT")
    parser.add_argument("--gb", type=float, default=sized(0.1, 0.04))
    parser.add_argument("--pairs", type=int, default=sized(3, 1))
    parser.add_argument("--peers", type=Path, help="a folder of environments; without it, torch's own layouts alone")
    options = parser.parse_args(arguments)
    results = {}
    for name in options.layouts or sized([*LAYOUTS], QUICKLY):
        layout = LAYOUTS[name]
        python = {TORCH: Path(sys.executable)}
        if options.peers is not None:
            python |= {path.name: path / "bin/python" for path in options.peers.iterdir()}
        if layout.writer in python:
            with tempfile.TemporaryDirectory(prefix="mmfsdp-bench-") as folder:
                results[name] = _measure(name, Path(folder), int(options.gb * 1e9), options.pairs, python)
            _say(name, results[name])
    return results


def _measure(name: str, folder: Path, nbytes: int, pairs: int, python: dict[str, Path]) -> dict[str, Any]:
    layout, made, target = LAYOUTS[name], folder / "in", folder / LAYOUTS[name].target
    words = (str(python[layout.writer]), str(HERE / "readers_data.py"), name, str(made), str(nbytes))
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{words}: exit code {done.returncode}: {done.stderr[-1000:]}")
    ours = converting(made / layout.source, target, *(word.replace("SOURCE", str(made)) for word in layout.options))
    subprocess.run(ours.words, check=True, stdout=subprocess.DEVNULL)
    written = target.rename(folder / "written")
    others = {"cp, sync": copying(written, folder / "copy", sync=True)}
    if layout.peer in python:
        merged = folder / "merged"
        peer = (str(python[layout.peer]), str(HERE / "readers_peers.py"), name, str(made), str(merged), str(nbytes))
        others["the writer's own way"] = Command(peer, made, merged)
    return compare(ours, others, pairs, idle=0 if nbytes < 1e9 else 3 * nbytes)


def _say(name: str, result: dict[str, Any]) -> None:
    seconds, megabytes = result["seconds"]["median"], result["megabytes"]
    print(f"{name:24} {seconds:.2f} s, {megabytes:.0f} MB{'' if megabytes <= MEMORY else ' MEMORY'}", flush=True)
    for other, figures in result["against"].items():
        ratio, most = figures["ratio"], RATIO if other.startswith("cp") else PEER_RATIO
        print(
            f"    {other:20} {figures['seconds']['median']:.2f} s, {figures['megabytes']:.0f} MB; ratio "
            f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}), to reach {most:.2f}: "
            f"{'yes' if ratio['median'] <= most else 'NO'}",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
