"""Writes a checkpoint with accelerate's own functions and ``use_dcp=False``, and the whole of it for comparison.

    pip install accelerate==1.15.0 && python tests/core/dtensors/make_accelerate.py DIRECTORY

accelerate does not shard on a CPU. So this script shards the model, and then sets accelerate's state to FSDP.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.core.dtensors.make import finish, run

RANKS = 2


def _main(rank: int, directory: str) -> None:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29955}
    world |= {"ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": 2}
    os.environ |= {name: str(value) for name, value in world.items()}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.state._shared_state["distributed_type"] = DistributedType.FSDP
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5), nn.LayerNorm(5))
    model[2].bias.requires_grad_(False)
    fully_shard(model)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.1)
    (model(torch.ones(2, 5)) * torch.arange(5)).sum().backward()
    optimizer.step()
    save_fsdp_model(plugin, accelerator, model, directory, 0, use_dcp=False)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, directory, 0, use_dcp=False)
    finish(directory, {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()})


if __name__ == "__main__":
    run(_main, RANKS)
