"""Fine-tunes a transformer as llama-recipes does: blocks by class, full or sharded checkpoints, resuming from both."""

import functools
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import FullStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        layers = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(16, 20)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(seed):
    torch.manual_seed(seed)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer})
    model = FSDP(
        Model(),
        auto_wrap_policy=policy,
        cpu_offload=None,
        mixed_precision=None,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=torch.device("cpu"),
        limit_all_gathers=True,
        sync_module_states=False,
        param_init_fn=None,
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def train(model, optimizer, rank, world_size, steps, accumulate=2):
    losses = []
    for step in steps:
        total = torch.zeros(())
        for micro in range(accumulate):
            generator = torch.Generator().manual_seed(10 * step + micro)
            tokens = torch.randint(0, 20, (8, 6), generator=generator).chunk(world_size)[rank]
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()) / accumulate
            loss.backward()
            total += loss.detach()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / world_size)
    return losses


def save_full(model, optimizer, rank, folder):
    # torch's own class fails on a CPU with offload_to_cpu=True, which llama-recipes sets.
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
        weights = model.state_dict()
    state = FSDP.full_optim_state_dict(model, optimizer)
    if rank == 0:
        torch.save(weights, folder / "model.pt")
        torch.save(state, folder / "optimizer.pt")
    dist.barrier()


def load_full(model, optimizer, rank, folder):
    model.load_state_dict(torch.load(folder / "model.pt"))
    full = torch.load(folder / "optimizer.pt") if rank == 0 else None
    optimizer.load_state_dict(FSDP.scatter_full_optim_state_dict(full, model, optim=optimizer))


def save_sharded(model, optimizer, folder):
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "sharded"), planner=dcp.DefaultSavePlanner())


def load_sharded(model, optimizer, folder):
    reader = dcp.FileSystemReader(folder / "sharded")
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict()}
        dcp.load(state, storage_reader=reader, planner=dcp.DefaultLoadPlanner())
        model.load_state_dict(state["model"])
        stored = load_sharded_optimizer_state_dict(state["model"], "optim", reader)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, stored["optim"]))


def main(rank, world_size, folder):
    folder = Path(folder)
    model, optimizer = build(1)
    history = [train(model, optimizer, rank, world_size, range(4))]
    save_full(model, optimizer, rank, folder)
    save_sharded(model, optimizer, folder)
    history.append(train(model, optimizer, rank, world_size, range(4, 6)))

    model, optimizer = build(2)
    load_full(model, optimizer, rank, folder)
    history.append(train(model, optimizer, rank, world_size, range(4, 6)))
    model, optimizer = build(3)
    load_sharded(model, optimizer, folder)
    history.append(train(model, optimizer, rank, world_size, range(4, 6)))
    return history
