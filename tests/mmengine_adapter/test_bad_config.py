"""What a config gets wrong ends a run on every rank with what to write instead, and touches no checkpoint."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
from mmengine.runner import FlexibleRunner
from tests.mmengine_adapter.toy import UNSHARDED, config, runner_of, strategy, train

from mmfsdp.testing import run_ranks
from mmfsdp_mmengine.doctor.diagnosing import diagnose


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
class OverlappingConstructor:
    """Gives parameters to two optimizers, or to one of them twice."""

    def __init__(self, optim_wrapper_cfg: dict[str, Any], paramwise_cfg: Any = None) -> None:
        self.twice = optim_wrapper_cfg["twice"]

    def __call__(self, model: nn.Module) -> OptimWrapperDict:
        head, rest = [*model.head.parameters()], [*model.blocks.parameters()]
        one = torch.optim.SGD(rest if self.twice else rest + head, lr=0.1)
        other = torch.optim.SGD(head, lr=0.1)
        if self.twice:
            other.param_groups.append({**other.param_groups[0], "params": head[:1]})
        return OptimWrapperDict(one=OptimWrapper(one), other=OptimWrapper(other))


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "policy": (
        {"strategy": strategy("full", auto_wrap_policy="size_based_wrap_policy")},
        ["PolicyNotFoundError: auto_wrap_policy 'size_based_wrap_policy'", "'size_based_auto_wrap_policy'"],
    ),
    "state_dict_cfg": (
        {"strategy": strategy({"state_dict_type": "FLAT_STATE_DICT"})},
        ["ConfigError: state_dict_cfg.state_dict_type 'FLAT_STATE_DICT' is not known.", "Accepted: FULL_STATE_DICT"],
    ),
    "state_dict_cfg that contradicts itself": (
        {
            "strategy": strategy(
                {"state_dict_type": "FULL_STATE_DICT", "state_dict_config": {"type": "LocalStateDictConfig"}}
            )
        },
        ["ConfigError: state_dict_cfg contradicts itself"],
    ),
    "two owners": (
        {"optim_wrapper": {"constructor": "OverlappingConstructor", "twice": False}, "param_scheduler": None},
        ["ConfigError: Parameter 'head.weight' is held by both 'one' and 'other' of the OptimWrapperDict"],
    ),
    "twice by one": (
        {"optim_wrapper": {"constructor": "OverlappingConstructor", "twice": True}, "param_scheduler": None},
        ["ConfigError: Parameter 'head.weight' is held twice by 'other' of the OptimWrapperDict"],
    ),
    "another optimizer": (
        {"optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.1}}, "resume": True},
        ["StateDictError: ", "the config has {'optimizer': 'SGD'}", "load_from and resume=False"],
    ),
    "no checkpoint": ({"load_from": "config.txt"}, ["FormatError: config.txt is not a checkpoint of a known format"]),
    "another model's checkpoint": (
        {"load_from": "other.pth"},
        ["StateDictError: None of the 2 keys of the checkpoint, such as 'stem.weight', is one of ToyModel's"],
    ),
    "another model's checkpoint, with batch norm": (
        {"load_from": "other.pth", "model": {"type": "ToyModel", "batch_norm": True}},
        ["StateDictError: None of the 2 keys of the checkpoint, such as 'stem.weight', is one of ToyModel's"],
    ),
    "weights alone": (
        {"load_from": "published.pth", "resume": True},
        [
            "FormatError: Training cannot be resumed from",
            "it has no meta['iter'], which says where training stopped. To start",
        ],
    ),
    "codes of bytes": (
        {"load_from": "int8.pth"},
        ["StateDictError: 'head.weight' is int8, and the model's is float32: these are codes, and nothing says"],
    ),
    "codes with unknown scales": (
        {"load_from": "scaled.pth", "resume": True},
        ["StateDictError: 'head.weight' is float8_e4m3fn in units of 'head.my_scale', which mmfsdp does not read"],
    ),
    "a path to resume": (
        {"resume": "work/epoch_2.pth"},
        ["ConfigError: resume must be True or False, got 'work/epoch_2.pth'.", "resume=True and load_from='work/ep"],
    ),
    "a hook's argument": (
        {"default_hooks": {"checkpoint": {"type": "CheckpointHook", "intervall": 1}}},
        ["ConfigError: CheckpointHook has no argument 'intervall'. Did you mean 'interval'"],
    ),
    "a checkpoint that is not there": (
        {"load_from": "epoch_9.pth"},
        ["CheckpointNotFoundError: There is no checkpoint at"],
    ),
}


def fail(rank: int, folder: Path) -> dict[str, str]:
    """The errors of all cases, one run after the other."""
    found = {}
    for name, (changes, _) in CASES.items():
        source = {"load_from": str(folder / changes["load_from"])} if "load_from" in changes else {}
        settings = config(folder, 2, **{"strategy": strategy("full"), **changes, **source})
        try:
            runner_of(settings).train()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    """All files but logs, with their time of change."""
    files = [*folder.glob("*.*"), folder / "last_checkpoint"]
    return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in files if file.suffix != ".py"}


def test_every_rank_stops_and_says_why(tmp_path: Path) -> None:
    run_ranks(train, 2, tmp_path, 2, {"strategy": strategy("full")})
    (tmp_path / "config.txt").write_text("no checkpoint")
    torch.save(
        {"meta": {}, "state_dict": nn.ModuleDict({"stem": nn.Linear(2, 3)}).state_dict()}, tmp_path / "other.pth"
    )
    trained = torch.load(tmp_path / "epoch_2.pth", weights_only=False)
    torch.save({"meta": {"version": 1}, "state_dict": trained["state_dict"]}, tmp_path / "published.pth")
    weights = trained["state_dict"]
    codes = {"int8": weights["head.weight"].to(torch.int8), "scaled": weights["head.weight"].to(torch.float8_e4m3fn)}
    for name, value in codes.items():
        coded = {**weights, "head.weight": value, **({"head.my_scale": torch.ones(1)} if name == "scaled" else {})}
        torch.save({**trained, "state_dict": coded}, tmp_path / f"{name}.pth")
    before = content(tmp_path)
    assert {"epoch_1.pth", "epoch_2.pth", "last_checkpoint"} <= {*before}
    for found in run_ranks(fail, 2, tmp_path):
        for name, (_, parts) in CASES.items():
            for part in parts:
                # What is loaded is opened by the first rank alone.
                assert part in found.get(name, "nothing").replace("Rank 0 failed: ", ""), name
    assert content(tmp_path) == before


EPOCHS = {"by_epoch": True, "max_epochs": 2}
LINEAR = {"type": "LinearLR", "start_factor": 0.1, "end": 1}
STEPS = {"type": "MultiStepLR", "milestones": [1]}
SCHEDULES: list[tuple[dict[str, Any], Any, bool]] = [
    (EPOCHS, [LINEAR, {**STEPS, "begin": 1}], True),
    (EPOCHS, [LINEAR, {**STEPS, "begin": 2}], False),
    (EPOCHS, [LINEAR, {**STEPS, "begin": 2, "end": 4}], True),
    ({"type": "EpochBasedTrainLoop", "max_epochs": 1}, {**STEPS, "begin": 1, "convert_to_iter_based": True}, False),
    (EPOCHS, {**STEPS, "begin": 2, "end": 4, "by_epoch": False}, True),
    (EPOCHS, {**STEPS, "begin": 4, "end": 4, "by_epoch": False}, False),
    ({"by_epoch": False, "max_iters": 2}, [{**STEPS, "begin": 2, "by_epoch": False}], False),
    ({"by_epoch": False, "max_iters": 2}, [{**STEPS, "begin": 1, "by_epoch": False}], True),
]


@pytest.mark.parametrize(("train_cfg", "given", "runs"), SCHEDULES)
def test_a_scheduler_that_begins_after_the_end(
    train_cfg: dict[str, Any], given: Any, runs: bool, tmp_path: Path
) -> None:
    optim = {"optimizer": {"type": "SGD", "lr": 0.1}}
    changes = {"optim_wrapper": optim, "train_cfg": train_cfg, "param_scheduler": given}
    settings = config(str(tmp_path), 1, strategy=UNSHARDED, **changes)
    with nullcontext() if runs else pytest.raises(ValueError, match="end should be larger than begin"):
        FlexibleRunner(**settings, experiment_name=tmp_path.name).train()
    found = [item for item in diagnose("", settings).findings if item.path.startswith("param_scheduler")]
    assert [item.level for item in found] == ([] if runs else ["error"])
    assert all("begin=" in item.here for item in found)
