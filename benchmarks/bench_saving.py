"""How long a background save holds training up: the copy to CPU memory, over tensors copied one by one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import mmfsdp
from benchmarks.measuring import Ratio, paired, sized
from benchmarks.models import Transformer
from benchmarks.on_ranks import compared_on_ranks, device, finish
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.saving.background import saver_of

__all__ = ["main"]

WIDTH, DEPTH, PAIRS = *sized((1024, 21), (64, 2)), sized(10, 2)  # 1.06 GB


def main() -> dict[str, Any]:
    """Measure on 2 ranks and return the ratio."""
    return compared_on_ranks({"staging over copying": staging})


def staging(rank: int) -> Ratio:
    """The copy that `save_checkpoint(..., blocking=False)` waits for, and the simplest one that would do."""
    model = mmfsdp.shard(Transformer(WIDTH, DEPTH).to(device()), {"wrap": {"kind": "module_class", "classes": "Block"}})
    content = {name: value.to_local() for name, value in model.state_dict().items()}
    saver = saver_of(find_sharded_model(model).mesh)

    def ours() -> None:
        dist.barrier()
        saver.stage(content)
        finish()

    def theirs() -> None:
        dist.barrier()
        for value in content.values():
            torch.empty_like(value, device="cpu").copy_(value)
        finish()

    return paired(ours, theirs, PAIRS)


if __name__ == "__main__":
    main()
