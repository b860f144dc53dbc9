"""Optimizers keep what they were built with, whatever the engine does to parameters; clipping is by the global norm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from mmengine.optim import LinearLR, OptimWrapper
from mmengine.registry import MODELS
from tests.mmengine_adapter.toy import POLICY, ToyModel, strategy, train

from mmfsdp.testing import run_ranks
from mmfsdp_mmengine import AmpOptimWrapper, FSDPStrategy
from mmfsdp_mmengine.optimizers.binding import OptimizerBinding

PARAMWISE = {
    "optimizer": {"type": "AdamW", "lr": 0.01, "weight_decay": 0.1},
    "paramwise_cfg": {
        "custom_keys": {"blocks.0": {"lr_mult": 0.5}},
        "norm_decay_mult": 0.0,
        "flat_decay_mult": 0.3,
    },
}


def made(folder: Path, **wrapper: Any) -> FSDPStrategy:
    return FSDPStrategy(
        work_dir=str(folder), model_wrapper={"auto_wrap_policy": POLICY, **wrapper}, state_dict_cfg="full"
    )


def groups(rank: int, folder: Path, engine: str) -> tuple[Any, Any]:
    """Settings of each parameter, by name, unsharded and sharded."""
    plain = ToyModel()
    alone = made(folder).build_optim_wrapper(PARAMWISE, plain).optimizer
    before = repr(PARAMWISE)
    sharded = made(folder, engine=engine)
    sharded.prepare({"type": "ToyModel"}, optim_wrapper=PARAMWISE)
    assert repr(PARAMWISE) == before

    def settings(model: nn.Module, optimizer: Any) -> Any:
        names = {id(param): name for name, param in model.named_parameters()}
        return [
            ([names[id(param)] for param in group["params"]], group["lr"], group["weight_decay"])
            for group in optimizer.param_groups
        ]

    return settings(plain, alone), settings(sharded.model, sharded.optim_wrapper.optimizer)


class TestGroups:
    @pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
    def test_equal_the_unsharded_ones(self, tmp_path: Path, engine: str) -> None:
        for unsharded, sharded in run_ranks(groups, 2, tmp_path, engine):
            assert sharded == unsharded
            assert len({(lr, decay) for _, lr, decay in unsharded}) > 3


def built(rank: int, folder: Path, engine: str, form: str) -> dict[str, Any]:
    """Hand objects to the strategy, train, and compare with the same objects used without it."""
    losses = {}
    for name in ("alone", "sharded"):
        torch.manual_seed(0)
        model = MODELS.build({"type": "ToyModel"})
        model.init_weights()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.1)
        optimizer.step()  # so that it has a state to keep
        optimizer.zero_grad()
        wrapper = OptimWrapper(optimizer, clip_grad={"max_norm": 0.3})
        scheduler = LinearLR(wrapper if form == "wrapper" else optimizer, start_factor=0.1, end=4)
        given = {"wrapper": wrapper, "optimizer": optimizer, "dict": {"optimizer": optimizer}}[form]
        if name == "sharded":
            strategy = made(folder, engine=engine)
            model, optim, [kept] = strategy.prepare(model, optim_wrapper=given, param_scheduler=scheduler)
            assert kept is scheduler
            assert optim.optimizer is optimizer
            assert form != "wrapper" or optim is wrapper
        else:
            optim = wrapper if form == "wrapper" else OptimWrapper(optimizer)
        generator = torch.Generator().manual_seed(2)
        losses[name] = []
        for _ in range(4):
            inputs, labels = torch.randn(4, 3, 8, 8, generator=generator), torch.arange(4)
            part = slice(2 * rank, 2 * rank + 2) if name == "sharded" else slice(None)
            loss = model.train_step({"inputs": inputs[part], "labels": labels[part]}, optim)["loss"].detach()
            if name == "sharded":
                torch.distributed.all_reduce(loss)
            losses[name].append(loss.item() / (2 if name == "sharded" else 1))
            scheduler.step()
        losses[f"{name} lr"] = optimizer.param_groups[0]["lr"]
    return losses


class TestBuilt:
    @pytest.mark.sample("fsdp1-dict", "fsdp2-optimizer", "fsdp2-wrapper")
    @pytest.mark.parametrize("form", ["wrapper", "optimizer", "dict"])
    @pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
    def test_objects_are_kept_and_train(self, tmp_path: Path, engine: str, form: str) -> None:
        for found in run_ranks(built, 2, tmp_path, engine, form):
            assert found["sharded"] == pytest.approx(found["alone"], rel=1e-5)
            assert found["sharded lr"] == found["alone lr"] == pytest.approx(0.05)
            assert found["alone"][0] != found["alone"][-1]

    def test_optimizer_of_another_model(self) -> None:
        optimizer = torch.optim.SGD(nn.Linear(2, 3).parameters(), lr=0.1)
        with pytest.raises(
            Exception, match=r"SGD holds 2 parameters that ToyModel does not have, with shapes \[\(3, 2\)"
        ):
            OptimizerBinding(ToyModel(), OptimWrapper(optimizer))


CLIPS: dict[str, dict[str, Any]] = {
    "inf": {"max_norm": 0.02, "norm_type": "inf"},
    "one": {"max_norm": 1.0, "norm_type": 1},
    "value": {"type": "value", "clip_value": 0.01},
}


class TestClipping:
    @pytest.mark.sample("value-fsdp2", "inf-fsdp1")
    @pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
    @pytest.mark.parametrize("clip", CLIPS)
    def test_equals_unsharded(self, tmp_path: Path, references: Any, engine: str, clip: str) -> None:
        optim = {"optimizer": {"type": "SGD", "lr": 0.2}, "clip_grad": CLIPS[clip]}
        changes = {"optim_wrapper": optim, "model": {"type": "ToyModel", "scale": True}}
        results = run_ranks(train, 2, tmp_path, 2, {"strategy": strategy(engine=engine), **changes})
        reference = references(**changes)
        assert results[0]["losses"] == pytest.approx(reference["losses"], rel=1e-5)
        assert results[0]["norms"] == pytest.approx(reference["norms"], rel=1e-5)
        assert len(results[0]["norms"]) == (0 if clip == "value" else 8)


class TestAmp:
    @pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
    def test_bfloat16_on_the_cpu(self, tmp_path: Path, references: Any, engine: str) -> None:
        optim = {
            "type": "AmpOptimWrapper",
            "dtype": "bfloat16",
            "use_fsdp": True,
            "optimizer": {"type": "SGD", "lr": 0.1},
        }
        results = run_ranks(train, 2, tmp_path, 2, {"strategy": strategy(engine=engine), "optim_wrapper": optim})
        reference = references(optim_wrapper={**optim, "use_fsdp": False})
        assert results[0]["losses"] == pytest.approx(reference["losses"], rel=2e-2)
        assert results[0]["losses"] != references()["losses"]
        saved = torch.load(tmp_path / "epoch_2.pth", weights_only=False)
        assert saved["optimizer"]["loss_scaler"]["scale"] == 65536.0

    def test_float16_with_a_scaler(self, tmp_path: Path) -> None:
        optim = {
            "type": "AmpOptimWrapper",
            "dtype": "float16",
            "loss_scale": 128,
            "optimizer": {"type": "SGD", "lr": 0.1},
        }
        precision = {"mixed_precision": {"param_dtype": "float16", "reduce_dtype": "float32"}}
        results = run_ranks(train, 2, tmp_path, 2, {"strategy": strategy(**precision), "optim_wrapper": optim})
        assert results[0]["losses"][-1] < results[0]["losses"][0]

    def test_settings_that_are_not_accepted(self) -> None:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        with pytest.raises(Exception, match="loss_scale must be 'dynamic', a number or a dict of GradScaler arguments"):
            AmpOptimWrapper(loss_scale="static", optimizer=optimizer)
        with pytest.raises(Exception, match="bfloat17"):
            AmpOptimWrapper(dtype="bfloat17", optimizer=optimizer)
