"""Writes local state dicts of fairscale's FSDP with its metadata, and what its own function makes of them.

    pip install --no-deps fairscale==0.4.13
    python tests/core/fairscale/make.py tests/core/fairscale/0.4.13

Three ranks on the CPU: uneven parts, nested units, one whose parameters are not flattened, tied weights, and buffers.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

RANKS = 3


class Model(nn.Module):
    def __init__(self, wrap: type) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.inner = wrap(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)))
        self.plain = wrap(nn.Linear(5, 3, bias=False), flatten_parameters=False)
        self.last = wrap(nn.Linear(3, 4))
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight


def _main(rank: int, store: str, directory: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    from fairscale.nn.data_parallel import FullyShardedDataParallel

    def wrap(module: nn.Module, **settings: object) -> nn.Module:
        wrapped: nn.Module = FullyShardedDataParallel(module, compute_device=torch.device("cpu"), **settings)
        return wrapped

    torch.manual_seed(0)
    model = wrap(Model(wrap))  # type: ignore[arg-type]
    content = {
        "model": {key: value.clone() for key, value in model.local_state_dict().items()},
        "shard_metadata": model.local_metadata_dict(),
        "optimizer": {"state": {0: {"exp_avg": torch.full((2,), float(rank))}}},
        "epoch": 3,
    }
    torch.save(content, f"{directory}/checkpoint_3-shard{rank}.pt")
    dist.barrier()
    if rank == 0:
        files = [torch.load(f"{directory}/checkpoint_3-shard{i}.pt", weights_only=False) for i in range(RANKS)]
        metadata = [file["shard_metadata"] for file in files]
        whole = FullyShardedDataParallel.consolidate_shard_weights([file["model"] for file in files], metadata)
        # Ties are noted by the outermost unit, and fairscale copies those of the last one alone.
        ties = [pair for unit in metadata[0]["param_metadata"] for pair in unit["shared_param_info"]]
        whole |= {second: whole[first] for first, second in ties}
        torch.save(whole, f"{directory}/whole.pth")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    (target / "shards").mkdir(parents=True)
    mp.spawn(_main, (f"{tempfile.mkdtemp()}/store", str(target / "shards")), RANKS)
    (target / "shards/whole.pth").rename(target / "whole.pth")
