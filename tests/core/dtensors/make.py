"""Writes a checkpoint of DTensors with a file per rank, as an FSDP2 script does, and the whole of it for comparison.

    python tests/core/dtensors/make.py DIRECTORY     # with any release of torch

Four ranks: two of data parallelism times two of tensor parallelism. The folders beside this file, named after torch's
release, were written so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

RANKS = 4


class Model(nn.Module):
    """Uneven and even sizes, bfloat16, a frozen parameter, a tied one, and a buffer without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(5, 8), nn.Linear(8, 5), nn.LayerNorm(5)
        self.small = nn.Linear(5, 3).to(torch.bfloat16)
        self.tied = nn.Linear(5, 3, dtype=torch.bfloat16)
        self.tied.weight = self.small.weight
        self.norm.bias.requires_grad_(False)
        self.register_buffer("steps", torch.tensor(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.down(self.up(x).relu()))
        return (self.small(x.bfloat16()) + self.tied(x.bfloat16())).float()


def whole(tree: Any) -> Any:
    """Return nested content with each DTensor gathered."""
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    return tree.full_tensor() if hasattr(tree, "full_tensor") else tree


def content_of(rank: int, ranks: int, parallelism: str) -> dict[str, Any]:
    """Train for a step, and return the state dicts of the model and its optimizer.

    Args:
        rank: This rank, of an initialised world.
        ranks: Their number.
        parallelism: ``'fsdp'``, ``'hsdp'`` (two replicas), ``'tp'`` (FSDP over tensor parallelism of two), or
            ``'only tp'``.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = Model()
    if parallelism in ("fsdp", "only tp"):
        mesh = init_device_mesh("cpu", (ranks,))
    else:
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("outer", "inner"))
    if "tp" in parallelism:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh if parallelism == "only tp" else mesh["inner"], plan)
    if parallelism != "only tp":
        for part in (model.up, [model.small, model.tied], model):  # a unit has one dtype
            fully_shard(part, mesh=mesh["outer"] if parallelism == "tp" else mesh)
    trained = [param for param in model.parameters() if param.requires_grad]
    # Not fused or foreach: parameters of one group may have several meshes.
    optimizer = torch.optim.AdamW([{"params": trained[:2], "lr": 0.1}, {"params": trained[2:]}], foreach=False)
    model(torch.ones(2, 5) * (1 + rank // 2)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


def _main(rank: int, directory: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS)
    content = content_of(rank, RANKS, "tp")
    torch.save(content, f"{directory}/step3_rank{rank}.pt")
    finish(directory, content)


def finish(directory: str, content: dict[str, Any]) -> None:
    """Save the whole of what the ranks have saved, and end the world."""
    full = whole(content)
    if dist.get_rank() == 0:
        torch.save(full, f"{directory}/full.pth")
    dist.barrier()
    dist.destroy_process_group()


def run(main: Callable[[int, str], None], ranks: int) -> None:
    """Run a function on ranks, for the directory that the command line names."""
    target = Path(sys.argv[1]).resolve()
    target.mkdir(parents=True)
    mp.spawn(main, (str(target),), ranks)
    (target / "store").unlink(missing_ok=True)


if __name__ == "__main__":
    run(_main, RANKS)
