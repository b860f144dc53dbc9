"""Checkpoints to convert: DCP of four ranks, what DCP's safetensors writer leaves, optimizer state, small tensors.

Run as ``python benchmarks/checkpoint_data.py KIND PATH BYTES``, so that what measures imports no torch.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from mmfsdp.testing import run_ranks

RANKS = 4
ROWS, COLUMNS = 4096, 1024  # 16 MiB in float32
SMALL = 25_000  # elements: 100 kB


def _state(kind: str, nbytes: int, rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(rank)

    def sharded(rows: int, columns: int) -> DTensor:
        return DTensor.from_local(torch.randn(rows // RANKS, columns), mesh, [Shard(0)])

    if kind == "small":
        return {"model": {f"layers.{i}.weight": torch.randn(SMALL) for i in range(nbytes // (4 * SMALL))}}
    if kind == "names_of_one":
        return {"model": {f"layers.{i}.weight": torch.randn(RANKS * (1 + i % 7), 4) for i in range(nbytes)}}
    if kind == "names":
        return {"model": {f"layers.{i}.weight": sharded(RANKS * (1 + i % 7), 4) for i in range(nbytes)}}
    names = [f"layers.{i}.weight" for i in range(max(1, nbytes // (4 * ROWS * COLUMNS)))]
    state: dict[str, Any] = {"model": {name: sharded(ROWS, COLUMNS) for name in names}}
    if kind == "optimizer":
        moments = {name: {key: sharded(ROWS, COLUMNS) for key in ("exp_avg", "exp_avg_sq")} for name in names}
        state["optimizer"] = {"state": moments, "param_groups": [{"lr": 0.1, "params": names}]}
    return state


def _write(rank: int, kind: str, path: str, nbytes: int) -> None:
    warnings.simplefilter("ignore")
    alone = kind in ("small", "names_of_one")
    state = _state(kind, nbytes, rank) if not alone or rank == 0 else {}
    if alone:  # whole tensors, from one rank: planning so many among four takes minutes
        if rank == 0:
            dcp.save(state, checkpoint_id=path, no_dist=True)
    elif kind == "huggingface":
        writer = HuggingFaceStorageWriter(path=path, save_distributed=True)
        dcp.save(state["model"], storage_writer=writer)
    else:
        dcp.save(state, checkpoint_id=path)
        if rank == 0:
            torch.save({}, Path(path).with_name(f"{Path(path).name}.meta.pt"))


if __name__ == "__main__":
    run_ranks(_write, RANKS, sys.argv[1], sys.argv[2], int(sys.argv[3]), timeout=3600)
