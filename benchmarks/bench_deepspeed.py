"""`mmfsdp-cli convert` of DeepSpeed's checkpoints against `cp` with `sync` and its own `zero_to_fp32`, in pairs.

``python -m benchmarks.bench_deepspeed --gb 0.5 --peer-python VENV/bin/python`` takes the figures of README.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench_convert import HERE, Command, compare, converting, copying
from benchmarks.measuring import sized

__all__ = ["main"]

_MERGE = (
    "from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_state_dict as f; "
    "f({source!r}, {target!r}, max_shard_size=None)"
)
_IMPORT = "import deepspeed.utils.zero_to_fp32"


def main(arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Measure and return seconds, megabytes and ratios, for stages 2 and 3."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--gb", type=float, default=sized(0.1, 0.001), help="weights; with the moments three times that"
    )
    parser.add_argument("--pairs", type=int, default=sized(5, 1))
    parser.add_argument("--peer-python", help="of an environment with deepspeed")
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="mmfsdp-bench-") as made:
        folder = Path(made)
        for stage in ("2", "3"):
            source, weights = folder / f"stage{stage}", folder / f"stage{stage}.pth"
            data = [sys.executable, str(HERE / "deepspeed_data.py"), stage, str(source), str(int(options.gb * 1e9))]
            subprocess.run(data, check=True)
            ours = converting(source, folder / "out.pth")
            subprocess.run(converting(source, weights).words, check=True, stdout=subprocess.DEVNULL)
            others = {"cp of the weights, sync": copying(weights, folder / "copy.pth", sync=True)}
            if options.peer_python:
                merge = _MERGE.format(source=str(source), target=str(folder / "peer"))
                others["zero_to_fp32"] = Command((options.peer_python, "-c", merge), source, folder / "peer")
                others["its imports alone"] = Command((options.peer_python, "-c", _IMPORT), source, folder / "none")
            results[f"stage {stage}"] = found = compare(ours, others, options.pairs)
            for name, figures in found["against"].items():
                ratio = figures["ratio"]
                print(
                    f"stage {stage}: {found['seconds']['median']:.2f} s, {found['megabytes']:.0f} MB; {name} "
                    f"{figures['seconds']['median']:.2f} s, {figures['megabytes']:.0f} MB; ratio "
                    f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})",
                    flush=True,
                )
    return results


if __name__ == "__main__":
    main(sys.argv[1:])
