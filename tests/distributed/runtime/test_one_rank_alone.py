"""One rank alone does what people do to look at a model, at every point of a training step; training must not notice.

Without pure getters the rank that looks frees what is gathered, and gathers once more than the others do: gloo aborts
or everybody waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.models import BLOCKS, adamw, build, difference, train
from torch import nn
from torch.distributed.tensor import DTensor

import mmfsdp
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.state.local_view import LocalView
from mmfsdp.testing import run_ranks

X = torch.arange(8)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def look_at_grads(model: nn.Module) -> Any:
    return [None if param.grad is None else local(param.grad).sum().item() for param in model.parameters()]


LOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "count": lambda model: sum(param.numel() for param in model.parameters()),
    "count trained": lambda model: sum(param.numel() for param in model.parameters() if param.requires_grad),
    "first": lambda model: next(model.parameters()).device,
    "names": lambda model: [(name, param.shape) for name, param in model.named_parameters(remove_duplicate=False)],
    "values": lambda model: [local(param.detach()).double().abs().sum().item() for param in model.parameters()],
    "submodule": lambda model: [sum(param.numel() for param in module.parameters()) for module in model.modules()],
    "gradients": look_at_grads,
    "buffers": lambda model: [buffer.shape for buffer in model.buffers()],
    "modules": lambda model: [name for name, _ in model.named_modules()],
    "repr": lambda model: [repr(model), str(model)],
    "plan": lambda model: str(find_sharded_model(model).plan),
    "owner": lambda model: find_sharded_model(model).roles([*model.parameters(), X]),
    "average": lambda model: [param.sum().item() for param in views[id(model)].tree().parameters()],
}
SHARDED_LOOKS: dict[str, Callable[[nn.Module], Any]] = {  # collective or refused with fsdp1, by torch's own rule
    "optimizer": lambda model: adamw(model).state_dict(),
    "state dict": lambda model: {name: value.shape for name, value in model.state_dict().items()},
    "state dict with grads": lambda model: [value.requires_grad for value in model.state_dict(keep_vars=True).values()],
    "state dict of parts": lambda model: [list(module.state_dict()) for module in model.modules()],
}
views: dict[int, LocalView] = {}
CONFIGS: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {"wrap": BLOCKS},
    "one unit": {"wrap": "none"},
    "SHARD_GRAD_OP": {"wrap": BLOCKS, "sharding": "SHARD_GRAD_OP"},
    "to fewer ranks": {"wrap": BLOCKS, "sharding": {"reshard_after_forward": 2}},
    "NO_SHARD": {"wrap": BLOCKS, "sharding": "NO_SHARD"},
    "HYBRID_SHARD": {"wrap": BLOCKS, "sharding": {"strategy": "HYBRID_SHARD", "shard_size": 2}},
    "fsdp1": {"wrap": BLOCKS, "engine": "fsdp1"},
    "fsdp1 SHARD_GRAD_OP": {"wrap": BLOCKS, "engine": "fsdp1", "sharding": "SHARD_GRAD_OP"},
}
LARGE = ("HYBRID_SHARD", "to fewer ranks")
EACH = ("FULL_SHARD", "fsdp1")  # every look in a training of its own: none can undo what another did


def weights_after(config: dict[str, Any], look: Callable[[nn.Module], Any] | None) -> list[torch.Tensor]:
    """Train two steps with a dry run and an evaluation before, ``look``ing at each turn."""
    rank = dist.get_rank()
    model = mmfsdp.shard(build("Attention"), config)
    views[id(model)] = LocalView(model)

    def turn(*_: Any) -> None:
        if look is not None and rank == 0:
            look(model)

    turn()
    flat = config.get("engine") == "fsdp1"  # torch's optimizers refuse its parameters once a forward ran
    optimizer = adamw(model) if flat else None
    loss = model(X).float().sum()  # a dry run: no backward
    del loss
    turn()
    optimizer = optimizer or adamw(model)
    with torch.no_grad():
        for _ in range(2):
            model(X)
            turn()
    model.get_submodule("" if flat else "block.up").register_forward_hook(turn)
    for step in range(2):
        loss = model((X + step + rank) % 10).float().square().mean()
        turn()
        loss.backward()
        turn()
        optimizer.step()
        turn()
        optimizer.zero_grad()
        turn()
    views.clear()
    return list(mmfsdp.model_state_dict(model, rank0_only=False).values())


def alone(rank: int, config: dict[str, Any], together: bool) -> bool:
    undisturbed = weights_after(config, None)
    looks = LOOKS | ({} if config.get("engine") == "fsdp1" else SHARDED_LOOKS)
    every = [*looks.values()]
    if together:
        looks = {"one of all": lambda model: [look(model) for look in every]}
    for name, action in looks.items():
        disturbed = weights_after(config, action)
        assert all(map(torch.equal, undisturbed, disturbed)), name
    return True


@pytest.mark.sample("one unit", "fsdp1 SHARD_GRAD_OP", "SHARD_GRAD_OP", "NO_SHARD")
@pytest.mark.parametrize("name", CONFIGS)
def test_looking_changes_nothing(name: str) -> None:
    """Fails if the root's `named_parameters` reshards, or torch's own hook of `state_dict` does."""
    assert all(run_ranks(alone, 4 if name in LARGE else 2, CONFIGS[name], name not in EACH))


def shown_between(rank: int, config: dict[str, Any]) -> None:
    single = build("Attention")
    model = mmfsdp.shard(build("Attention"), config)
    before = dict(model.named_parameters())
    loss = model(X).sum()
    for shown in (dict(model.named_parameters()), model.state_dict(keep_vars=True)):
        assert list(shown) == [name for name, _ in single.named_parameters()]
        assert all(shown[name] is before[name] and isinstance(shown[name], DTensor) for name in shown)
    detached = model.state_dict()
    assert all(isinstance(value, DTensor) and not value.requires_grad for value in detached.values())
    part = model.get_submodule("head").state_dict()
    assert all(torch.equal(local(part[name]), local(detached[f"head.{name}"])) for name in part)
    loss.backward()


@pytest.mark.parametrize("name", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "one unit"])
def test_shards_are_shown_whatever_is_gathered(name: str) -> None:
    run_ranks(shown_between, 2, CONFIGS[name])


def evaluated(rank: int, strategy: str, how: str) -> float:
    """Write to shards that an evaluation left gathered; the next forward must see it."""
    model = mmfsdp.shard(build("Attention"), {"wrap": BLOCKS, "sharding": strategy})
    other = build("Attention", seed=2)
    expected = other(X).sum().item()
    with torch.no_grad():
        model(X)
    new = dict(other.named_parameters())
    if how == "load":
        mmfsdp.load_model_state_dict(model, other.state_dict())
    elif how == "torch's load":
        own = mmfsdp.shard(build("Attention", seed=2), {"wrap": BLOCKS, "sharding": strategy})
        model.load_state_dict(own.state_dict())
    elif how == "full_params":
        with mmfsdp.full_params(model), torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(new[name])
    elif how == "optimizer":
        # A step of 1 along (old - new).
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for name, param in model.named_parameters():
            whole = param.full_tensor().detach() - new[name].detach()
            param.grad = torch.distributed.tensor.distribute_tensor(whole, param.device_mesh, param.placements)
        optimizer.step()
    else:
        with torch.no_grad():
            for name, param in model.named_parameters():
                value = torch.distributed.tensor.distribute_tensor(new[name], param.device_mesh, param.placements)
                if how == "data":
                    param.data.copy_(value)
                else:
                    param.copy_(value)
        if how == "data":
            model.eval()  # as evaluations begin
    with torch.no_grad():
        return abs(model(X).sum().item() - expected)


@pytest.mark.parametrize("how", ["load", "torch's load", "full_params", "optimizer", "by hand", "data"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_what_is_written_after_an_evaluation_is_seen(strategy: str, how: str) -> None:
    assert max(run_ranks(evaluated, 2, strategy, how)) < 1e-4


def gathers_in_evaluation(rank: int, strategy: str) -> list[int]:
    model = mmfsdp.shard(build("Attention"), {"wrap": BLOCKS, "sharding": strategy})

    def gathers(step: Callable[[], Any]) -> int:
        with torch.profiler.profile() as profile:
            step()
        return sum(event.count for event in profile.key_averages() if event.key == "c10d::_allgather_base_")

    def evaluate() -> None:
        with torch.no_grad():
            model(X)

    return [*(gathers(evaluate) for _ in range(3)), gathers(lambda: model(X).sum().backward())]


def test_evaluation_gathers_as_often_as_the_strategy_says() -> None:
    """Two units: the root, which stays gathered, and a block. Fails if each forward without gradients reshards."""
    assert run_ranks(gathers_in_evaluation, 2, "SHARD_GRAD_OP") == [[2, 0, 0, 2]] * 2
    # Training gathers the block for its backward as well.
    assert run_ranks(gathers_in_evaluation, 2, "FULL_SHARD") == [[2, 1, 1, 3]] * 2


def evaluating_between(rank: int, config: dict[str, Any]) -> Any:
    model = mmfsdp.shard(build("Attention"), config)
    optimizer = adamw(model)
    curve = []
    for step in range(2):
        curve += train(model, optimizer, steps=1, first=step)
        with torch.no_grad():
            model(X)
            model(X)
    return curve


@pytest.mark.parametrize("name", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "fsdp1"])
def test_evaluating_between_steps(name: str) -> None:
    single = build("Attention")
    reference = train(single, adamw(single), steps=2, sharded=False)
    for curve in run_ranks(evaluating_between, 2, CONFIGS[name]):
        assert difference(curve, reference) <= 1e-5
