"""What verification costs: loading with it and without, pair by pair, on 2 ranks, as saved and divided anew."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

import mmfsdp
from benchmarks.measuring import Ratio, paired, sized
from benchmarks.models import Transformer
from mmfsdp.testing import close_ranks, run_ranks

__all__ = ["main"]

WIDTH, DEPTH = sized((1024, 10), (64, 2))  # 0.5 GB
PAIRS = sized(15, 1)
LIMIT = 1.15
WRAP = {"kind": "module_class", "classes": "Block"}


def main() -> dict[str, Any]:
    """Measure on 2 ranks, print and return the figures."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="mmfsdp-bench-") as folder:
        for kind in sized(("full", "local", "sharded"), ("sharded",)):
            for savers in sized((2, 3), (3,)):
                path = Path(folder, f"{kind}_{savers}")
                run_ranks(saving, savers, str(path), kind, timeout=300)
                close_ranks()
                ratio = run_ranks(loading, 2, str(path), timeout=600)[0]
                close_ranks()
                results[f"{kind}, saved by {savers}"] = ratio.to_dict()
                verdict = "reached" if ratio.ratio.median <= LIMIT else "MISSED"
                print(
                    f"{kind} saved by {savers} ranks, loaded by 2: verified / not {ratio.ratio}; "
                    f"{ratio.ours} s, {ratio.theirs} s; at most {LIMIT}: {verdict}",
                    flush=True,
                )
    return results


def saving(rank: int, path: str, kind: str) -> None:
    """Save a model of 0.5 GB."""
    model = mmfsdp.shard(Transformer(WIDTH, DEPTH), {"wrap": WRAP})
    mmfsdp.save_checkpoint(path, model, kind=kind)  # type: ignore[arg-type]


def loading(rank: int, path: str) -> Ratio:
    """Load with verification and without, all ranks at once."""
    model = mmfsdp.shard(Transformer(WIDTH, DEPTH), {"wrap": WRAP})

    def load(verify: bool) -> None:
        dist.barrier()
        mmfsdp.load_checkpoint(path, model, verify=verify)
        dist.barrier()

    return paired(lambda: load(True), lambda: load(False), PAIRS)


if __name__ == "__main__":
    main()
