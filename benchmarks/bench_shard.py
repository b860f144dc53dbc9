"""Peak memory of `shard()` for a model of 384 MiB on 4 ranks: from the meta device, from real weights, with offload."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import torch.nn as nn

import mmfsdp
from benchmarks.measuring import MB, Peak, peak_of, sized
from mmfsdp.testing import close_ranks, run_ranks

__all__ = ["main"]

WORLD_SIZE = sized(4, 2)
WIDTH, DEPTH = sized((2048, 24), (64, 2))  # float32: 24 units of 16 MiB
ALLOWED = 60  # MB per rank beside the shards and the largest unit
CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "meta": (True, {}),
    "real weights": (False, {}),
    "meta, cpu_offload": (True, {"cpu_offload": True}),
    "real weights, cpu_offload": (False, {"cpu_offload": True}),
    "meta, replicate": (True, {"sharding": "NO_SHARD"}),
    "meta, fsdp1": (True, {"engine": "fsdp1"}),
}


class Layer(nn.Linear):
    """One unit."""


def main() -> dict[str, Any]:
    """Measure on 4 ranks, each case in fresh processes; print and return the figures."""
    results: dict[str, Any] = {}
    for name, (meta, config) in [*CASES.items()][: sized(len(CASES), 2)]:
        close_ranks()
        found = run_ranks(sharding, WORLD_SIZE, meta, config, timeout=300)
        shards, unit = max(size for size, _, _ in found), found[0][1]
        peak = Peak(*(max(getattr(part, key) for _, _, part in found) for key in Peak.__dataclass_fields__))
        limit = shards + unit + ALLOWED
        results[name] = {"shards MB": shards, "largest unit MB": unit, **asdict(peak), "to reach MB": limit}
        print(
            f"shard() of 384 MiB, {WORLD_SIZE} ranks, {name}: peak {peak.resident:.0f} MB above the start (private "
            f"{peak.private:.0f}), to reach {shards:.0f} + {unit:.0f} + {ALLOWED} = {limit:.0f} MB: "
            f"{'reached' if peak.resident <= limit else 'MISSED'}; {peak.seconds:.2f} s",
            flush=True,
        )
    close_ranks()
    return results


def sharding(rank: int, meta: bool, config: dict[str, Any]) -> tuple[float, float, Peak]:
    """This rank's shards and the largest unit in MB, and how far memory rose above the start (the model in it)."""
    with torch.device("meta" if meta else "cpu"):
        model: nn.Module = nn.Sequential(*(Layer(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    config = {"wrap": {"kind": "module_class", "classes": "Layer"}, **config}
    plan = mmfsdp.plan(model, config)
    peak = peak_of(lambda: mmfsdp.apply_plan(model, plan))
    return plan.param_bytes() / MB, max(unit.nbytes for unit in plan.units) / MB, peak


if __name__ == "__main__":
    main()
