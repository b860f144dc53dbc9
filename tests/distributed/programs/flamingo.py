"""Trains part of a model as open_flamingo does: frozen layers, no_sync, types that stay set, states with a group."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Perceiver(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(12), nn.Linear(12, 12)

    def forward(self, x):
        return x + torch.tanh(self.fc(self.norm(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision = nn.Linear(5, 12)
        self.blocks = nn.Sequential(Perceiver(), Perceiver())
        self.head = nn.Linear(12, 3)
        self.vision.requires_grad_(False)

    def forward(self, x):
        return self.head(self.blocks(self.vision(x)))


def build(seed, group):
    torch.manual_seed(seed)
    model = FSDP(
        Model(),
        process_group=group,
        auto_wrap_policy=ModuleWrapPolicy({Perceiver}),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    FSDP.set_state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=False, offload_to_cpu=False),
        FullOptimStateDictConfig(rank0_only=False, offload_to_cpu=False),
    )
    decayed = [p for n, p in model.named_parameters() if p.requires_grad and "norm" not in n]
    rest = [p for n, p in model.named_parameters() if p.requires_grad and "norm" in n]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    # Momentum alone: with two states per parameter, torch's own full state is wrong on a CPU.
    return model, torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def train(model, optimizer, rank, world_size, steps):
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(16, 5, generator=generator), torch.randint(0, 3, (16,), generator=generator)
        halves = list(zip(x.chunk(world_size)[rank].chunk(2), y.chunk(world_size)[rank].chunk(2), strict=True))
        with model.no_sync():
            loss = F.cross_entropy(model(halves[0][0]), halves[0][1]) / 2
            loss.backward()
        last = F.cross_entropy(model(halves[1][0]), halves[1][1]) / 2
        last.backward()
        norm = model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total = (loss + last).detach()
        dist.all_reduce(total)
        losses.append([total.item() / world_size, norm.item()])
    return losses


def main(rank, world_size, folder):
    group = dist.new_group([*range(world_size)])
    model, optimizer = build(1, group)
    history = train(model, optimizer, rank, world_size, range(3))
    weights, state = model.state_dict(), FSDP.optim_state_dict(model, optimizer, group=group)
    if rank == 0:
        # Only what is trained, as open_flamingo keeps it.
        trained = {name for group in state["param_groups"] for name in group["params"]}
        torch.save({name: value for name, value in weights.items() if name in trained}, f"{folder}/trained.pt")
        torch.save({"model": weights, "optimizer": state}, f"{folder}/checkpoint.pt")
    dist.barrier()
    with FSDP.summon_full_params(model, writeback=False):
        history.append([float(param.detach().norm()) for param in model.parameters()])

    model, optimizer = build(2, group)
    stored = torch.load(f"{folder}/checkpoint.pt")
    model.load_state_dict(stored["model"], strict=False)
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, stored["optimizer"], group=group))
    assert model.check_is_root()
    return [*history, *train(model, optimizer, rank, world_size, range(3, 5))]
