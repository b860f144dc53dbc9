"""`load_pretrained` of 1 GB of safetensors files into a model planned on meta, 2 ranks, against `cat` of the files.

``python -m benchmarks.bench_pretrained --gb 4`` shows what does not grow with the size. The last figure is that of the
same weights in files that `convert` wrote, not verified: their data begins at 64 bytes, which the kernel copies faster.
Bytes read are those that the disk delivered to all ranks, whose pages were dropped before, as ``/proc/self/io`` counts
them; see `benchmarks.measuring.Peak` for memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import mmfsdp
from benchmarks.measuring import MB, Peak, Ratio, paired, peak_of, sized
from benchmarks.models import Transformer
from mmfsdp.checkpoint import convert
from mmfsdp.testing import close_ranks, run_ranks

__all__ = ["main"]

WIDTH, SIZE = sized((1024, 1.06), (64, 4e-4))  # SIZE in GB
PARTS = 4
PAIRS = sized(15, 1)
ALLOWED = 150  # MB per rank beside the shard
CONFIGS: dict[str, dict[str, Any]] = {
    "fsdp2": {"wrap": {"kind": "module_class", "classes": "Block"}},
    "replicate": {"sharding": "NO_SHARD"},
}


def main(arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Measure on 2 ranks, print and return the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=SIZE, help="size of the weights")
    depth = max(1, round(parser.parse_args(arguments).gb * 1e9 / (48 * WIDTH**2)))
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="mmfsdp-bench-") as name:
        folder = Path(name)
        size = written(folder, depth)
        index = folder / "model.safetensors.index.json"
        convert(index, folder / "aligned", to="safetensors_index", max_shard_size=size // PARTS)
        for case in CONFIGS:
            close_ranks()  # fresh processes have no memory to use again
            found = run_ranks(loading, 2, folder, case, depth, timeout=300)
            shard, peak = max(part for part, _, _ in found), max(peak.resident for _, peak, _ in found)
            read = sum(count for _, _, count in found) / size
            ratio = run_ranks(times, 2, folder, case, depth, timeout=600)[0]
            fits = "reached" if peak <= shard + ALLOWED else "MISSED"
            results[case] = {"shard MB": shard, "resident MB": peak, "read / size": read, **ratio.to_dict()}
            print(
                f"load_pretrained {size / 1e9:.2f} GB, {case}: shard {shard:.0f} MB, resident peak above start "
                f"{peak:.0f} MB, to reach shard + {ALLOWED}: {fits}; bytes read / size {read:.3f}; "
                f"time / cat {ratio.ratio}; ours {ratio.ours} s, cat {ratio.theirs} s",
                flush=True,
            )
        ratio = run_ranks(times, 2, folder / "aligned", "fsdp2", depth, False, timeout=600)[0]
        results["aligned"] = ratio.to_dict()
        print(f"fsdp2, files of ours: time / cat {ratio.ratio}; ours {ratio.ours} s, cat {ratio.theirs} s", flush=True)
    return results


def written(folder: Path, depth: int) -> int:
    """Write the model's weights as a folder of Hugging Face's form, and return their size in bytes."""
    weights = Transformer(WIDTH, depth).state_dict()
    files = {name: f"model-{place % PARTS}.safetensors" for place, name in enumerate(weights)}
    for file in {*files.values()}:
        save_file({name: value for name, value in weights.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return sum(value.nbytes for value in weights.values())


def sharded(case: str, depth: int) -> torch.nn.Module:
    """Return the model, planned on the meta device."""
    with mmfsdp.parameters_on_meta():
        model = Transformer(WIDTH, depth)
    return mmfsdp.shard(model, CONFIGS[case])


def loading(rank: int, folder: Path, case: str, depth: int) -> tuple[float, Peak, int]:
    """The first load of a process: this rank's part in MB, how far memory rose, and the bytes that it read."""
    small = folder / "small.safetensors"  # what is imported on first use is no cost of loading
    if rank == 0:
        save_file({"weight": torch.zeros(1, 1)}, small)
    dist.barrier()
    mmfsdp.load_pretrained(mmfsdp.shard(torch.nn.Linear(1, 1, bias=False), {"sharding": "NO_SHARD"}), small)
    model = sharded(case, depth)
    part = sum(getattr(param, "_local_tensor", param).nbytes for param in model.parameters())
    if rank == 0:
        for file in folder.glob("model-*"):
            dropped(file)
    dist.barrier()
    before = from_disk()
    peak = peak_of(lambda: mmfsdp.load_pretrained(model, folder / "model.safetensors.index.json", strict=True))
    return part / MB, peak, from_disk() - before


def dropped(file: Path) -> None:
    """Make the page cache let go of a file."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def from_disk() -> int:
    """Return the bytes that disks have delivered to this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def times(rank: int, folder: Path, case: str, depth: int, verify: bool = True) -> Ratio:
    """Ours on both ranks, and ``cat`` on the first."""
    model = sharded(case, depth)

    def together(work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            dist.barrier()
            work()
            dist.barrier()

        return run

    def cat() -> None:
        if rank == 0:
            with open(os.devnull, "wb") as nowhere:
                subprocess.run(["cat", *sorted(folder.glob("model-*"))], stdout=nowhere, check=True)

    index = folder / "model.safetensors.index.json"
    ours = together(lambda: mmfsdp.load_pretrained(model, index, strict=True, verify=verify))
    return paired(ours, together(cat), PAIRS)


if __name__ == "__main__":
    main(sys.argv[1:])
