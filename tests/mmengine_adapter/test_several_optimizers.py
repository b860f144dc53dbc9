"""Two optimizers of one model, accumulation, fp16 scaling and resuming with another optimizer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine._strategy import SingleDeviceStrategy
from mmengine.model import BaseModel
from mmengine.optim import LinearLR, LinearMomentum, OptimWrapper, OptimWrapperDict
from mmengine.registry import MODELS, OPTIM_WRAPPER_CONSTRUCTORS
from tests.mmengine_adapter.toy import POLICY, Block, strategy, train
from torch.profiler import ProfilerActivity, profile

from mmfsdp import model_state_dict
from mmfsdp.errors import ConfigError, StateDictError
from mmfsdp.testing import run_ranks
from mmfsdp_mmengine import AmpOptimWrapper, FSDPStrategy
from mmfsdp_mmengine.optimizers.binding import OptimizerBinding


@MODELS.register_module(force=True)
class TwoNets(BaseModel):
    """A generator and a discriminator, each with an optimizer, trained in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 16), Block(16), nn.Linear(16, 16))
        self.discriminator = nn.Sequential(Block(16), nn.Linear(16, 1))

    def forward(self, inputs: torch.Tensor, mode: str = "tensor") -> Any:
        real, noise = inputs[:, :16], inputs[:, 16:]
        fake = self.generator(noise)
        if mode == "discriminator":
            logits = self.discriminator(torch.cat([real, fake.detach()]))
            return F.softplus(logits).mean() - logits[: len(real)].mean() / 2
        return F.softplus(-self.discriminator(fake)).mean()

    def train_step(self, data: Any, optim_wrapper: OptimWrapperDict) -> dict[str, torch.Tensor]:
        log_vars = {}
        for name in ("discriminator", "generator"):
            with optim_wrapper[name].optim_context(self):
                loss = self(data["inputs"], mode=name)
            optim_wrapper[name].update_params(loss)
            log_vars[name] = loss.detach()
        return log_vars


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
class TwoNetsConstructor:
    """An optimizer for each net."""

    def __init__(self, optim_wrapper_cfg: dict[str, Any], paramwise_cfg: Any = None) -> None:
        self.config = optim_wrapper_cfg

    def __call__(self, model: nn.Module) -> OptimWrapperDict:
        return OptimWrapperDict(
            generator=OptimWrapper(
                torch.optim.AdamW(model.generator.parameters(), lr=0.02), clip_grad={"max_norm": self.config["norm"]}
            ),
            discriminator=OptimWrapper(
                torch.optim.SGD(model.discriminator.parameters(), lr=0.2, momentum=0.9),
                clip_grad={"max_norm": self.config["norm"] / 2, "norm_type": 1},
                accumulative_counts=2,
            ),
        )


SEED = {"randomness": {"seed": 1}}
SCHEDULES = {
    "generator": [{"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "end": 5}],
    "discriminator": [{"type": "LinearMomentum", "start_factor": 0.5, "by_epoch": False, "end": 5}],
}


def two_nets(rank: int, folder: Path, world_size: int, engine: str) -> list[Any]:
    made: Any
    optim = {"constructor": "TwoNetsConstructor", "norm": 0.05}
    if world_size == 1:
        made = SingleDeviceStrategy(work_dir=str(folder), env_kwargs=SEED)
        _, wrappers = made.prepare({"type": "TwoNets"}, optim_wrapper=optim)
        made.param_schedulers = {
            "generator": [LinearLR(wrappers["generator"], start_factor=0.1, by_epoch=False, end=5)],
            "discriminator": [LinearMomentum(wrappers["discriminator"], start_factor=0.5, by_epoch=False, end=5)],
        }
    else:
        made = FSDPStrategy(
            work_dir=str(folder), env_kwargs=SEED, model_wrapper={"auto_wrap_policy": POLICY, "engine": engine}
        )
        progress = {"max_iters": 6, "max_epochs": 1, "epoch_length": 6}
        made.prepare({"type": "TwoNets"}, optim_wrapper=optim, param_scheduler=SCHEDULES, dispatch_kwargs=progress)
    generator = torch.Generator().manual_seed(2)
    found: list[Any] = []
    for _ in range(6):
        inputs = torch.randn(4, 24, generator=generator)
        part = inputs[rank * 2 : rank * 2 + 2] if world_size == 2 else inputs
        log_vars = made.model.train_step({"inputs": part}, made.optim_wrapper)
        for name, value in log_vars.items():
            if world_size == 2:
                torch.distributed.all_reduce(value)
            found.append((value / world_size).item())
            norm = made.optim_wrapper[name].message_hub.log_scalars.get("train/grad_norm")
            found.append(0.0 if norm is None else float(norm.current()))
        for schedulers in made.param_schedulers.values():
            for scheduler in schedulers:
                scheduler.step()
        found += [made.optim_wrapper["generator"].get_lr()["lr"][0]]
        found += [made.optim_wrapper["discriminator"].get_momentum()["momentum"][0]]
    return found


class TestTwoNets:
    @pytest.mark.exhaustive
    def test_each_is_clipped_by_its_own_norm(self, tmp_path: Path) -> None:
        [alone] = run_ranks(two_nets, 1, tmp_path, 1, "")
        for engine in ("fsdp2", "fsdp1"):
            for found in run_ranks(two_nets, 2, tmp_path, 2, engine):
                assert found == pytest.approx(alone, rel=1e-5)
        assert max(alone[1::6]) > 0.05, "something is clipped"

    def test_a_parameter_of_two_optimizers(self) -> None:
        model = TwoNets()
        both = OptimWrapperDict(
            one=OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1)),
            other=OptimWrapper(torch.optim.SGD(model.discriminator.parameters(), lr=0.1)),
        )
        with pytest.raises(ConfigError, match=r"'discriminator\.0\.norm\.weight' is held by both 'one' and 'other' of"):
            OptimizerBinding(model, both)


def count_collectives(rank: int, folder: Path, engine: str, counts: int) -> tuple[dict[str, int], float]:
    """Four micro-batches, and what was communicated for gradients."""
    made = FSDPStrategy(
        work_dir=str(folder),
        env_kwargs=SEED,
        model_wrapper={"auto_wrap_policy": POLICY, "engine": engine},
        state_dict_cfg="full",
    )
    made.prepare(
        {"type": "ToyModel"},
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}, "accumulative_counts": counts},
        dispatch_kwargs={"max_iters": 4},
    )
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(8, 3, 8, 8, generator=generator)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for chunk in inputs.chunk(4 if counts > 1 else 1):
            made.model.train_step({"inputs": chunk, "labels": torch.arange(len(chunk)) % 2}, made.optim_wrapper)
    seen: Counter[str] = Counter()
    for event in profiled.events():
        if event.name.startswith("c10d::"):
            seen["scatter" if "scatter" in event.name else event.name] += 1
    weights = model_state_dict(made.model, rank0_only=False)
    return dict(seen), sum(float(value.double().abs().sum()) for value in weights.values())


class TestAccumulation:
    @pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
    def test_communicates_gradients_once(self, tmp_path: Path, engine: str) -> None:
        once, weights = run_ranks(count_collectives, 2, tmp_path, engine, 1)[0]
        four, accumulated = run_ranks(count_collectives, 2, tmp_path, engine, 4)[0]
        assert four["scatter"] == once["scatter"] == 3
        assert accumulated == pytest.approx(weights, rel=1e-6)


def overflow(rank: int, folder: Path, engine: str) -> list[Any]:
    """Three steps in float16; in the second, one rank's loss overflows."""
    made = FSDPStrategy(
        work_dir=str(folder),
        env_kwargs=SEED,
        model_wrapper={
            "auto_wrap_policy": POLICY,
            "engine": engine,
            "mixed_precision": {"param_dtype": "float16", "reduce_dtype": "float32"},
        },
    )
    optim = {
        "type": "AmpOptimWrapper",
        "dtype": "float16",
        "loss_scale": {"init_scale": 256.0, "growth_interval": 100},
        "optimizer": {"type": "SGD", "lr": 0.1},
        "clip_grad": {"max_norm": 1.0},
    }
    made.prepare({"type": "ToyModel"}, optim_wrapper=optim)
    assert isinstance(made.optim_wrapper, AmpOptimWrapper)
    found = []
    for step in range(3):
        inputs = torch.full((2, 3, 8, 8), 1e30 if step == 1 and rank == 1 else 0.5)
        with torch.no_grad():
            before = sum(
                float(param.double().sum()) for param in model_state_dict(made.model, rank0_only=False).values()
            )
        made.model.train_step({"inputs": inputs, "labels": torch.tensor([0, 1])}, made.optim_wrapper)
        after = sum(float(param.double().sum()) for param in model_state_dict(made.model, rank0_only=False).values())
        found.append((made.optim_wrapper.loss_scaler.get_scale(), before != after, after))
    return found


class TestLossScale:
    @pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
    def test_all_ranks_skip_when_one_overflows(self, tmp_path: Path, engine: str) -> None:
        first, second = run_ranks(overflow, 2, tmp_path, engine)
        assert first == second
        assert [(scale, stepped) for scale, stepped, _ in first] == [(256.0, True), (128.0, False), (128.0, True)]


def schedulers(rank: int, folder: Path, engine: str) -> list[Any]:
    """Built and configured schedulers of rates and momenta, with the optimizer that they are of."""
    model = MODELS.build({"type": "ToyModel"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8, weight_decay=0.01)
    wrapper = OptimWrapper(optimizer, clip_grad={"max_norm": 1.0})
    rate, momentum = LinearLR(wrapper, start_factor=0.5, end=4), LinearMomentum(wrapper, start_factor=0.25, end=4)
    made = FSDPStrategy(
        work_dir=str(folder), env_kwargs=SEED, model_wrapper={"auto_wrap_policy": POLICY, "engine": engine}
    )
    _, optim, kept = made.prepare(
        model,
        optim_wrapper=wrapper,
        param_scheduler=[rate, momentum, {"type": "StepLR", "step_size": 2, "gamma": 0.1, "by_epoch": True}],
        dispatch_kwargs={"max_iters": 4, "max_epochs": 9, "epoch_length": 1},
    )
    assert optim is wrapper
    assert kept[0] is rate
    assert kept[1] is momentum
    found = []
    for _ in range(4):
        optimizer.step()
        for scheduler in kept:
            scheduler.step()
        [group] = optimizer.param_groups
        found.append((group["lr"], group["momentum"], group["weight_decay"]))
    return found


class TestSchedulers:
    def test_built_and_configured_ones_of_rates_and_momenta(self, tmp_path: Path) -> None:
        plain = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.8, weight_decay=0.01)
        for engine in ("fsdp2", "fsdp1"):
            found = run_ranks(schedulers, 2, tmp_path, engine)[0]
            # Rates go from a half to the whole in 3 steps, and by a tenth after 2; momenta from a quarter.
            assert [rate for rate, _, _ in found] == pytest.approx([0.2 / 3, 0.025 / 3, 0.01, 0.001])
            assert [momentum for _, momentum, _ in found] == pytest.approx([0.4, 0.6, 0.8, 0.8])
            assert {decay for _, _, decay in found} == {optimizer.param_groups[0]["weight_decay"]}


def refused(rank: int, folder: Path, changes: dict[str, Any]) -> tuple[type, str]:
    try:
        train(rank, folder, 2, {"strategy": strategy("full"), "resume": True, **changes})
    except Exception as error:
        return type(error), str(error)
    raise AssertionError("it was resumed")


class TestResumingWithAnother:
    @pytest.mark.exhaustive
    def test_optimizer_or_groups(self, tmp_path: Path) -> None:
        run_ranks(train, 2, tmp_path, 2, {"strategy": strategy("full")})
        saved = tmp_path / "epoch_1.pth"
        content = torch.load(saved, weights_only=False)
        del content["progress"]  # as others save it
        torch.save(content, tmp_path / "other.pth")

        sgd = {"optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.1}}}
        groups = {
            "optim_wrapper": {
                "optimizer": {"type": "AdamW", "weight_decay": 0.1},
                "paramwise_cfg": {"norm_decay_mult": 0.0},
            }
        }
        for changes, source, message in (
            (
                sgd,
                saved,
                "was saved with the optimizers {'optimizer': 'AdamW'}, but the config has {'optimizer': 'SGD'}",
            ),
            (sgd, tmp_path / "other.pth", "has the settings amsgrad, betas, eps, but SGD has dampening, momentum"),
            (groups, saved, "the state has [16]"),
        ):
            changes = {**changes, "load_from": str(source)}
            for kind, text in run_ranks(refused, 2, tmp_path / "again", changes):
                assert kind is StateDictError, text
                assert message in text

    def test_schedulers(self, tmp_path: Path) -> None:
        """By class, number and what they schedule: MMEngine itself pairs them by position, and takes all attributes."""
        linear = {"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "end": 4}
        steps = {"type": "MultiStepLR", "by_epoch": True, "milestones": [2]}
        both = {"strategy": strategy("full"), "param_scheduler": [linear, steps]}
        run_ranks(train, 2, tmp_path, 2, both)
        run_ranks(train, 2, tmp_path / "dcp", 1, {**both, "strategy": strategy("sharded")})
        content = torch.load(tmp_path / "epoch_1.pth", weights_only=False)
        assert content["progress"]["schedulers"] == {"optimizer": "LinearLR, MultiStepLR"}
        del content["progress"]  # as MMEngine itself saves it
        torch.save(content, tmp_path / "other.pth")
        momentum = {"type": "LinearMomentum", "start_factor": 0.1, "by_epoch": False, "end": 4}
        cases = (
            ([linear, {"type": "ExponentialLR", "gamma": 0.9}], "'LinearLR, ExponentialLR'}", ""),
            ([steps], "{'optimizer': 'MultiStepLR'}", "2 schedulers of 'optimizer', but the config has 1 scheduler of"),
            ([steps, linear], "{'optimizer': 'MultiStepLR, LinearLR'}", "state holds end_factor, start_factor, total_"),
            ([momentum, steps], "'LinearMomentum, MultiStepLR'}", "schedules 'lr', but that of the config, LinearMom"),
        )
        for number, results in enumerate(run_ranks(all_refused, 2, tmp_path, [given for given, _, _ in cases])):
            for (given, message, stock_message), (by_name, by_state) in zip(cases, results, strict=True):
                assert message in by_name, (number, given)
                assert stock_message in by_state, (number, given)
        [dcp] = (tmp_path / "dcp").glob("epoch_1*")
        for folder, source in (("a", "epoch_1.pth"), ("b", "other.pth"), ("c", dcp), ("d", "other.pth")):
            schedule = {"param_scheduler": None} if folder == "d" else {}
            changes = {**both, **schedule, "load_from": str(tmp_path / source), "resume": True}
            [again, _] = run_ranks(train, 2, tmp_path / folder, 2, changes)
            assert len(again["losses"]) == 4


def all_refused(rank: int, folder: Path, schedules: list[list[dict[str, Any]]]) -> list[list[str]]:
    """What the errors say for each schedule, with a checkpoint that names the saved classes and one that does not."""
    return [
        [
            refused_or_not(rank, folder, {"param_scheduler": schedule, "load_from": str(folder / name)})
            for name in ("epoch_1.pth", "other.pth")
        ]
        for schedule in schedules
    ]


def refused_or_not(rank: int, folder: Path, changes: dict[str, Any]) -> str:
    try:
        kind, text = refused(rank, folder / "again", changes)
    except AssertionError as error:
        return str(error)
    assert kind is StateDictError, text
    return text
