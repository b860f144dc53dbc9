"""How fast shards are copied before a save in the background, and a Hugging Face folder over ``kind="sharded"``."""

from __future__ import annotations

import shutil
from typing import Any

import torch
import torch.distributed as dist

import mmfsdp
from benchmarks.measuring import Ratio, paired, sized
from benchmarks.models import Transformer
from benchmarks.on_ranks import compared_on_ranks, device, finish, shared_folder
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.saving.writing.background import saver_of

__all__ = ["main"]

WIDTH, DEPTH, PAIRS = *sized((1024, 21), (64, 2)), sized(10, 2)  # 1.06 GB


def main() -> dict[str, Any]:
    """Measure on 2 ranks and return the ratios."""
    return compared_on_ranks({"staging over copying": staging, "kind='hf' over 'sharded'": exporting})


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


def exporting(rank: int) -> Ratio:
    """Saving the weights as a folder for transformers, and as each rank's part of a DCP directory."""
    model = mmfsdp.shard(Transformer(WIDTH, DEPTH).to(device()), {"wrap": {"kind": "module_class", "classes": "Block"}})
    folder = shared_folder(rank)

    def ours() -> None:
        mmfsdp.save_checkpoint(folder / "hf", model, kind="hf", like=folder / "like", overwrite=True)

    def theirs() -> None:
        mmfsdp.save_checkpoint(folder / "sharded", model, overwrite=True)

    ratio = paired(ours, theirs, PAIRS)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    return ratio


if __name__ == "__main__":
    main()
