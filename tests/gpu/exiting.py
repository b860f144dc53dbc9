"""A training script under torchrun: trains, saves in the background, and ends with or without tidying up."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from tests.gpu.loops import WRAP, Net, losses

import mmfsdp

if __name__ == "__main__":
    cuda = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    model = mmfsdp.shard(Net(), {"wrap": WRAP})
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    print(losses(model, device, steps=2))
    save = mmfsdp.save_checkpoint(sys.argv[1], model, kind="sharded", blocking=False)
    if sys.argv[2] == "tidy":
        save.result()
        dist.destroy_process_group()
