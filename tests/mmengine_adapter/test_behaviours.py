"""What models and hooks do to a wrapped model, against the same done to the unsharded one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper
from mmengine.registry import MODELS
from torch.utils.checkpoint import checkpoint

from mmfsdp.testing import run_ranks
from mmfsdp_mmengine import MMFullyShardedDataParallel

WIDTH = 8


class Stage(nn.Module):
    """A unit: norm, linear and an embedding, with methods besides forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc(self.norm(x)).tanh()

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


class Base(BaseModel):
    """A model of two stages and a head, which the others change."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Stage()
        self.neck = Stage()
        self.head = nn.Linear(WIDTH, 1)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.neck(self.backbone(x)))

    def forward(self, inputs: torch.Tensor, mode: str = "tensor") -> Any:
        logits = self.logits(inputs)
        return {"loss": logits.square().mean()} if mode == "loss" else logits


class CallsMethods(Base):
    """As detectors: feature extraction by a method, and a method of a unit other than forward."""

    def extract_feat(self, x: torch.Tensor) -> torch.Tensor:
        return self.neck(self.backbone(x))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        x = self.extract_feat(x)
        return self.head(x + self.neck.project(x))


class CallsTwice(Base):
    """Runs one stage three times a step."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(self.neck(self.backbone(self.backbone(x)))))


class Unused(Base):
    """Has parameters that no loss reaches, in a unit of their own, in a used unit, and in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = Stage()
        self.neck.spare = nn.Linear(WIDTH, WIDTH)
        self.spare = nn.Parameter(torch.ones(3))


class Frozen(Base):
    """As ``frozen_stages``: `train` freezes a stage each time."""

    def __init__(self) -> None:
        super().__init__()
        self.train()

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        for param in self.backbone.parameters():
            param.requires_grad = False
        self.backbone.eval()
        return self


class LowRankStage(Stage):
    """Adds a trained product of two small matrices to a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, WIDTH) / 3)
        self.up = nn.Parameter(torch.randn(WIDTH, 2) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.down), self.up)


class LowRank(Base):
    """Frozen and trained parameters in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.neck = LowRankStage(), LowRankStage()


class Tied(Base):
    """Weights shared within a unit and across units, as embeddings and heads are."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.backbone.fc.weight

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.last(self.neck(self.backbone(x))))


class Checkpointed(Base):
    """Checkpoints its stages itself, as ``with_cp=True`` does."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        return self.head(checkpoint(self.neck, checkpoint(self.backbone, x, use_reentrant=False), use_reentrant=False))


def unfreeze(model: nn.Module, step: int) -> None:
    """What a hook does that freezes first and unfreezes later."""
    for name, param in model.named_parameters():
        if name.startswith("backbone."):
            param.requires_grad = step >= 2
        if name.startswith("neck.norm"):
            param.requires_grad = step < 2


for _cls in (CallsMethods, CallsTwice, Unused, Frozen, LowRank, Tied, Checkpointed):
    MODELS.register_module(module=_cls, force=True)
CASES: dict[str, tuple[type[Base], Any]] = {
    "methods": (CallsMethods, None),
    "twice": (CallsTwice, None),
    "unused": (Unused, None),
    "frozen": (Frozen, None),
    "low-rank": (LowRank, None),
    "tied": (Tied, None),
    "checkpointed": (Checkpointed, None),
    "unfrozen": (Base, unfreeze),
}
POLICY = {"type": "ModuleWrapPolicy", "module_classes": [Stage, LowRankStage]}
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp2": {"auto_wrap_policy": POLICY},
    "replicate": {
        "auto_wrap_policy": POLICY,
        "sharding_strategy": "NO_SHARD",
    },
    "fsdp1": {"auto_wrap_policy": POLICY, "engine": "fsdp1"},
}


def compared(rank: int, engine: str) -> dict[str, Any]:
    return {name: compare(rank, *CASES[name], ENGINES[engine]) for name in CASES}


def compare(rank: int, cls: type[Base], before: Any, wrapper: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses and predictions of four steps, of the sharded model and of the unsharded one on the whole batch."""
    torch.manual_seed(0)
    alone = cls()
    model = MMFullyShardedDataParallel(copy.deepcopy(alone), **wrapper)
    generator = torch.Generator().manual_seed(1)
    mine, reference = (OptimWrapper(torch.optim.AdamW(m.parameters(), lr=0.05)) for m in (model, alone))
    logged: list[float] = []
    expected: list[float] = []
    for step in range(4):
        inputs = torch.randn(4, WIDTH, generator=generator)
        if before is not None:
            before(model, step)
            before(alone, step)
        for module in (model, alone):
            module.train()
        loss = model.train_step({"inputs": inputs[2 * rank : 2 * rank + 2]}, mine)["loss"].detach().clone()
        dist.all_reduce(loss)
        logged.append(loss.item() / 2)
        expected.append(alone.train_step({"inputs": inputs}, reference)["loss"].item())
        for module in (model, alone):
            module.eval()
        with torch.no_grad():
            logged.append(model.val_step({"inputs": inputs}).sum().item())
            expected.append(alone.val_step({"inputs": inputs}).sum().item())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in alone.named_parameters()]
    return logged, expected


class TestBehaviours:
    @pytest.mark.sample("replicate")
    @pytest.mark.parametrize("engine", list(ENGINES))
    def test_train_and_predict_as_the_unsharded_model(self, engine: str) -> None:
        for found in run_ranks(compared, 2, engine):
            for name, (logged, expected) in found.items():
                assert logged == pytest.approx(expected, rel=1e-4, abs=1e-5), name
                assert logged[-2] != pytest.approx(logged[0], rel=1e-3), name


def looked_at(rank: int, engine: str) -> dict[str, Any]:
    """Call parts of a wrapped model directly, before it ever ran as a whole, and train afterwards."""
    torch.manual_seed(0)
    alone = CallsMethods()
    wrapper = copy.deepcopy(ENGINES[engine])
    wrapper["config"] = {"sharding": {"forward_methods": ["project", "extract_feat", "logits"]}}
    model = MMFullyShardedDataParallel(copy.deepcopy(alone), **wrapper)
    inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2))
    found: dict[str, Any] = {"width": model.head.out_features == 1, "device": model.data_preprocessor.device.type}
    with torch.no_grad():
        for name, call in {
            "unit": lambda m: m.backbone(inputs),
            "method": lambda m: m.extract_feat(inputs),
            "whole": lambda m: m.logits(inputs),
        }.items():
            found[name] = torch.allclose(call(model), call(alone), atol=1e-6)
    mine, reference = (OptimWrapper(torch.optim.SGD(m.parameters(), lr=0.5)) for m in (model, alone))
    for _ in range(2):
        half = inputs[2 * rank : 2 * rank + 2]
        model.train_step({"inputs": half}, mine)
        alone.train_step({"inputs": inputs}, reference)
    with torch.no_grad():
        found["trained"] = torch.allclose(model(inputs), alone(inputs), atol=1e-5)
    model.eval()
    found["eval"] = not model.training and not model.module.neck.norm.training
    model.train()
    found["train"] = model.training and model.module.neck.norm.training
    model.init_weights()
    found["init"] = True
    return found


def layer_of_a_unit(rank: int, wrapper: dict[str, Any]) -> bool:
    """Code outside of a unit computes with a layer in it."""
    torch.manual_seed(0)
    alone = Base()
    model = MMFullyShardedDataParallel(copy.deepcopy(alone), auto_wrap_policy=POLICY, **wrapper)
    x = torch.ones(2, WIDTH)
    for net in (alone, model.module):
        net.logits = lambda x, net=net: net.head(net.backbone.fc(x))
    return torch.allclose(model(x), alone(x))


class Convolutions(Base):
    """Calls the children of a Sequential one by one, as ResNet of transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        image = x[:, None, None]
        for layer in self.stage:
            image = layer(image)
        return super().logits(image[:, 0, 0])


def by_size(rank: int) -> bool:
    policy = {"type": "size_based_auto_wrap_policy", "min_num_params": 60}
    torch.manual_seed(0)
    alone = Convolutions()
    model = MMFullyShardedDataParallel(copy.deepcopy(alone), auto_wrap_policy=policy, engine="fsdp1")
    x = torch.ones(2, WIDTH)
    return torch.allclose(model(x), alone(x), atol=1e-6)


@MODELS.register_module(force=True)
class Generates(Base):
    """Predicts by a method of a part, which runs several forwards."""

    class Generator(Stage):
        def generate(self, x: torch.Tensor, steps: int = 2) -> torch.Tensor:
            x = self.fc(x)
            for _ in range(steps):
                x = self(x)
            return x

    def __init__(self) -> None:
        super().__init__()
        self.lm = Generates.Generator()

    def forward(self, inputs: torch.Tensor, mode: str = "tensor") -> Any:
        if mode == "predict":
            return self.head(self.lm.generate(inputs))
        return super().forward(self.lm(inputs), mode)


def generated(rank: int, settings: dict[str, Any]) -> bool:
    torch.manual_seed(0)
    alone = Generates()
    x = torch.randn(4, WIDTH)
    policy = {"type": "ModuleWrapPolicy", "module_classes": [Generates.Generator]}
    model = MMFullyShardedDataParallel(copy.deepcopy(alone), auto_wrap_policy=policy, **settings)
    with torch.no_grad():
        return torch.allclose(model.val_step({"inputs": x}), alone.val_step({"inputs": x}), atol=1e-6)


class TestDirectCalls:
    @pytest.mark.parametrize("engine", ["fsdp2", "replicate"])
    def test_parts_before_the_whole(self, engine: str) -> None:
        for found in run_ranks(looked_at, 2, engine):
            assert found.pop("device") == "cpu"
            assert all(found.values()), found

    @pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
    def test_layer_of_a_unit(self, engine: str) -> None:
        assert run_ranks(layer_of_a_unit, 2, {"engine": engine}) == [True, True]

    def test_children_of_a_container_under_a_size_policy(self) -> None:
        assert run_ranks(by_size, 2) == [True, True]

    @pytest.mark.parametrize(
        "settings", [{}, {"config": {"sharding": {"forward_methods": ["generate"]}}}, {"engine": "fsdp1"}], ids=str
    )
    def test_generate(self, settings: dict[str, Any]) -> None:
        assert run_ranks(generated, 2, settings) == [True, True]
