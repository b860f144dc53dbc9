"""Starts several ranks with NCCL: each on a GPU of its own if there are enough, else all on the first one.

NCCL refuses two ranks of one host on one GPU. If each says that it is a host of its own (``NCCL_HOSTID``), they find
each other through sockets: slow, but every message is a real one.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

__all__ = ["run"]

_PATIENCE = timedelta(seconds=100)


def run(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Call ``function(rank, device, *args)`` on ranks with NCCL, and return the results by rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (function, ranks, folder, args), nprocs=ranks)
        return [torch.load(f"{folder}/{rank}", weights_only=False, map_location="cpu") for rank in range(ranks)]


def _rank(rank: int, function: Callable[..., Any], ranks: int, folder: str, args: tuple[Any, ...]) -> None:
    cuda = torch.cuda.is_available()
    shared = cuda and torch.cuda.device_count() < ranks
    if shared:
        os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket"}
    device = torch.device("cuda", 0 if shared else rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=_PATIENCE,
        device_id=device if cuda else None,
    )
    try:
        torch.save(function(rank, device, *args), f"{folder}/{rank}")
    except BaseException:
        traceback.print_exc()
        raise
    dist.destroy_process_group()
