"""Parameters held whole (ignored ones, scalars) train like all others; what else a runtime owes its model."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.distributed.models import BLOCKS, Block, adamw, build, difference, train
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import mmfsdp
from mmfsdp.testing import run_ranks

X = torch.arange(8)
HOW = ["object", "module", "name", "pattern", "module name", "scalar"]


def shard_ignoring(how: str, engine: str) -> nn.Module:
    model: Any = build()
    config: dict[str, Any] = {"engine": engine, "wrap": BLOCKS}
    if how == "object":
        return mmfsdp.shard(model, config, ignored_params=[model.blocks[0].norm.weight, model.embed.weight])
    if how == "module":
        return mmfsdp.shard(model, config, ignored_modules=[model.blocks[1].up])
    sharding = {
        "name": {"ignored_parameters": "blocks.0.norm.weight"},
        "pattern": {"ignored_parameters": "blocks.*.down.*"},
        "module name": {"ignored_modules": ["blocks.1.up"]},
        "scalar": {},
    }
    return mmfsdp.shard(model, {**config, "sharding": sharding[how]})


def train_ignoring(rank: int, how: str, engine: str) -> tuple[Any, dict[str, torch.Tensor]]:
    model = shard_ignoring(how, engine)
    curve = train(model, adamw(model), steps=3)
    plan = mmfsdp.runtime.sharded_model.find_sharded_model(model).plan
    names = [param.fqn for param in plan.ignored_params]
    return curve, {name: param.detach().clone() for name, param in model.named_parameters() if name in names}


@pytest.mark.sample(
    "object-fsdp1", "module-replicate", "module name-fsdp2", "pattern-fsdp1", "scalar-fsdp2", "name-replicate"
)
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "replicate"])
@pytest.mark.parametrize("how", HOW)
def test_ignored_parameters_train_as_if_sharded(how: str, engine: str) -> None:
    """Fails if hooks.install_hooks has no GradientAgreement: see the control."""
    single = build()
    reference = train(single, adamw(single), steps=3, sharded=False)
    (first, values), (second, others) = run_ranks(train_ignoring, 2, how, engine)
    assert difference(first, reference) <= 1e-5
    assert first == second
    if engine != "fsdp1":  # its names are those of flat parameters' views; the curves have said it all
        assert values
        assert all(torch.equal(values[name], others[name]) for name in values)
        assert all(not torch.equal(values[name], dict(build().named_parameters())[name]) for name in values)


def control_drift(rank: int) -> torch.Tensor:
    model: Any = build("Attention")
    fully_shard(model, ignored_params={model.head.bias})
    optimizer = adamw(model)
    nn.functional.cross_entropy(model(X.chunk(2)[rank]), X.chunk(2)[rank]).backward()
    optimizer.step()
    return model.head.bias.detach()


def test_control_torch_alone_lets_them_drift() -> None:
    first, second = run_ranks(control_drift, 2)
    assert not torch.equal(first, second)


class Narrow(nn.Module):
    """A head with a part of no width, as MobileBERT's where embeddings are as wide as the model."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.part = nn.Parameter(torch.empty(0, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return torch.cat([self.head(x), F.linear(x, self.part)], 1)


def narrow_losses(model: nn.Module, *parts: torch.Tensor) -> list[float]:
    optimizer = adamw(model)
    found = []
    for _ in range(3):
        loss = torch.stack([model(part).square().mean() for part in parts]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def train_narrow(rank: int, engine: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    model, x = Narrow(), torch.randn(4, 8)
    model = mmfsdp.shard(model, {"engine": engine, "wrap": {"kind": "module_class", "classes": "Linear"}})
    curve = narrow_losses(model, x.chunk(2)[rank])
    mmfsdp.clip_grad_norm_(model, 1.0)
    return curve, mmfsdp.model_state_dict(model)


def control_narrow(rank: int) -> str:
    model = Narrow()
    fully_shard(model)
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(2, 8)).mean().backward()
    return str(caught.value)


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "replicate"])
def test_parameters_without_elements(engine: str) -> None:
    torch.manual_seed(3)
    single, x = Narrow(), torch.randn(4, 8)
    reference = narrow_losses(single, *x.chunk(2))
    (first, state), (second, _) = run_ranks(train_narrow, 2, engine)
    assert [sum(pair) / 2 for pair in zip(first, second, strict=True)] == pytest.approx(reference)
    assert state.keys() == single.state_dict().keys()
    assert all(torch.allclose(state[name], value, atol=1e-6) for name, value in single.state_dict().items())


def test_control_torch_alone_fails_without_elements() -> None:
    assert "non-empty" in run_ranks(control_narrow, 2)[0]


class Outside(nn.Module):
    """Calls a block's method, and reads a block's weight, from outside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(10, 6), WithMethod(6), nn.Linear(6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block.project(self.embed(x)))


class WithMethod(Block):
    def project(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, self.up.weight, self.up.bias), self.down.weight)


def call_from_outside(rank: int, methods: list[str]) -> list[str]:
    torch.manual_seed(0)
    model, single = Outside(), Outside()
    single.load_state_dict(model.state_dict())
    wrap = {"kind": "module_class", "classes": "WithMethod"}
    mmfsdp.shard(model, {"wrap": wrap, "sharding": {"forward_methods": methods}})
    if methods:
        assert torch.allclose(model(X), single(X))
        model(X).sum().backward()
        adamw(model).step()
        return []
    with pytest.raises(RuntimeError) as caught:
        model(X)
    assert all(isinstance(param, DTensor) for param in model.parameters())  # nothing is left gathered
    return caught.value.__notes__


def test_a_method_called_from_outside_its_unit_is_named() -> None:
    """Otherwise torch says only 'mixed torch.Tensor and DTensor', and not where."""
    note = (
        "mmfsdp: 'block' (WithMethod) computed in project() with 'block.up.weight', 'block.up.bias', "
        "'block.down.weight', while the shard unit 'block' was not gathered: code other than the unit's forward reads "
        "them. List the method ('project') in sharding.forward_methods, or change the wrap policy so that 'block' is "
        "not a unit of its own (exclude_wrap_modules=['WithMethod'] in MMEngine's size policy)."
    )
    assert run_ranks(call_from_outside, 2, []) == [[note]] * 2
    assert run_ranks(call_from_outside, 2, ["project"]) == [[], []]


def collected(rank: int, engine: str) -> list[bool]:
    model = mmfsdp.FullyShardedDataParallel(build(), config={"engine": engine, "wrap": BLOCKS})
    optimizer = adamw(model)
    train(model, optimizer, steps=1)
    with mmfsdp.no_sync(model):
        model(X).sum().backward()
    alive = [weakref.ref(model), weakref.ref(model.blocks[0]), weakref.ref(next(model.parameters()))]
    del model, optimizer
    gc.collect()
    return [ref() is None for ref in alive]


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "replicate"])
def test_a_sharded_model_can_be_collected(engine: str) -> None:
    assert run_ranks(collected, 2, engine) == [[True, True, True]] * 2


def looking(rank: int, engine: str) -> None:
    single = build()
    model = mmfsdp.shard(build(), {"engine": engine, "wrap": BLOCKS})
    want = dict(single.named_parameters())
    with mmfsdp.full_params(model):
        for name, param in model.named_parameters():
            assert torch.equal(param, want[mmfsdp.runtime.sharded_model.clean_fqn(name)])
            param.data.add_(1)
    with mmfsdp.full_params(model, writeback=False):
        for param in model.parameters():
            assert param.requires_grad
            param.data.add_(1)
    now = mmfsdp.model_state_dict(model, rank0_only=False)
    whole = {param.fqn for param in mmfsdp.runtime.sharded_model.find_sharded_model(model).plan.ignored_params}
    assert all(torch.equal(now[name], want[name] + 1) for name in want if name not in whole)
    model(X).sum().backward()


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "replicate"])
def test_full_params(engine: str) -> None:
    run_ranks(looking, 2, engine)
