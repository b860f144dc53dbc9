"""Averages of sharded weights are torch's of one process, and are saved and resumed on any number of ranks."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.measured import storage_bytes
from torch import nn
from torch.optim import swa_utils

import mmfsdp
from mmfsdp import errors
from mmfsdp.checkpoint import convert
from mmfsdp.testing import run_ranks, single_rank

WRAP = {"kind": "module_class", "classes": "Linear"}
HYBRID = {"strategy": "HYBRID_SHARD", "shard_size": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "full": {"wrap": WRAP},
    "grad op": {"sharding": "SHARD_GRAD_OP"},
    "replicate": {"sharding": "NO_SHARD"},
    "offload": {"wrap": WRAP, "cpu_offload": True},
    "partly whole": {"wrap": WRAP, "sharding": {"ignored_parameters": ["down.*"]}},
    "compiled": {"wrap": WRAP, "compile": {"backend": "eager"}},
    "checkpointed": {"wrap": WRAP, "activation_checkpointing": "full"},
    "fsdp1": {"wrap": WRAP, "engine": "fsdp1"},
    "fsdp1, flat": {"engine": "fsdp1", "sharding": {"use_orig_params": False}},
    "fsdp1, whole": {"engine": "fsdp1", "sharding": "NO_SHARD"},
}
ON_FOUR: dict[str, dict[str, Any]] = {
    "hybrid": {"wrap": WRAP, "sharding": HYBRID},
    "hybrid, grad op": {"wrap": WRAP, "sharding": {**HYBRID, "strategy": "_HYBRID_SHARD_ZERO2"}},
    "fsdp1, hybrid": {"wrap": WRAP, "engine": "fsdp1", "sharding": HYBRID},
}
WAYS: dict[str, dict[str, Any]] = {
    "decay": {"decay": 0.8},
    "warm-up": {"decay": lambda n: min(0.8, (1 + n) / (10 + n))},
    "equal": {},
    "torch's function": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.8), "use_buffers": True},
    "one by one": {"avg_fn": lambda average, weight, _: average * 0.5 + weight * 0.5},
}
STEPS = 5


class Net(nn.Module):
    """Has a batch norm, a tied weight, a scalar, and fewer rows than some ranks could share."""

    def __init__(self, width: int = 9) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(6, width), nn.BatchNorm1d(width), nn.Linear(width, 6)
        self.head, self.scale = nn.Linear(6, width), nn.Parameter(torch.ones(()))
        self.head.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.norm(self.up(x)).relu())) * self.scale


def train(model: nn.Module, averaged: Any, optimizer: torch.optim.Optimizer, begin: int = 0, end: int = STEPS) -> None:
    model.train()
    for step in range(begin, end):
        model(torch.linspace(-1, 1, 24).view(4, 6) * (step + 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def alone(decay: Any = None, end: int = STEPS, **way: Any) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the state of torch's averages in one process, and what they compute."""
    model = Net()
    if callable(decay):
        way["multi_avg_fn"] = lambda averages, weights, n: torch._foreach_lerp_(averages, weights, 1 - decay(int(n)))
    elif decay is not None:
        way["multi_avg_fn"] = swa_utils.get_ema_multi_avg_fn(decay)
    averaged = swa_utils.AveragedModel(model, **way)
    train(model, averaged, optimizer_of(model), end=end)
    return averaged.state_dict(), averaged.eval()(torch.ones(2, 6)).detach()


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


def averages_are_those_of_one_process(rank: int, name: str, ways: list[str]) -> None:
    for way in ways:
        expected, output = alone(**WAYS[way])
        model = mmfsdp.shard(Net(), {**CONFIGS, **ON_FOUR}[name])
        averaged, optimizer = mmfsdp.AveragedModel(model, **WAYS[way]), optimizer_of(model)
        train(model, averaged, optimizer)
        trained = mmfsdp.model_state_dict(model, rank0_only=False)
        torch.testing.assert_close(whole(averaged.state_dict()), dict(expected), rtol=0, atol=1e-6)
        assert averaged.n_averaged == STEPS
        model.eval()
        with averaged.average_parameters(), torch.no_grad():
            torch.testing.assert_close(model(torch.ones(2, 6)), output, rtol=0, atol=1e-6)
        torch.testing.assert_close(mmfsdp.model_state_dict(model, rank0_only=False), trained, rtol=0, atol=0)
        with pytest.raises(ZeroDivisionError), averaged.average_parameters():
            1 / 0  # noqa: B018
        torch.testing.assert_close(mmfsdp.model_state_dict(model, rank0_only=False), trained, rtol=0, atol=0)

        # The sharded model and its averages train on as one process does.
        train(model, averaged, optimizer, STEPS, STEPS + 1)
        more, _ = alone(**WAYS[way], end=STEPS + 1)
        torch.testing.assert_close(whole(averaged.state_dict()), dict(more), rtol=0, atol=1e-6)


@pytest.mark.sample("full", "fsdp1")
@pytest.mark.parametrize("name", CONFIGS)
def test_averages_are_those_of_one_process(name: str) -> None:
    run_ranks(averages_are_those_of_one_process, 2, name, [*WAYS] if name in ("full", "fsdp1") else ["decay"])


@pytest.mark.parametrize("name", ON_FOUR)
def test_averages_in_hybrid_groups(name: str) -> None:
    run_ranks(averages_are_those_of_one_process, 4, name, ["decay"])


def managed(path: str, *args: Any) -> mmfsdp.CheckpointManager:
    model, optimizer, averaged = args
    fast = {"fast_directory": f"{path}_fast", "fast_every_steps": 1} if path.endswith("nodes") else {"every_steps": 1}
    return mmfsdp.CheckpointManager(path, model, optimizer, averaged=averaged, background=False, **fast)


def save(rank: int, folder: str, names: list[str]) -> None:
    for name in names:
        model = mmfsdp.shard(Net(), {**CONFIGS, **ON_FOUR}[name])
        averaged, optimizer = mmfsdp.AveragedModel(model, 0.8), optimizer_of(model)
        train(model, averaged, optimizer, end=3)
        for kind in ("sharded", "local", "full"):
            path = f"{folder}/{name}/{kind}"
            waits = kind != "local"
            mmfsdp.save_checkpoint(path, model, optimizer, averaged=averaged, kind=kind, blocking=waits).result()
        for run in ("run", "nodes"):
            with managed(f"{folder}/{name}/{run}", model, optimizer, averaged) as manager:
                manager.resume()
                manager.step(3)


def resume(rank: int, folder: str, name: str, config: dict[str, Any]) -> None:
    expected, _ = alone(decay=0.8)
    for kind in ("sharded", "local", "full", "run", "nodes"):
        model = mmfsdp.shard(Net(), config)
        averaged, optimizer = mmfsdp.AveragedModel(model, 0.8), optimizer_of(model)
        path = f"{folder}/{name}/{kind}"
        if kind in ("run", "nodes"):
            manager = managed(path, model, optimizer, averaged)
            assert manager.resume() == 3
            manager.__exit__(RuntimeError, None, None)  # saves nothing
        else:
            rest, _ = mmfsdp.load_checkpoint(path, model, optimizer, averaged=averaged)
            assert rest == {}
        assert averaged.n_averaged == 3
        train(model, averaged, optimizer, begin=3)
        torch.testing.assert_close(whole(averaged.state_dict()), dict(expected), rtol=0, atol=1e-6)


@pytest.mark.sample("full")
@pytest.mark.parametrize("name", ["full", "fsdp1", "replicate"])
def test_averages_resume_on_other_ranks(name: str, tmp_path: Path) -> None:
    run_ranks(save, 2, str(tmp_path), [name])
    run_ranks(resume, 3, str(tmp_path), name, CONFIGS["full"])
    run_ranks(resume, 1, str(tmp_path), name, CONFIGS["fsdp1, whole"])
    # Plain PyTorch loads the averages, and the command line writes them as the model's weights.
    plain = swa_utils.AveragedModel(Net())
    plain.load_state_dict(torch.load(tmp_path / name / "full", weights_only=True)["ema_state_dict"])
    for source in ("sharded", "run/step_3"):
        convert(tmp_path / name / source, tmp_path / "averages.pth", use_ema=True, overwrite=True)
        found = torch.load(tmp_path / "averages.pth", weights_only=True)["state_dict"]
        torch.testing.assert_close(found, dict(plain.module.state_dict()), rtol=0, atol=1e-6)


def test_averages_resume_from_hybrid_groups(tmp_path: Path) -> None:
    run_ranks(save, 4, str(tmp_path), ["hybrid"])
    run_ranks(resume, 2, str(tmp_path), "hybrid", CONFIGS["fsdp1"])


def costs(rank: int) -> tuple[int, int, int]:
    """Return the bytes of the shards, and what averages add to them at rest and in an evaluation."""
    model = mmfsdp.shard(nn.Linear(512, 512, bias=False))
    shards = storage_bytes(model.parameters())

    def held() -> int:
        gc.collect()
        found = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter) and not each.is_meta]
        return storage_bytes(found)

    before = held()
    averaged = mmfsdp.AveragedModel(model, 0.9)
    averaged.update_parameters()
    after = held()
    with averaged.average_parameters():
        return shards, after - before, held() - before


def test_averages_cost_one_shard() -> None:
    for shards, rest, evaluation in run_ranks(costs, 2):
        assert shards == 512 * 512 * 4 // 2
        assert shards <= rest < 1.01 * shards
        assert shards <= evaluation < 1.01 * shards


def message(call: Any, *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except errors.MmfsdpError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def mistakes(rank: int, folder: str) -> dict[str, str]:
    model, other = mmfsdp.shard(Net()), mmfsdp.shard(Net(8))
    averaged, others = mmfsdp.AveragedModel(model, 0.9), mmfsdp.AveragedModel(other, 0.9)
    half = mmfsdp.shard(nn.Linear(4, 4), precision="bf16-pure")
    frozen = mmfsdp.shard(nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 4)), wrap="Linear")
    frozen[0].requires_grad_(False)  # type: ignore[index]
    optimizer = optimizer_of(model)
    found = {
        "not sharded": message(mmfsdp.AveragedModel, Net(), 0.9),
        "part": message(mmfsdp.AveragedModel, model.up, 0.9),
        "torch's class": message(swa_utils.AveragedModel, model),
        "torch's class, fsdp1": message(swa_utils.AveragedModel, mmfsdp.shard(Net(), engine="fsdp1")),
        "decay": message(mmfsdp.AveragedModel, model, 1.5),
        "decay of a function": message(mmfsdp.AveragedModel, model, lambda n: "0.9"),
        "two ways": message(mmfsdp.AveragedModel, model, 0.9, avg_fn=max),
        "half": message(mmfsdp.AveragedModel, half, 0.999),
        "half, small": message(mmfsdp.AveragedModel, half, 0.9),
        "half, frozen": message(mmfsdp.AveragedModel, frozen, 0.999),
        "another model": message(averaged.update_parameters, other),
        "forward": message(averaged, torch.ones(2, 6)),
        "another structure": message(averaged.load_state_dict, others.state_dict()),
        "weights": message(averaged.load_state_dict, mmfsdp.model_state_dict(model, rank0_only=False)),
        "one rank": message(averaged.load_state_dict, averaged.state_dict() if rank else {}),
        "as state": message(
            mmfsdp.CheckpointManager, f"{folder}/a", model, optimizer, state={"ema": averaged}, every_steps=1
        ),
        "of another model": message(mmfsdp.CheckpointManager, f"{folder}/b", model, optimizer, averaged=others),
        "torch's in a manager": message(
            mmfsdp.CheckpointManager, f"{folder}/c", model, averaged=swa_utils.AveragedModel(Net())
        ),
        "saved of another model": message(mmfsdp.save_checkpoint, f"{folder}/d", model, averaged=others),
        "saved, torch's": message(
            mmfsdp.save_checkpoint, f"{folder}/e", model, averaged=swa_utils.AveragedModel(Net())
        ),
        "saved twice": message(
            mmfsdp.save_checkpoint, f"{folder}/f", model, averaged=averaged, extra={"ema_state_dict": {}}
        ),
        "saved for others": message(
            mmfsdp.save_checkpoint, f"{folder}/g.safetensors", model, averaged=averaged, kind="safetensors"
        ),
        "saved by one rank": message(mmfsdp.save_checkpoint, f"{folder}/h", model, averaged=averaged if rank else None),
    }
    mmfsdp.save_checkpoint(f"{folder}/without", model)
    mmfsdp.save_checkpoint(f"{folder}/other", other, averaged=others)
    mmengine = {"steps": torch.tensor(3), "module.up.weight": torch.zeros(2)}  # where the trained weights are
    mmfsdp.save_checkpoint(f"{folder}/mmengine", model, extra={"ema_state_dict": mmengine})
    found["of MMEngine"] = message(mmfsdp.load_checkpoint, f"{folder}/mmengine", model, averaged=averaged)
    found["without"] = message(mmfsdp.load_checkpoint, f"{folder}/without", model, averaged=averaged)
    found["loaded of another model"] = message(mmfsdp.load_checkpoint, f"{folder}/other", model, averaged=averaged)
    with averaged.average_parameters():
        found["inside"] = message(averaged.update_parameters)
        found["saved inside"] = message(averaged.state_dict)
    return found


EXPECTED = {
    "not sharded": "ShardStateError: This Net was not sharded by mmfsdp. Pass the model that mmfsdp.shard() returned",
    "part": "ShardStateError: This Linear was not sharded by mmfsdp.",
    "torch's class": "write mmfsdp.AveragedModel(model, decay=0.999)",
    "torch's class, fsdp1": "write mmfsdp.AveragedModel(model, decay=0.999)",
    "decay": "ConfigError: decay must be a number from 0 to 1, the share of the averages that an update keeps",
    "decay of a function": "ConfigError: decay must be a number from 0 to 1",
    "two ways": "ConfigError: Pass only one of decay, avg_fn and multi_avg_fn",
    "half": "ConfigError: With decay 0.999 an update moves an average by less than torch.bfloat16 resolves",
    "half, small": "accepted",
    "half, frozen": "accepted",
    "another model": "ShardStateError: update_parameters() was given another Net than AveragedModel",
    "forward": "UnsupportedCallError: An AveragedModel of shards has no forward of its own",
    "another structure": "StateDictError: The state dict does not fit Net",
    "weights": "StateDictError: The state of an AveragedModel has 'n_averaged'",
    "one rank": "StateDictError: ",
    "as state": "ConfigError: 'ema' is an AveragedModel. Pass it as averaged=",
    "of another model": "ConfigError: averaged is an AveragedModel of another model",
    "torch's in a manager": "ShardStateError: This AveragedModel was not sharded by mmfsdp",
    "saved of another model": "ConfigError: averaged is an AveragedModel of another model",
    "saved, torch's": "ConfigError: averaged is a AveragedModel. Pass an mmfsdp.AveragedModel of the model",
    "saved twice": "ConfigError: extra holds 'ema_state_dict', and so does averaged",
    "saved for others": "ConfigError: kind='safetensors' holds the weights alone. Leave out averaged",
    "saved by one rank": "RankMismatchError: ",
    "of MMEngine": "StateDictError: The state of an AveragedModel has 'n_averaged'",
    "without": "FormatError: The checkpoint holds no averages under 'ema_state_dict'; it has 'state_dict'",
    "loaded of another model": "StateDictError: The averages of the checkpoint do not fit the model",
    "inside": "ShardStateError: update_parameters() was called inside average_parameters()",
    "saved inside": "ShardStateError: state_dict() was called inside average_parameters()",
}


def test_mistakes_are_named_on_every_rank(tmp_path: Path) -> None:
    for found in run_ranks(mistakes, 2, str(tmp_path)):
        told = {name: text.replace("Rank 0 failed: ", "") for name, text in found.items()}
        assert {name: text for name, text in told.items() if EXPECTED[name] not in text} == {}


def test_before_the_first_update_averages_are_the_weights() -> None:
    with single_rank():
        model = mmfsdp.shard(Net())
        averaged = mmfsdp.AveragedModel(model, 0.9)
        weights = {name: value + 1 for name, value in mmfsdp.model_state_dict(model).items()}
        mmfsdp.load_model_state_dict(model, weights)
        assert averaged.state_dict()["module.scale"].item() == 2
        with averaged.average_parameters():
            assert mmfsdp.model_state_dict(model)["scale"] == 2
        averaged.load_state_dict(alone(decay=0.8)[0])  # a state of torch's class
        assert averaged.n_averaged == STEPS
