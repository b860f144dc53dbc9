"""Loss of 20 steps, sharded against one process on the same global batches: AdamW, clipping, accumulation."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import mmfsdp
from benchmarks.measuring import sized
from benchmarks.models import Transformer, global_batch
from mmfsdp.testing import run_ranks

__all__ = ["main"]

STEPS, ACCUMULATE, BATCH, CLIP = sized(20, 2), 2, 16, 0.5
WRAP = {"kind": "module_class", "classes": "Block"}
CASES: dict[str, dict[str, Any]] = {
    "fsdp2 FULL_SHARD": {},
    "fsdp2 SHARD_GRAD_OP": {"sharding": "SHARD_GRAD_OP"},
    "fsdp2 NO_SHARD": {"engine": "fsdp2", "sharding": "NO_SHARD"},
    "fsdp2 HYBRID_SHARD": {"sharding": {"strategy": "HYBRID_SHARD", "shard_size": 2}},
    "fsdp2 _HYBRID_SHARD_ZERO2": {"sharding": {"strategy": "_HYBRID_SHARD_ZERO2", "shard_size": 2}},
    "fsdp1 FULL_SHARD": {"engine": "fsdp1"},
    "fsdp1 FULL_SHARD flat": {"engine": "fsdp1", "sharding": {"use_orig_params": False}},
    "fsdp1 SHARD_GRAD_OP": {"engine": "fsdp1", "sharding": "SHARD_GRAD_OP"},
    "fsdp1 NO_SHARD": {"engine": "fsdp1", "sharding": "NO_SHARD"},
    "fsdp1 HYBRID_SHARD": {"engine": "fsdp1", "sharding": {"strategy": "HYBRID_SHARD", "shard_size": 2}},
    "fsdp1 _HYBRID_SHARD_ZERO2": {"engine": "fsdp1", "sharding": {"strategy": "_HYBRID_SHARD_ZERO2", "shard_size": 2}},
    "replicate NO_SHARD": {"engine": "replicate"},
}


def main() -> dict[str, Any]:
    """Run all cases on 2 and 4 ranks and return the largest relative difference of each."""
    reference = train(build(), 0, 1)
    results: dict[str, Any] = {}
    for ranks in sized((2, 4), (2,)):
        for name, config in [*CASES.items()][: sized(len(CASES), 2)]:
            losses, norms = run_ranks(sharded, ranks, {**config, "wrap": WRAP})[0]
            loss, norm = difference(losses, reference[0]), difference(norms, reference[1])
            results[f"{name}, {ranks} ranks"] = {"loss": loss, "norm": norm}
            print(f"{name:28} {ranks} ranks  loss differs by at most {loss:.1e}, gradient norm {norm:.1e}", flush=True)
        ours, raw = run_ranks(in_bf16, ranks)[0]
        fp32 = reference[0]
        results[f"bf16, {ranks} ranks"] = {"ours": difference(ours, fp32), "raw": difference(raw, fp32)}
        print(
            f"{'bf16':28} {ranks} ranks  from fp32: ours {difference(ours, fp32):.1e}, raw fully_shard "
            f"{difference(raw, fp32):.1e}; ours from raw {difference(ours, raw):.1e}",
            flush=True,
        )
    return results


def difference(values: list[float], reference: list[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(values, reference, strict=True))


def build() -> nn.Module:
    """Return the model with the weights of seed 0."""
    torch.manual_seed(0)
    return Transformer()


def train(model: nn.Module, rank: int, ranks: int, clip: Any = None, no_sync: Any = None) -> Any:
    """Return the global loss and gradient norm of each step."""
    clip = clip or (lambda model: nn.utils.clip_grad_norm_(model.parameters(), CLIP))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, norms = [], []
    for step in range(STEPS):
        total = torch.zeros(())
        for micro in range(ACCUMULATE):
            inputs, labels = global_batch(step * ACCUMULATE + micro, BATCH)
            last = micro == ACCUMULATE - 1
            with contextlib.nullcontext() if last or no_sync is None else no_sync(model):
                loss = F.cross_entropy(model(inputs.chunk(ranks)[rank]).float(), labels.chunk(ranks)[rank]) / ACCUMULATE
                loss.backward()
            total += loss.detach()
        norms.append(float(clip(model)))
        optimizer.step()
        optimizer.zero_grad()
        if ranks > 1:
            dist.all_reduce(total)
        losses.append(float(total) / ranks)
    return losses, norms


def sharded(rank: int, config: dict[str, Any]) -> Any:
    """Train through `mmfsdp.shard`."""
    model = mmfsdp.shard(build(), config)
    return train(model, rank, dist.get_world_size(), lambda m: mmfsdp.clip_grad_norm_(m, CLIP), mmfsdp.no_sync)


def in_bf16(rank: int) -> Any:
    """Train in bf16 through `mmfsdp.shard` and through torch's calls on the same units."""
    ranks = dist.get_world_size()
    model = mmfsdp.shard(build(), {"wrap": WRAP, "precision": "bf16"})
    ours = train(model, rank, ranks, lambda m: mmfsdp.clip_grad_norm_(m, CLIP))[0]
    raw_model = build()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (ranks,))
    for block in raw_model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(raw_model, mesh=mesh, mp_policy=policy)
    return ours, train(raw_model, rank, ranks)[0]


if __name__ == "__main__":
    main()
