"""Time of a training step: through `mmfsdp.shard`, and through MMEngine's `train_step`, over torch's own calls."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mmfsdp
from benchmarks.measuring import Ratio, paired, sized
from benchmarks.models import Transformer, global_batch
from benchmarks.on_ranks import compared_on_ranks, device, finish

__all__ = ["main"]

WIDTH, DEPTH, BATCH, TOKENS, PAIRS = sized((256, 6, 16, 32, 150), (32, 2, 4, 8, 2))
WRAP = {"kind": "module_class", "classes": "Block"}


def main() -> dict[str, Any]:
    """Measure on 2 ranks and return the ratios."""
    return compared_on_ranks(
        {"shard() over fully_shard": through_shard, "train_step over fully_shard": through_train_step}
    )


def build() -> nn.Module:
    """Return the model with the weights of seed 0."""
    torch.manual_seed(0)
    return Transformer(WIDTH, DEPTH).to(device())


def raw() -> nn.Module:
    """Shard with torch's own calls, on the units that the plan has."""
    model = build()
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def stepper(model: nn.Module, rank: int) -> Any:
    """Return a function that takes one training step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, labels = (part.chunk(dist.get_world_size())[rank].to(device()) for part in global_batch(0, BATCH, TOKENS))

    def step() -> None:
        dist.barrier()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        finish()

    return step


def through_shard(rank: int) -> Ratio:
    """`mmfsdp.shard` and torch's calls."""
    return paired(stepper(mmfsdp.shard(build(), {"wrap": WRAP}), rank), stepper(raw(), rank), PAIRS, warmup=5)


def through_train_step(rank: int) -> Ratio:
    """MMEngine's `train_step` as FSDPStrategy prepares it, and a bare loop that does the same around torch's calls."""
    from mmengine.model import BaseModel
    from mmengine.optim import OptimWrapper

    from mmfsdp_mmengine import FSDPStrategy

    class Model(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = build()

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor, mode: str = "tensor") -> Any:
            return {"loss": F.cross_entropy(self.net(inputs), labels)}

    with tempfile.TemporaryDirectory() as folder:
        strategy = FSDPStrategy(work_dir=folder, model_wrapper={"config": {"wrap": WRAP}})
        strategy.logger.setLevel("ERROR")
        wrapped, optim_wrapper = strategy.prepare(Model(), optim_wrapper={"optimizer": {"type": "AdamW", "lr": 1e-3}})
    inputs, labels = (part.chunk(dist.get_world_size())[rank].to(device()) for part in global_batch(0, BATCH, TOKENS))
    plain = Model()
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for block in plain.net.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(plain, mesh=mesh)
    bare_optimizer = OptimWrapper(torch.optim.AdamW(plain.parameters(), lr=1e-3))

    def ours() -> None:
        dist.barrier()
        wrapped.train_step({"inputs": inputs, "labels": labels}, optim_wrapper)
        finish()

    def theirs() -> None:
        # What MMEngine's BaseModel.train_step does, around torch's own calls.
        dist.barrier()
        plain.train_step({"inputs": inputs, "labels": labels}, bare_optimizer)
        finish()

    return paired(ours, theirs, PAIRS, warmup=5)


if __name__ == "__main__":
    main()
