"""The forms of optimizer states that torch's class has: ours equal its own, and each loads into every engine."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.distributed.torch_class import ENGINES, TorchFSDP, adamw, close, ours, plain, step, torch_settles, torchs
from torch import nn
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, OptimStateKeyType, StateDictType
from torch.distributed.tensor import DTensor

import mmfsdp
from mmfsdp.errors import StateDictError, UnsupportedCallError
from mmfsdp.testing import run_ranks

FSDP: Any = mmfsdp.FullyShardedDataParallel
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT


def groups(model: nn.Module) -> torch.optim.AdamW:
    """Return an optimizer of two groups in another order than the model's parameters."""
    params = dict(model.named_parameters())
    block = [name for name in params if "blocks.1" in name]
    rest = [name for name in params if "blocks.1" not in name]
    return torch.optim.AdamW(
        [
            {"params": [params[name] for name in block], "weight_decay": 0.5},
            {"params": [params[name] for name in reversed(rest)], "lr": 1e-3},
        ],
        lr=1e-2,
    )


def saved(rank: int, name: str) -> dict[str, Any]:
    with torch_settles():
        reference = torchs()
        theirs = adamw(reference)
        step(reference, theirs)
        step(reference, theirs, 1)
        want = copy.deepcopy(TorchFSDP.optim_state_dict(reference, theirs))
    model = ours(name)
    optimizer = adamw(model)
    close(FSDP.optim_state_dict(model, optimizer)["state"], {})  # before the first step
    step(model, optimizer)
    step(model, optimizer, 1)
    for full in (
        FSDP.optim_state_dict(model, optimizer),
        model.optim_state_dict(optimizer, optimizer.state_dict()),
        FSDP.optim_state_dict(model, optimizer, group=dist.group.WORLD),
        FSDP.full_optim_state_dict(model, optimizer, rank0_only=False),
        model.full_optim_state_dict(optimizer, [*model.parameters()], False),
    ):
        close(full["state"], want["state"])
        for group, other in zip(full["param_groups"], want["param_groups"], strict=True):
            assert {**group, "params": sorted(group["params"])} == {**other, "params": sorted(other["params"])}
    # Given, it is that state which is converted.
    own_form = optimizer.state_dict()
    doubled = {**own_form, "state": {key: {k: 2 * v for k, v in e.items()} for key, e in own_form["state"].items()}}
    twice = model.optim_state_dict(optimizer, doubled)
    close(twice["state"], {key: {k: 2 * v for k, v in e.items()} for key, e in want["state"].items()})
    # On the first rank only.
    config = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, FULL, FullStateDictConfig(True, True), config):
        alone = FSDP.optim_state_dict(model, optimizer)
    assert bool(alone) == bool(FSDP.full_optim_state_dict(model, optimizer)) == (rank == 0)
    # Sharded.
    with FSDP.state_dict_type(model, SHARDED):
        sharded = FSDP.optim_state_dict(model, optimizer)
    for form in (sharded, FSDP.sharded_optim_state_dict(model, optimizer)):
        for key, entries in form["state"].items():
            assert isinstance(entries["exp_avg"], DTensor), key
            close(entries["exp_avg"].full_tensor(), want["state"][key]["exp_avg"])
            close(entries["exp_avg_sq"].full_tensor(), want["state"][key]["exp_avg_sq"])
    return {"optim": want, "model": model.state_dict()}


def round_trips(rank: int, name: str, folder: str) -> None:
    model = ours(name)
    optimizer = adamw(model)
    step(model, optimizer)
    weights = model.state_dict()
    full = model.optim_state_dict(optimizer)
    with model.state_dict_type(SHARDED):
        sharded = copy.deepcopy(model.optim_state_dict(optimizer))  # training changes it, as it does in torch
        dcp.save({"optim": sharded}, checkpoint_id=Path(folder, name))
    given = copy.deepcopy(full)
    step(model, optimizer, 1)
    want = model.state_dict()

    def check(load: Any, *, loaded: bool = False, everywhere: bool = True) -> None:
        if not everywhere and name not in ("fsdp2", "fsdp1-flat"):
            return  # another spelling of a call, which is the same with each engine
        other = ours(name, seed=5)
        fresh = adamw(other)
        other.load_state_dict(weights)
        state = load(other, fresh)
        if not loaded:
            assert not fresh.state  # unchanged so far
            fresh.load_state_dict(state)
        step(other, fresh, 1)
        close(other.state_dict(), want)

    def by_dcp(other: Any, fresh: Any) -> Any:
        with other.state_dict_type(SHARDED):
            step(other, fresh)  # a state to fill
            content = {"optim": other.optim_state_dict(fresh)}
            dcp.load(content, checkpoint_id=Path(folder, name))
            other.load_state_dict(weights)
            return other.optim_state_dict_to_load(fresh, content["optim"], load_directly=True)

    def by_torchs_reader(other: Any, fresh: Any) -> Any:
        with torch_settles(), other.state_dict_type(SHARDED):
            reader = dcp.FileSystemReader(Path(folder, name))
            stored = load_sharded_optimizer_state_dict(other.state_dict(), "optim", reader)
            return other.optim_state_dict_to_load(fresh, stored["optim"])

    mine = full if rank == 0 else None
    check(by_torchs_reader)
    check(lambda other, fresh: FSDP.optim_state_dict_to_load(other, fresh, full))
    check(lambda other, fresh: FSDP.optim_state_dict_to_load(full, other, fresh), everywhere=False)  # torch 2.0's order
    check(lambda other, fresh: other.optim_state_dict_to_load(fresh, full), everywhere=False)
    check(lambda other, fresh: FSDP.optim_state_dict_to_load(other, fresh, full, load_directly=True), loaded=True)
    check(lambda other, fresh: FSDP.optim_state_dict_to_load(other, fresh, sharded))
    check(by_dcp, loaded=True)
    check(lambda other, fresh: FSDP.flatten_sharded_optim_state_dict(sharded, other, fresh))
    check(lambda other, fresh: FSDP.shard_full_optim_state_dict(full, other))
    check(lambda other, fresh: other.shard_full_optim_state_dict(full, optim=fresh), everywhere=False)
    check(lambda other, fresh: FSDP.shard_full_optim_state_dict(full, other, [*other.parameters()]), everywhere=False)
    check(lambda other, fresh: FSDP.scatter_full_optim_state_dict(mine, other, optim=fresh), everywhere=False)
    check(lambda other, fresh: FSDP.scatter_full_optim_state_dict(mine, other))

    def from_rank0(other: Any, fresh: Any) -> Any:
        config = FullOptimStateDictConfig(rank0_only=True)
        with FSDP.state_dict_type(other, FULL, None, config):
            return FSDP.optim_state_dict_to_load(other, fresh, mine or {})

    check(from_rank0)
    close(full, given)  # what was given is not changed


@pytest.mark.sample("fsdp2")
@pytest.mark.parametrize("name", ENGINES)
def test_round_trips(name: str, tmp_path: Path) -> None:
    run_ranks(round_trips, 2, name, str(tmp_path))


def continues(rank: int, name: str, content: dict[str, Any]) -> dict[str, Any]:
    model = ours(name, seed=5)
    optimizer = adamw(model)
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, content["optim"]))
    step(model, optimizer, 2)
    state: dict[str, Any] = model.state_dict()
    return state


def test_full_states_load_into_any_number_of_ranks_and_any_engine() -> None:
    content = run_ranks(saved, 2, "fsdp2")[0]
    single = plain()
    optimizer = adamw(single)
    single.load_state_dict(content["model"])
    names = [name for name, _ in single.named_parameters()]
    optimizer.load_state_dict(
        {
            # torch's class gives the parameters of a unit one and the same step.
            "state": {names.index(key): copy.deepcopy(entries) for key, entries in content["optim"]["state"].items()},
            "param_groups": [{**content["optim"]["param_groups"][0], "params": [*range(len(names))]}],
        }
    )
    results = {}
    for size, name in ((1, "fsdp2"), (2, "fsdp1"), (2, "fsdp1-flat"), (2, "replicate"), (4, "fsdp2")):
        results[size, name] = run_ranks(continues, size, name, content)[0]
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randint(0, 10, (2, 8), generator=generator)
    nn.functional.cross_entropy(single(x), y).backward()
    optimizer.step()
    for result in results.values():
        close(result, dict(single.state_dict()))


def rekeys(rank: int, name: str) -> None:
    model = ours(name)
    optimizer = adamw(model)
    step(model, optimizer)
    full = model.optim_state_dict(optimizer)
    single = plain()
    own = adamw(single)
    # Of the sharded model, for the unsharded one's optimizer, as torch's docs have it; and back.
    by_id = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, single)
    own.load_state_dict(by_id)
    by_name = FSDP.rekey_optim_state_dict(own.state_dict(), OptimStateKeyType.PARAM_NAME, single, optim=own)
    close(by_name["state"], full["state"])
    assert (
        FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_NAME, single)["state"].keys() == full["state"].keys()
    )
    optimizer.load_state_dict(FSDP.shard_full_optim_state_dict(by_name, model, optim=optimizer))
    if name == "fsdp2":
        assert model.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID)["state"].keys() == by_id["state"].keys()
        two = groups(model)
        step(model, two)
        state = model.optim_state_dict(two)
        ids = FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, model, optim=two)
        assert [len(group["params"]) for group in ids["param_groups"]] == [6, 8]
        assert [group["lr"] for group in ids["param_groups"]] == [1e-2, 1e-3]
        close(ids["state"][0], state["state"]["blocks.1.norm.weight"])
        with pytest.raises(StateDictError, match="2 parameters that are not the model's"):
            FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, model, optim=adamw(nn.Linear(2, 2)))
        with pytest.raises(StateDictError, match=r"must be OptimStateKeyType.PARAM_NAME or PARAM_ID, got 'id'"):
            FSDP.rekey_optim_state_dict(full, "id", model)


def mistakes(rank: int, name: str) -> None:
    model = ours(name)
    optimizer = adamw(model)
    step(model, optimizer)
    full = model.optim_state_dict(optimizer)
    bad = {**full, "state": {**full["state"], "blocks.7.up.weight": full["state"]["scale"]}}
    for call in (
        lambda: FSDP.optim_state_dict_to_load(model, optimizer, bad),
        lambda: FSDP.scatter_full_optim_state_dict(bad if rank == 0 else None, model, optim=optimizer),
        lambda: FSDP.optim_state_dict_to_load(model, optimizer, bad if rank == 1 else full),
    ):
        with pytest.raises(StateDictError, match=r"blocks.7.up.weight"):
            call()
    with pytest.raises(StateDictError, match=r"first rank must pass an optimizer's state.*NoneType"):
        FSDP.scatter_full_optim_state_dict(full if rank else None, model, optim=optimizer)
    with pytest.raises(UnsupportedCallError, match="is_named_optimizer"):
        FSDP.optim_state_dict_to_load(model, optimizer, full, is_named_optimizer=True)
    with pytest.raises(UnsupportedCallError, match=r"takes \(model, optim, .* and got \(dict, AdamW, .*\)"):
        FSDP.optim_state_dict_to_load(full, optimizer, model)
    alone = dist.new_group([0])
    if rank == 0 and name != "replicate":  # where each rank has a shard group of its own
        with pytest.raises(StateDictError, match=r"The group has the ranks \[0\], but .* over \[0, 1\]"):
            FSDP.optim_state_dict(model, optimizer, group=alone)
    with pytest.raises(TypeError, match="optimizer"):
        FSDP.optim_state_dict(model, optimizer=optimizer)
    step(model, optimizer)  # nothing is broken


def all_of_them(rank: int, name: str) -> None:
    for function in (saved, rekeys, mistakes):
        function(rank, name)


@pytest.mark.sample("fsdp2")
@pytest.mark.parametrize("name", ENGINES)
def test_optimizer_states(name: str) -> None:
    """All in one call, because worlds start slowly; the trace names the function that failed."""
    run_ranks(all_of_them, 2, name)
