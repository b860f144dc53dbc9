"""Time of clipping gradients: `mmfsdp.clip_grad_norm_` over torch's own with foreach kernels, on the same shards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

import mmfsdp
from benchmarks.measuring import Ratio, paired, sized
from benchmarks.on_ranks import compared_on_ranks, device, finish

__all__ = ["main"]

LAYERS, WIDTH, PAIRS = 120, 64, sized(60, 2)  # 240 parameters


def main() -> dict[str, Any]:
    """Measure on 2 ranks and return the ratios."""
    return compared_on_ranks({"clip_grad_norm_ over torch's foreach": clip, "foreach=False over the same": clip_slowly})


def clip(rank: int) -> Ratio:
    """With kernels for many tensors."""
    return measured(None)


def clip_slowly(rank: int) -> Ratio:
    """Tensor by tensor."""
    return measured(False)


def measured(foreach: bool | None) -> Ratio:
    """Ours and torch's, in turn, on the gradients of one backward."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    mmfsdp.shard(model)
    model(torch.randn(2, WIDTH, device=device())).sum().backward()

    def ours() -> None:
        dist.barrier()
        mmfsdp.clip_grad_norm_(model, 1e-3, foreach=foreach)
        finish()

    def theirs() -> None:
        dist.barrier()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=True)
        finish()

    return paired(ours, theirs, PAIRS)


if __name__ == "__main__":
    main()
