"""A script whose background save fails, or does not; tests run it in processes that end as a user's do."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import mmfsdp


class Odd:
    """Is copied, and cannot be written in the background."""

    def __reduce__(self) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise OSError("the disk is full")
        return Odd, ()


def train(mode: str, target: str) -> None:
    """Save in the background, and end without result() unless ``mode`` says so."""
    dist.init_process_group("gloo")
    model = mmfsdp.shard(nn.Linear(4, 4))
    odd = Odd() if dist.get_rank() == 0 and mode != "works" else None
    save = mmfsdp.save_checkpoint(target, model, extra={"odd": odd}, blocking=False)
    if mode == "asked":
        try:
            save.result()
        except mmfsdp.errors.CheckpointError:
            print("asked")
    if mode == "raises":
        raise RuntimeError("another error")


def child(rank: int, mode: str, target: str) -> None:
    """Run as a rank that multiprocessing has spawned."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="1")
    train(mode, target)


if __name__ == "__main__":
    how, *arguments = sys.argv[1:]
    if how == "spawn":
        mp.spawn(child, (*arguments,), nprocs=1)
    else:
        atexit.register(print, "another handler", flush=True)
        train(*arguments)
