"""Writes a DCP checkpoint of FSDP2 over tensor parallelism, in which one tensor's parts are in several pieces.

    python tests/core/strided/make.py DIRECTORY     # with torch 2.9; newer releases refuse to save "packed"

Four ranks: two of data parallelism times two of tensor parallelism. The folder beside this file, named after torch's
release, was written so.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn

RANKS = 4


def _main(rank: int, store: str, directory: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    weight = torch.arange(40.0).reshape(10, 4)
    model = nn.ModuleDict({"rows": nn.Linear(4, 10, bias=False), "packed": nn.Linear(4, 10, bias=False)})
    place = mesh.get_local_rank("tp")
    for name, placement, local in (
        ("rows", Shard(0), weight.chunk(2)[place]),
        # As transformers shards gate_up_proj: the half of each of two matrices that lie one after the other.
        ("packed", _StridedShard(0, split_factor=2), torch.cat([each.chunk(2)[place] for each in weight.chunk(2)])),
    ):
        held = DTensor.from_local(
            local, mesh["tp"], [placement], run_check=False, shape=weight.shape, stride=weight.stride()
        )
        model[name].weight = nn.Parameter(held)
    for part in model.values():
        fully_shard(part, mesh=mesh["dp"])
    dcp.save(model.state_dict(), checkpoint_id=directory)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(_main, (f"{tempfile.mkdtemp()}/store", str(Path(sys.argv[1]).resolve())), RANKS)
