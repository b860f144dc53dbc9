"""Do one job with mmfsdp, `fully_shard`, accelerate, Lightning Fabric or DeepSpeed, and print the losses.

    torchrun --standalone --nproc-per-node 2 examples/frameworks/same_job.py --tool torch --weights first.pth --dir run

The job: shard a model, train three steps in bfloat16 with clipping, and save weights and optimizer state.
docs/explanation/why.md compares the five. Fabric needs `pip install lightning-fabric`. DeepSpeed needs `pip install
deepspeed ninja`, a C++ compiler, and on a machine without a GPU the variable `DS_ACCELERATOR=cpu`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def build() -> nn.Module:
    """Four blocks and a head."""
    return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(64, 8))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip: Callable[[], object],
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
) -> list[float]:
    """Train three steps, each rank on its own batches; return this rank's losses."""
    losses = []
    for step in range(3):
        batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        loss = model(batch).float().square().mean()
        backward(loss)
        clip()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_engine(engine: Any) -> list[float]:
    """Train three steps with an engine of DeepSpeed, which clips and sets gradients to zero by itself."""
    losses = []
    for step in range(3):
        batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        loss = engine(batch.bfloat16()).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def with_mmfsdp(start: Path, saved: Path) -> list[float]:
    """Plan and shard with mmfsdp."""
    import mmfsdp

    dist.init_process_group("gloo")
    with torch.device("meta"):
        model = build()
    model = mmfsdp.shard(model, wrap="Block", precision="bf16")
    mmfsdp.load_checkpoint(start, model)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = train(model, optimizer, lambda: mmfsdp.clip_grad_norm_(model, 1.0))
    mmfsdp.save_checkpoint(saved, model, optimizer)
    return losses


def with_torch(start: Path, saved: Path) -> list[float]:
    """Shard with torch alone."""
    dist.init_process_group("gloo")
    with torch.device("meta"):
        model = build()
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mp_policy=BF16)
    fully_shard(model, mp_policy=BF16)
    model.to_empty(device="cpu")
    weights = torch.load(start) if dist.get_rank() == 0 else {}
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    optimizer = torch.optim.AdamW(model.parameters())
    losses = train(model, optimizer, lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"state_dict": model_state, "optimizer": optimizer_state}, checkpoint_id=saved)
    return losses


def with_accelerate(start: Path, saved: Path) -> list[float]:
    """Shard with accelerate's FSDP2 plugin."""
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        mixed_precision_policy=BF16,
        cpu_ram_efficient_loading=True,
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=True)
    # On the CPU, `prepare` leaves the plugin out and makes a DistributedDataParallel. A GPU sets these attributes.
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    model = build()
    if accelerator.is_main_process:  # `prepare` sends these weights to the other ranks
        model.load_state_dict(torch.load(start))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = train(model, optimizer, lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0), accelerator.backward)
    accelerator.save_state(str(saved))
    return losses


def with_fabric(start: Path, saved: Path) -> list[float]:
    """Shard in Lightning Fabric's strategy."""
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import ModelParallelStrategy

    def parallelize(model: nn.Module, mesh: dist.DeviceMesh) -> nn.Module:
        for module in model.modules():
            if isinstance(module, Block):
                fully_shard(module, mesh=mesh["data_parallel"], mp_policy=BF16)
        return fully_shard(model, mesh=mesh["data_parallel"], mp_policy=BF16)

    strategy = ModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    with fabric.init_module(empty_init=True):
        model = build()
    model = fabric.setup_module(model)
    fabric.load_raw(start, model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
    losses = train(model, optimizer, lambda: fabric.clip_gradients(model, optimizer, max_norm=1.0), fabric.backward)
    fabric.save(saved, {"model": model, "optimizer": optimizer})
    return losses


def with_deepspeed(start: Path, saved: Path) -> list[float]:
    """Shard with DeepSpeed's ZeRO stage 3."""
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
    }
    deepspeed.init_distributed("gloo")
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = build()
    with deepspeed.zero.GatheredParameters([*model.parameters()], modifier_rank=0):
        if dist.get_rank() == 0:
            model.load_state_dict(torch.load(start))
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    losses = train_engine(engine)
    engine.save_checkpoint(str(saved))
    return losses


TOOLS = {
    "mmfsdp": with_mmfsdp,
    "torch": with_torch,
    "accelerate": with_accelerate,
    "fabric": with_fabric,
    "deepspeed": with_deepspeed,
}


def main() -> None:
    """Do the job with one tool."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tool", choices=TOOLS, required=True)
    parser.add_argument("--weights", type=Path, required=True, help="the first weights, a file of torch.save")
    parser.add_argument("--dir", type=Path, required=True, help="where the checkpoint goes")
    args = parser.parse_args()
    losses = TOOLS[args.tool](args.weights, args.dir)
    if dist.get_rank() == 0:
        print("LOSSES", *(f"{loss:.6f}" for loss in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
