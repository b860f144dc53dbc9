"""A config trains with Muon and AdamW: sharded as in one process, with `paramwise_cfg`, schedules, AMP and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.optim import DefaultOptimWrapperConstructor, OptimWrapper
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
from tests.mmengine_adapter.toy import UNSHARDED, ToyModel, runner_of, strategy, train
from tests.mmengine_adapter.toy import config as toy_config

from mmfsdp.errors import ConfigError, PolicyError, ShardStateError, StateDictError
from mmfsdp.optimizers import MuonWithAdamW
from mmfsdp.testing import run_ranks
from mmfsdp_mmengine import MuonConstructor
from mmfsdp_mmengine.doctor.diagnosing import diagnose

PARAMWISE = {
    "custom_keys": {"blocks.0": {"lr_mult": 0.5, "decay_mult": 2.0}},
    "norm_decay_mult": 0.0,
    "bias_lr_mult": 3.0,
}
OPTIM: dict[str, Any] = {
    "constructor": "MuonConstructor",
    "optimizer": {"type": "MuonWithAdamW", "lr": 0.02, "weight_decay": 0.1, "adamw": {"lr": 0.01}},
    "paramwise_cfg": PARAMWISE,
    "clip_grad": {"max_norm": 0.5},
    "accumulative_counts": 2,
}


def rates(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, tuple[float, float]]:
    names = {id(param): name for name, param in model.named_parameters()}
    return {
        names[id(param)]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for param in group["params"]
    }


def test_rates_are_those_of_mmengine() -> None:
    model = ToyModel()
    settings = {key: value for key, value in OPTIM.items() if key not in ("constructor", "paramwise_cfg")}
    wrapper = OPTIM_WRAPPER_CONSTRUCTORS.get("MuonConstructor")(settings, PARAMWISE)(model)
    assert isinstance(wrapper, OptimWrapper)
    found = rates(wrapper.optimizer, model)
    wanted = {}
    for lr, decay in ((0.02, 0.1), (0.01, 0.01)):
        adamw = {"optimizer": {"type": "AdamW", "lr": lr, "weight_decay": decay}}
        wanted[lr] = rates(DefaultOptimWrapperConstructor(adamw, PARAMWISE)(model).optimizer, model)
    under_muon = {"patch.weight", *(f"blocks.{block}.fc{layer}.weight" for block in (0, 1) for layer in (1, 2))}
    assert found.keys() == wanted[0.02].keys()
    for name, given in found.items():
        assert given == pytest.approx(wanted[0.02 if name in under_muon else 0.01][name]), name
    groups = {group["optimizer"] for group in wrapper.optimizer.param_groups}
    assert groups == {"muon", "adamw"}


def test_the_log_shows_what_the_optimizers_do(tmp_path: Path) -> None:
    changes = {"train_cfg": {"by_epoch": True, "max_epochs": 1}, "log_level": "INFO"}
    run_ranks(trained, 2, tmp_path, 2, changes)
    [log] = tmp_path.rglob("*.log")
    shown = log.read_text().partition("Sharding plan:")[2]
    rows = [line.split() for line in shown.splitlines()]
    assert ["optimizer", "tensors", "params", "state/rank", "messages", "sent/rank", "FLOPs"] in rows
    found = [(row[0], row[1]) for row in rows if row and row[0] in ("muon", "adamw")]
    # Two groups of Muon, as blocks.0 has rates of its own; AdamW's differ by block, norm and bias.
    assert sum(int(tensors) for kind, tensors in found if kind == "muon") == 5
    assert len({kind for kind, _ in found}) == 2


DIAGNOSED: dict[str, tuple[dict[str, Any], tuple[str, str] | None]] = {
    "right": ({}, None),
    "no constructor": ({"constructor": None}, ("optim_wrapper.constructor", "MuonWithAdamW needs a constructor")),
    "other type": ({"type": "SGD"}, ("optim_wrapper.optimizer.type", "MuonConstructor builds MuonWithAdamW, but")),
    "no match": ({"muon": ["blocs.*"]}, ("optim_wrapper.optimizer.muon", "Pattern 'blocs.*' matches no trained")),
    "unknown": ({"learning_rate": 1}, ("optim_wrapper.optimizer", "learning_rate")),
}


@pytest.mark.parametrize("case", DIAGNOSED)
def test_doctor_builds_it(case: str, tmp_path: Path) -> None:
    changes, wanted = DIAGNOSED[case]
    optim = {**OPTIM, "optimizer": {**OPTIM["optimizer"], **changes}}
    if "constructor" in optim["optimizer"]:
        del optim["constructor"], optim["optimizer"]["constructor"]
    imports = {"imports": ["mmfsdp_mmengine"]}
    found = diagnose("config.py", toy_config(tmp_path, 2, optim_wrapper=optim, custom_imports=imports))
    errors = [item for item in found.findings if item.level == "error"]
    if wanted is None:
        assert errors == []
        assert found.plan is not None
        assert found.plan.optimizer is not None
        assert {group.optimizer for group in found.plan.optimizer.groups} == {"muon", "adamw"}
        assert found.memory is not None
        assert found.memory.optimizer == "muon and adamw"
        return
    [error] = errors
    assert error.path.startswith(wanted[0])
    assert wanted[1] in error.here


def trained(rank: int, folder: Path, ranks: int, changes: dict[str, Any]) -> dict[str, Any]:
    return train(rank, folder, ranks, {"optim_wrapper": OPTIM, **changes})


@pytest.mark.sample("AmpOptimWrapper")
@pytest.mark.parametrize("kind", ["OptimWrapper", "AmpOptimWrapper"])
def test_trains_as_one_process(tmp_path: Path, kind: str) -> None:
    optim = {**OPTIM, "type": kind, **({"dtype": "bfloat16"} if kind == "AmpOptimWrapper" else {})}
    [alone] = run_ranks(trained, 1, tmp_path / "alone", 1, {"optim_wrapper": optim, "strategy": UNSHARDED})
    for found in run_ranks(trained, 2, tmp_path / "sharded", 2, {"optim_wrapper": optim}):
        # Newton-Schulz and autocast compute in bfloat16.
        tolerance = 5e-3 if kind == "OptimWrapper" else 2e-2
        assert found["losses"] == pytest.approx(alone["losses"], rel=tolerance)
        assert found["losses"][-1] < found["losses"][0]
        assert found["norms"] == pytest.approx(alone["norms"], rel=5 * tolerance)


@pytest.mark.sample("local")
@pytest.mark.parametrize("kind", ["local", "sharded"])
def test_resumes(tmp_path: Path, kind: str) -> None:
    changes = {"strategy": strategy(kind)}
    [whole, _] = run_ranks(trained, 2, tmp_path / "whole", 2, changes)
    first = {**changes, "train_cfg": {"by_epoch": True, "max_epochs": 1}}
    run_ranks(trained, 2, tmp_path / "parts", 2, first)
    for ranks, tolerance in ((2, 0.0), (1, 5e-3)):
        again = {**changes, "resume": True, "load_from": str(tmp_path / "parts" / "epoch_1.pth")}
        for found in run_ranks(trained, ranks, tmp_path / f"again{ranks}", ranks, again):
            assert found["losses"] == pytest.approx(whole["losses"][4:], rel=tolerance, abs=0)


def resumed_otherwise(rank: int, folder: Path) -> str:
    """Train an epoch, then resume with a matrix moved to AdamW; return the error."""
    runner_of(toy_config(folder, 2, optim_wrapper=OPTIM, train_cfg={"by_epoch": True, "max_epochs": 1})).train()
    moved = {**OPTIM, "optimizer": {**OPTIM["optimizer"], "exclude": ["blocks.0.fc1.weight"]}}
    again = toy_config(folder / "again", 2, optim_wrapper=moved, resume=True, load_from=str(folder / "epoch_1.pth"))
    try:
        runner_of(again).train()
    except StateDictError as error:
        return str(error)
    return ""


def test_another_grouping_is_named(tmp_path: Path) -> None:
    for text in run_ranks(resumed_otherwise, 2, tmp_path):
        assert "The state has optimizer='muon' for 'blocks.0.fc1.weight', but the optimizer has" in text


@pytest.mark.parametrize(
    ("optimizer", "paramwise", "message"),
    [
        (
            {"type": "SGD", "lr": 0.1},
            None,
            "MuonConstructor builds MuonWithAdamW, but",
        ),
        ({"lr": 0.1}, {"custom_keys": {"head": {"lr": 1.0}}}, "Write lr_mult=... instead."),
        ({"lr": 0.1, "rate": 1}, None, "rate"),
        ({"lr": 0.1, "muon": ["none.*"]}, None, "none"),
    ],
)
def test_mistakes(optimizer: dict[str, Any], paramwise: Any, message: str) -> None:
    with pytest.raises((ConfigError, PolicyError), match=message):
        MuonConstructor({"optimizer": optimizer}, paramwise)(ToyModel())


def of_flat_parameters(rank: int, folder: Path) -> str:
    try:
        runner_of(toy_config(folder, 2, optim_wrapper=OPTIM, strategy=strategy(engine="fsdp1"))).train()
    except ShardStateError as error:
        return str(error)
    return ""


def test_flat_parameters_have_no_rows(tmp_path: Path) -> None:
    assert all("which have no rows" in text for text in run_ranks(of_flat_parameters, 2, tmp_path))


def test_names_what_the_optimizer_is() -> None:
    assert MuonConstructor({"optimizer": {"lr": 0.1}})(ToyModel()).optimizer.__class__ is MuonWithAdamW
