"""Models with a ``train_step`` of their own are proven against one process and DDP, from a config."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import MODELS, OPTIM_WRAPPER_CONSTRUCTORS
from tests.mmengine_adapter.pictured import Pictured
from tests.mmengine_adapter.test_rehearsing import read

from mmfsdp import prove
from mmfsdp.errors import ConfigError
from mmfsdp.frontends import RemadeStep, build_model, read_config
from mmfsdp.parity import Proof
from mmfsdp_cli.commands.proving import _step
from mmfsdp_cli.options.choices import BatchChoice


@MODELS.register_module(force=True)
class TwoUpdates(Pictured):
    """Updates for the images, then for noise of their size, with a loss of another kind."""

    def __init__(self, wrong: bool = False, data_preprocessor: Any = None) -> None:
        super().__init__(data_preprocessor=data_preprocessor)
        self.wrong = wrong

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, torch.Tensor]:
        found = {}
        with optim_wrapper.optim_context(self):
            data = self.data_preprocessor(data, True)
            found["pixels"] = self(**data, mode="loss")["loss_pixels"]
        optim_wrapper.update_params(found["pixels"])
        with optim_wrapper.optim_context(self):
            noise = torch.randn_like(data["inputs"])
            found["noise"] = self(noise, data["data_samples"], mode="loss")["loss_pixels"] * 0.5
        if self.wrong and dist.get_world_size() > 1:
            found["noise"] = found["noise"] * 1.1
        optim_wrapper.update_params(found["noise"])
        return found


def proof_of(folder: Path, *changes: tuple[str, str], wrong: bool = False, **more: Any) -> Proof:
    """Prove a config as the command does."""
    model = ("type='Pictured'", f"type='TwoUpdates', wrong={wrong}")
    read(folder, model, ("tests.mmengine_adapter.pictured", __name__), *changes)
    path = str(folder / "config.py")
    step = replace(RemadeStep(path, 2).sent(), evaluate=None)
    return prove(partial(made_model, path), **step.proof_arguments(), steps=1, **more)


def made_model(path: str) -> torch.nn.Module:
    return build_model(path)[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("against", ["alone", "ddp"])
def test_it_is_proven(tmp_path: Path, against: Literal["alone", "ddp"]) -> None:
    proof = proof_of(tmp_path, ("accumulative_counts=2", "accumulative_counts=1"), against=against)
    assert proof.proven, str(proof)
    assert proof.model == "TwoUpdates"
    assert {item.key.step for item in proof.trained.compared} == {0, 1}  # it updates twice
    assert {item.key.step for item in proof.resumed.compared} == {2, 3}
    assert "norm" in {item.key.kind for item in proof.trained.compared}


@pytest.mark.exhaustive
def test_it_is_proven_with_accumulation_and_mixed_precision(tmp_path: Path) -> None:
    """Of two calls with two updates each, every second updates."""
    named = ("optim_wrapper = dict(", "optim_wrapper = dict(type='AmpOptimWrapper', dtype='bfloat16', ")
    proof = proof_of(tmp_path, named, config={"sharding": "SHARD_GRAD_OP"})
    assert proof.proven, str(proof)
    assert {item.key.step for item in proof.trained.compared} == {0, 1}


@pytest.mark.exhaustive
def test_what_computes_something_else_is_not_proven(tmp_path: Path) -> None:
    proof = proof_of(tmp_path, ("accumulative_counts=2", "accumulative_counts=1"), wrong=True)
    assert proof.trained.first is not None
    assert (proof.trained.first.key.kind, proof.trained.first.key.step) == ("gradient of output", 1)


@MODELS.register_module(force=True)
class InTurns(Pictured):
    """Its parts are updated in turns, each with an optimizer of its own."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, torch.Tensor]:
        for name in ("head", "conv"):
            with optim_wrapper[name].optim_context(self):
                loss = self(**self.data_preprocessor(data, True), mode="loss")["loss_pixels"]
            optim_wrapper[name].update_params(loss)
        if optim_wrapper["head"].should_update():  # no gradients are left over, which a checkpoint does not have
            optim_wrapper["head"].zero_grad()
        return {}

    def val_step(self, data: Any) -> Any:
        return self(**self.data_preprocessor(data), mode="loss")


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
class BothOptimizers:
    """The head accumulates two calls, and the convolution is clipped."""

    def __init__(self, optim_wrapper_cfg: Any, paramwise_cfg: Any = None) -> None:
        pass

    def __call__(self, model: torch.nn.Module) -> OptimWrapperDict:
        parts = {name: torch.optim.SGD(getattr(model, name).parameters(), 0.1, 0.9) for name in ("conv", "head")}
        return OptimWrapperDict(
            conv=OptimWrapper(parts["conv"], clip_grad={"max_norm": 0.01}),
            head=OptimWrapper(parts["head"], accumulative_counts=2),
        )


BOTH = ("optim_wrapper = dict(", "optim_wrapper = dict(constructor='BothOptimizers', first=dict(")
ENDS = ("norm_decay_mult=0))", "norm_decay_mult=0)))")
EVALUATES = (
    "train_dataloader = dict(",
    "val_cfg, val_dataloader = dict(), dict(dataset=inner)\ntrain_dataloader = dict(",
)


@pytest.mark.exhaustive
def test_several_optimizers_and_evaluation(tmp_path: Path) -> None:
    """From the command's arguments, with the config's own evaluation."""
    pack = ("width=50)]", "width=50), dict(type='Pack')]")
    read(tmp_path, ("type='Pictured'", "type='InTurns'"), ("tests.mmengine_adapter.pictured", __name__), BOTH, ENDS)
    path = tmp_path / "config.py"
    path.write_text(path.read_text().replace(*EVALUATES).replace(*pack).replace("pipeline=[dict(type='Pack')]", ""))
    config = read_config(path)
    step = _step(BatchChoice((), "2", None), str(path), config.model(), config)
    proof = prove(partial(made_model, str(path)), **step.proof_arguments(), steps=1)
    assert proof.proven, str(proof)
    assert proof.evaluated
    calls = {(item.key.name, item.key.call) for item in proof.resumed.compared if item.key.kind == "update"}
    assert calls == {("conv.weight", 0), ("conv.weight", 1), ("conv.bias", 0), ("conv.bias", 1)} | {
        ("head.weight", 0), ("head.bias", 0)
    }  # fmt: skip


def test_several_optimizers_need_a_step(tmp_path: Path) -> None:
    config = read(tmp_path, BOTH, ENDS)
    model = config.model()
    make = config.step(model).optimizer
    assert callable(make)
    with pytest.raises(ConfigError, match=r"several optimizers: conv, head; and the model has no train_step"):
        make(model.parameters())
