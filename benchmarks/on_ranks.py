"""Runs benchmarks on several ranks, or on one GPU; apart from `measuring`, which has to stay without torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from benchmarks.measuring import DEVICE, Ratio
from mmfsdp.testing import run_ranks

__all__ = ["compared_on_ranks", "device", "finish", "on_gpu", "shared_folder"]


T = TypeVar("T")


def device() -> torch.device:
    """Return where this rank computes: the first GPU with ``--device cuda``, else the CPU."""
    return torch.device("cuda", 0) if os.environ.get(DEVICE) == "cuda" else torch.device("cpu")


def finish() -> None:
    """Wait for the GPU's kernels, if there are any, so that a timing contains them."""
    if device().type == "cuda":
        torch.cuda.synchronize()


def shared_folder(rank: int) -> Path:
    """Return a new folder that all ranks write to, with a Hugging Face configuration in ``like``. Collective."""
    folders: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    folder = Path(folders[0])
    if rank == 0:
        (folder / "like").mkdir()
        (folder / "like/config.json").write_text('{"model_type": "own", "tie_word_embeddings": false}')
    dist.barrier()
    return folder


def compared_on_ranks(functions: Mapping[str, Callable[[int], Ratio]], ranks: int = 2) -> dict[str, Any]:
    """Run each function on all ranks, print the first rank's ratio under its name, and return all as plain data.

    On a GPU there is one rank, this process, with NCCL.
    """
    results = {}
    for name, function in functions.items():
        ratio = on_gpu(function) if device().type == "cuda" else run_ranks(function, ranks, timeout=300)[0]
        results[name] = ratio.to_dict()
        print(f"{name:40} ratio {ratio.ratio}; ours {ratio.ours} s, theirs {ratio.theirs} s", flush=True)
    return results


def on_gpu(function: Callable[[int], T]) -> T:
    """Return ``function(0)``, called in a world of one rank, this process, with NCCL."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=0, world_size=1, device_id=device())
        try:
            return function(0)
        finally:
            dist.destroy_process_group()
