"""Arithmetic on checkpoints against `cat` and `cp` of the same files: whole processes in pairs, and peak memory.

``python -m benchmarks.bench_arithmetic --gb 3 diff`` runs the cases with this word, on larger files: starting a program
takes as long as reading 1 GB or more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring import sized, spread

__all__ = ["main"]

WIDTH, SIZE = sized((4096, 0.8), (256, 3e-4))  # SIZE in GB, in bfloat16
PAIRS = sized(5, 1)
RANK = 16
NAMES = "one.safetensors", "two.safetensors", "three.safetensors", "adapter"
NAIVE = (
    "import sys, torch; from safetensors import safe_open\n"
    "with safe_open(sys.argv[1], 'pt') as a, safe_open(sys.argv[2], 'pt') as b:\n"
    "    print(all(torch.allclose(a.get_tensor(n), b.get_tensor(n), rtol=1e-2, atol=0) for n in a.keys()))\n"
)


def main(arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Measure, print and return the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("word", nargs="?", default="", help="run the cases with this word")
    parser.add_argument("--gb", type=float, default=SIZE, help="size of each checkpoint")
    parser.add_argument("--data", type=Path, help="write the checkpoints into this folder, and measure nothing")
    options = parser.parse_args(arguments)
    if options.data:
        _data(options.data, max(1, round(options.gb * 1e9 / (2 * WIDTH**2))))
        return {}
    with tempfile.TemporaryDirectory(prefix="mmfsdp-bench-", dir=os.environ.get("MMFSDP_BENCH_FOLDER")) as folder:
        home = Path(folder)
        # In a process of its own, so that this one holds little memory.
        made = [sys.executable, "-m", "benchmarks.bench_arithmetic", "--data", folder, "--gb", str(options.gb)]
        subprocess.run(made, check=True)
        one, two, three, adapter = (home / name for name in NAMES)
        out = home / "out.safetensors"
        soup, single = [one, two, three], ["cp", str(one), str(out)]
        read_all = ["sh", "-c", f"cat {one} {two} {three} > /dev/null && cp {one} {out} && sync {out}"]
        cases = {
            "average of 3 / cat of 3, cp of 1, sync": (["average", *soup, out], read_all, 1.3, 200),
            "merge-lora / cp, sync": (["merge-lora", one, adapter, out], [*_synced(single, out)], 1.3, 300),
            "convert --quantize fp8 / cp, sync": (
                ["convert", one, out, "--quantize", "fp8"],
                _synced(single, out),
                3,
                300,
            ),
            "diff --rtol / cat of both": (
                ["diff", one, two, "--rtol", "1e-2"],
                ["sh", "-c", f"cat {one} {two} > /dev/null"],
                2,
                200,
            ),
            "diff --rtol / a loop of torch.allclose": (
                ["diff", one, two, "--rtol", "1e-2"],
                [sys.executable, "-c", NAIVE, str(one), str(two)],
                1,
                200,
            ),
        }
        chosen = [name for name in cases if options.word in name][: sized(None, 4)]
        return {name: _compared(name, out, *cases[name]) for name in chosen}


def _data(home: Path, matrices: int) -> None:
    """Write three checkpoints, close to each other, and an adapter for them."""
    import torch  # only here: the peak of a process begins with what the one that starts it holds
    from safetensors.torch import save_file

    paths = [home / name for name in NAMES[:3]]
    generator = torch.Generator().manual_seed(0)
    base = {f"layers.{index}.weight": torch.randn(WIDTH, WIDTH, generator=generator) for index in range(matrices)}
    for place, path in enumerate(paths):
        save_file({name: (tensor * (1 + place * 2**-9)).bfloat16() for name, tensor in base.items()}, path)
    adapter = home / NAMES[3]
    adapter.mkdir()
    shapes = {"A": (RANK, WIDTH), "B": (WIDTH, RANK)}
    factors = {
        f"base_model.model.layers.{index}.lora_{side}.weight": torch.randn(shape, generator=generator) / WIDTH
        for index in range(matrices)
        for side, shape in shapes.items()
    }
    save_file(factors, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}))


def _synced(words: Sequence[str], out: Path) -> list[str]:
    return ["sh", "-c", f"{' '.join(words)} && sync {out}"]


def _compared(
    name: str, out: Path, ours: Sequence[object], theirs: Sequence[str], limit: float, memory: int
) -> dict[str, Any]:
    command = [sys.executable, "-c", "from mmfsdp_cli.main import main; main()", *map(str, ours)]
    figures = [(_run(command, out), _run(theirs, out)) for _ in range(PAIRS)]
    ratio = spread([one[0] / two[0] for one, two in figures])
    seconds = [spread([pair[side][0] for pair in figures]) for side in (0, 1)]
    peak = max(one[1] for one, _ in figures)
    reached = "reached" if ratio.median <= limit and peak <= memory else "MISSED"
    print(
        f"{name}: {ratio}; {seconds[0]} s, {seconds[1]} s, {peak:.0f} MB; at most {limit} and {memory} MB: {reached}",
        flush=True,
    )
    return {"ratio": ratio.median, "low": ratio.low, "high": ratio.high, "seconds": seconds[0].median, "MB": peak}


def _run(command: Sequence[str], out: Path) -> tuple[float, float]:
    """Return the seconds and the peak memory in MB of a process."""
    out.unlink(missing_ok=True)
    os.sync()
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1):  # diff finds differences
        raise RuntimeError(f"{command} failed with {process.returncode}")
    return time.perf_counter() - began, used.ru_maxrss / 1000


if __name__ == "__main__":
    main(sys.argv[1:])
