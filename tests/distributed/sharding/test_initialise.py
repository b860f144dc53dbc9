"""Weights before training: the same whatever the world, the wrapping and what the ranks began with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.distributed.models import BLOCKS, Block, build
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import mmfsdp
from mmfsdp.errors import PlanError
from mmfsdp.testing import run_ranks

Weights = dict[str, torch.Tensor]
ALONE = {"init": {"sync_states": False}}  # every rank makes its own weights


class Meta(nn.Module):
    """Every kind of initialisation: modules' own, a parameter and a buffer of the root's own, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 7)
        self.attention = nn.MultiheadAttention(7, 1)
        self.block = Block(7)
        self.norm = nn.BatchNorm1d(7)
        self.head = nn.Linear(7, 10, bias=False)
        self.head.weight = self.embed.weight
        self.token = nn.Parameter(torch.empty(3, 7))
        self.register_buffer("scale", torch.empty(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.token)
        nn.init.constant_(self.scale, 3.0)
        self.count.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.block(self.embed(x) + self.token.sum() * self.scale)))


def from_meta(rank: int, config: dict[str, Any]) -> Weights:
    torch.manual_seed(rank)  # a seed of each rank's own changes nothing
    with torch.device("meta"):
        model = Meta()
    model = mmfsdp.shard(model, config)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return mmfsdp.model_state_dict(model, rank0_only=False)


def same(first: Weights, second: Weights) -> bool:
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.exhaustive
def test_meta_weights_depend_on_neither_world_nor_wrapping_nor_engine() -> None:
    """Fails if modules are initialised after sharding, or with the rank's own generator."""
    want = run_ranks(from_meta, 1, {})[0]
    assert torch.equal(want["scale"], torch.tensor(3.0))
    assert torch.equal(want["attention.out_proj.bias"], torch.zeros(7))
    assert torch.equal(want["embed.weight"], want["head.weight"])
    assert all(bool(value.isfinite().all()) for value in want.values())
    wraps = [{"kind": "none"}, BLOCKS, {"kind": "size", "min_num_params": 1}]
    sync = {"init": {"sync_states": False}}
    for world_size in (2, 3, 4):
        for wrap in wraps:
            for weights in run_ranks(from_meta, world_size, {"wrap": wrap, **sync}):
                assert same(weights, want)
    for weights in run_ranks(from_meta, 2, {"engine": "fsdp1", "wrap": BLOCKS, **sync}):
        assert same(weights, want)
    for strategy in ("HYBRID_SHARD", "NO_SHARD"):
        size = {"shard_size": 2} if strategy == "HYBRID_SHARD" else {}
        for weights in run_ranks(from_meta, 4, {"sharding": {"strategy": strategy, **size}, **sync}):
            assert same(weights, want)


def test_the_seed_decides() -> None:
    first, second = (run_ranks(from_meta, 2, {"init": {"seed": seed}})[0] for seed in (0, 1))
    assert not torch.equal(first["embed.weight"], second["embed.weight"])


def init_everything(module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensor.zero_() if not tensor.is_floating_point() else tensor.fill_(0.5)


def with_init_fn(rank: int, by_name: bool) -> Weights:
    with torch.device("meta"):
        model = Meta()
    if by_name:
        model = mmfsdp.shard(model, {"init": {"param_init_fn": f"{__name__}:init_everything"}})
    else:
        model = mmfsdp.shard(model, param_init_fn=init_everything)
    return mmfsdp.model_state_dict(model, rank0_only=False)


@pytest.mark.parametrize("by_name", [False, True])
def test_param_init_fn(by_name: bool) -> None:
    for weights in run_ranks(with_init_fn, 2, by_name):
        assert all(bool((value == 0.5).all()) for value in weights.values() if value.is_floating_point())


def control_meta(rank: int) -> bool:
    with torch.device("meta"):
        model: Any = nn.Linear(8, 8)
    fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.reset_parameters()
    first, second = model.weight.full_tensor().chunk(2)
    return torch.equal(first, second)


def test_control_torch_alone_repeats_the_same_numbers_in_every_shard() -> None:
    assert run_ranks(control_meta, 2) == [True, True]


class Forgetful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen, self.forgotten = nn.Parameter(torch.empty(4)), nn.Parameter(torch.empty(4))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.seen)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))


class Meddling(nn.Module):
    """Initialises the weights of another unit, which is sharded by then."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.token = Block(5), nn.Parameter(torch.empty(4))

    def reset_parameters(self) -> None:
        for param in self.parameters():
            nn.init.normal_(param)


def refused(rank: int, cls: type[nn.Module], config: dict[str, Any]) -> str:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), cls())
    with pytest.raises(PlanError) as caught:
        mmfsdp.shard(model, config)
    return str(caught.value)


def test_what_is_not_initialised_is_named() -> None:
    """Fails without the checks of initialise.py: training begins with whatever was in memory, here NaN."""
    assert (
        run_ranks(refused, 2, Forgetful, ALONE)
        == [
            "Initialising Forgetful left '1.forgotten' without a value. Its reset_parameters() (or "
            "param_init_fn) must set every parameter and buffer of the module. [fqn='1']"
        ]
        * 2
    )
    assert (
        run_ranks(refused, 2, Bare, ALONE)
        == [
            "'1.weight' of Bare on the meta device cannot be initialised: the module has no reset_parameters(). "
            "Give it one, or give param_init_fn. [fqn='1']"
        ]
        * 2
    )
    for message in run_ranks(refused, 2, Meddling, {"wrap": BLOCKS}):
        assert "Initialising Meddling changed 'block.norm.weight', which is sharded already" in message


def started_apart(rank: int, config: dict[str, Any]) -> Weights:
    model = build("Conv", seed=rank)
    model.norm.running_mean.fill_(rank)
    return mmfsdp.model_state_dict(mmfsdp.shard(model, config), rank0_only=False)


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "replicate"])
def test_ranks_that_start_apart_begin_with_the_first_ranks_weights(engine: str) -> None:
    """The control, with sync_states=False, is torch's own behaviour: a mixture of both ranks' models."""
    single = build("Conv", seed=0)
    single.norm.running_mean.fill_(0)
    want = single.state_dict()
    for weights in run_ranks(started_apart, 2, {"engine": engine}):
        assert same(weights, want)
    mixed = run_ranks(started_apart, 2, {"engine": engine, "init": {"sync_states": False}})
    assert not all(same(weights, want) for weights in mixed)


def apart_on_a_grid(rank: int) -> Weights:
    config = {"sharding": {"strategy": "HYBRID_SHARD", "shard_size": 2}}
    return mmfsdp.model_state_dict(mmfsdp.shard(build("Attention", seed=rank), config), rank0_only=False)


def test_replicas_begin_equal() -> None:
    want = build("Attention", seed=0).state_dict()
    assert all(same(weights, want) for weights in run_ranks(apart_on_a_grid, 4))


def draw_on(model: Any) -> list[torch.Tensor]:
    """Draw random numbers for weights and gradients, as programs do between steps; return the whole tensors."""
    torch.manual_seed(5)
    model[0].reset_parameters()
    nn.init.normal_(model[2].weight, std=0.02)
    nn.init.trunc_normal_(model[2].bias, std=0.5)
    model(torch.ones(2, 7)).sum().backward()
    drawn = []
    with torch.no_grad():
        for param in model.parameters():
            param.grad.add_(torch.randn_like(param), alpha=0.1)
            param.add_(torch.rand_like(param) * torch.randint_like(param, 3))
            param.mul_(torch.bernoulli(torch.full_like(param, 0.5))).add_(torch.empty_like(param).uniform_(-1, 1))
            param.add_(nn.functional.dropout(torch.ones_like(param), 0.5))
            drawn += [param, param.grad]
    return [(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone() for tensor in drawn]


def build_for_drawing() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 5))


def draw_on_shards(rank: int, configs: list[dict[str, Any]]) -> list[list[torch.Tensor]]:
    return [draw_on(mmfsdp.shard(build_for_drawing(), config)) for config in configs]


def test_random_numbers_for_shards_are_those_of_whole_tensors() -> None:
    """With one seed, DTensor on the CPU fills every rank's shard with the same numbers."""
    configs: list[dict[str, Any]] = [{}, {"cpu_offload": True}, {"sharding": "NO_SHARD"}, {"sharding": "SHARD_GRAD_OP"}]
    single = draw_on(build_for_drawing())
    for found in (drawn for ranks in run_ranks(draw_on_shards, 3, configs) for drawn in ranks):
        assert len(found) == len(single)
        for ours, alone in zip(found, single, strict=True):
            torch.testing.assert_close(ours, alone, rtol=1e-6, atol=1e-6)


def draw_on_whole_params(rank: int) -> list[torch.Tensor]:
    model = mmfsdp.shard(build_for_drawing(), {"engine": "fsdp1"})
    with mmfsdp.full_params(model):
        draw_on_params(model)
    with mmfsdp.full_params(model):
        return [param.detach().clone() for param in model.parameters()]


def draw_on_params(model: nn.Module) -> None:
    torch.manual_seed(5)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.1)


def test_random_numbers_for_flat_parameters_are_drawn_on_whole_ones() -> None:
    draw_on_params(model := build_for_drawing())
    for found in run_ranks(draw_on_whole_params, 2):
        torch.testing.assert_close(found, [*model.parameters()])


def draw_on_other_meshes(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw on a DTensor that no sharded model has, before and after a model is sharded."""
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("other",))
    drawn = []
    for _ in range(2):
        tensor = distribute_tensor(torch.zeros(4, 4), other, [Shard(0)])
        torch.manual_seed(5)
        drawn.append(tensor.normal_().to_local().clone())
        mmfsdp.shard(build_for_drawing())
    return drawn[0], drawn[1]


def test_random_numbers_of_other_tensors_are_left_to_torch() -> None:
    for before, after in run_ranks(draw_on_other_meshes, 2):
        assert torch.equal(before, after)
