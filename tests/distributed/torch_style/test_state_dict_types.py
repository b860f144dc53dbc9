"""State dict types: `state_dict()` of the wrapper returns what that of torch's class returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.distributed.torch_class import ENGINES, TorchFSDP, adamw, close, ours, plain, step, torch_settles, torchs
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.tensor import DTensor

import mmfsdp
from mmfsdp.errors import ShardStateError, StateDictError, UnsupportedCallError
from mmfsdp.testing import run_ranks

FSDP: Any = mmfsdp.FullyShardedDataParallel
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT


def trained(rank: int, name: str) -> tuple[Any, TorchFSDP]:
    """Return ours and torch's after a step, which have equal weights."""
    with torch_settles():
        reference = torchs()
        step(reference, adamw(reference))
    model = ours(name)
    step(model, adamw(model))
    return model, reference


def whole_ones(rank: int, name: str) -> None:
    model, reference = trained(rank, name)
    with torch_settles():
        want = reference.state_dict()
    assert list(model.state_dict()) == list(want)  # the default is full, on every rank
    close(model.state_dict(), dict(want))
    assert model.get_state_dict_type() == TorchFSDP.get_state_dict_type(reference)
    for config in (
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        FullStateDictConfig(offload_to_cpu=True),
        FullStateDictConfig(rank0_only=True),
    ):
        with FSDP.state_dict_type(model, FULL, config):
            state = model.state_dict()
            assert FSDP.get_state_dict_type(model).state_dict_config == config
        close(state, {} if config.rank0_only and rank else dict(want))
    assert model.get_state_dict_type().state_dict_config == FullStateDictConfig()
    nested: Any = nn.ModuleDict({"student": model, "head": nn.Linear(1, 1)})
    close(
        {key: value for key, value in nested.state_dict().items() if not key.startswith("head")},
        {f"student.{key}": value for key, value in want.items()},
    )
    into: dict[str, Any] = {}
    assert model.state_dict(destination=into, prefix="p.") is into
    assert list(into) == [f"p.{key}" for key in want]
    # It is a copy: training does not change it.
    state, before = model.state_dict(), dict(want)
    step(model, adamw(model))
    close(state, before)

    # And back, also into plain modules.
    other: Any = ours(name, seed=5)
    assert other.load_state_dict(state).missing_keys == []
    close(other.state_dict(), state)
    single = plain(5)
    single.load_state_dict(state)
    close(dict(single.state_dict()), state)
    with pytest.raises(RuntimeError, match=r"embed.weight"):  # as torch's class
        other.load_state_dict({key: value for key, value in state.items() if key != "embed.weight"})


def nested_ones(rank: int, name: str) -> None:
    def pair(seed: int) -> Any:
        return nn.ModuleDict({"student": ours(name, seed), "head": nn.Linear(1, 1)})

    first, second = pair(1), pair(5)
    step(first["student"], adamw(first["student"]))
    with torch.no_grad():
        second["student"].eval()(torch.arange(4))  # leaves units gathered
    state = first.state_dict()
    given = dict(state)
    assert second.load_state_dict(state).missing_keys == []
    assert state.keys() == given.keys()
    close(dict(second.state_dict()), dict(state))
    for change, message in (
        ({"student.embed.weight": torch.zeros(3, 3)}, "size mismatch|takes shards"),
        ({"student.embed.wait": torch.zeros(3, 3)}, "Unexpected"),
    ):
        with pytest.raises(RuntimeError, match=message):
            second.load_state_dict({**state, **change})
    close(dict(second.state_dict()), dict(state))
    step(second["student"], adamw(second["student"]))


def sharded_ones(rank: int, name: str, folder: str) -> None:
    model, reference = trained(rank, name)
    want = {key: value.clone() for key, value in reference.state_dict().items()}
    for config in (None, ShardedStateDictConfig(offload_to_cpu=True)):
        with model.state_dict_type(SHARDED, config):
            state = model.state_dict()
            assert model.get_state_dict_type().state_dict_type is SHARDED
        assert all(isinstance(value, DTensor) for value in state.values())
        close({key: value.full_tensor() for key, value in state.items()}, want)

    # The recipe that torch documents: save and load with DCP.
    path = Path(folder, name)
    FSDP.set_state_dict_type(model, SHARDED, ShardedStateDictConfig(), ShardedOptimStateDictConfig())
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    other: Any = ours(name, seed=5)
    before = FSDP.set_state_dict_type(other, SHARDED)
    assert before.state_dict_type is FULL
    content = {"model": other.state_dict()}
    dcp.load(content, checkpoint_id=path)
    other.load_state_dict(content["model"])
    FSDP.set_state_dict_type(other, before.state_dict_type, before.state_dict_config, before.optim_state_dict_config)
    close(other.state_dict(), want)
    step(other, adamw(other))


@pytest.mark.sample("replicate", "fsdp1-flat")
@pytest.mark.parametrize("name", ENGINES)
def test_sharded_state_dicts(name: str, tmp_path: Path) -> None:
    run_ranks(sharded_ones, 2, name, str(tmp_path))


def settings(rank: int, name: str) -> None:
    model = ours(name)
    default = model.get_state_dict_type()
    with pytest.raises(UnsupportedCallError, match=r"Use StateDictType.SHARDED_STATE_DICT") as caught:
        FSDP.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
    assert isinstance(caught.value, RuntimeError)  # what torch raises with a mesh
    with pytest.raises(StateDictError, match=r"state_dict_config must be a FullStateDictConfig, got Local") as wrong:
        FSDP.set_state_dict_type(model, FULL, LocalStateDictConfig())
    assert isinstance(wrong.value, RuntimeError)
    with pytest.raises(StateDictError, match="optim_state_dict_config must be a ShardedOptimStateDictConfig"):
        model.set_state_dict_type(SHARDED, None, FullOptimStateDictConfig())
    with pytest.raises(StateDictError, match="got 'FULL_STATE_DICT'"):
        model.set_state_dict_type("FULL_STATE_DICT")
    with pytest.raises(TypeError, match="state_dict_typ"):
        model.set_state_dict_type(state_dict_typ=FULL)
    assert model.get_state_dict_type() == default
    with pytest.raises(ZeroDivisionError), FSDP.state_dict_type(model, SHARDED):
        1 / 0  # noqa: B018
    assert model.get_state_dict_type() == default  # torch's class stays with the type

    pair = nn.ModuleList([model, ours(name, seed=2)])
    with FSDP.state_dict_type(pair, SHARDED):
        assert FSDP.get_state_dict_type(pair[1]).state_dict_type is SHARDED
    assert FSDP.get_state_dict_type(pair) == default
    FSDP.set_state_dict_type(pair[1], SHARDED)
    with FSDP.state_dict_type(pair, FULL):
        pass
    assert FSDP.get_state_dict_type(pair[1]).state_dict_type is SHARDED
    with pytest.raises(StateDictError, match="different state dict types"):
        FSDP.get_state_dict_type(pair)
    if name in ("fsdp2", "replicate"):
        for bare in (mmfsdp.shard(plain()), plain()):
            with pytest.raises(ShardStateError, match=r"call mmfsdp.model_state_dict\(\)"):
                FSDP.set_state_dict_type(bare, FULL)


def units(rank: int, name: str) -> None:
    with torch_settles():
        reference = torchs()
        want = [type(unit.module).__name__ for unit in TorchFSDP.fsdp_modules(reference)]
        assert reference.check_is_root()
    model = ours(name)
    found = FSDP.fsdp_modules(model)
    assert found[0] is model
    assert [type(getattr(unit, "module", unit)).__name__.removeprefix("FSDP") for unit in found] == want
    assert FSDP.fsdp_modules(nn.ModuleList([model])) == model.fsdp_modules() == found
    assert FSDP.fsdp_modules(model, root_only=True) == [model]
    assert FSDP.fsdp_modules(model.module.blocks) == found[1:]
    assert FSDP.fsdp_modules(plain()) == []
    assert model.check_is_root()
    step(model, adamw(model))
    assert [unit for unit in found if isinstance(unit, FSDP) and unit.check_is_root()] == [model]


def halving(state: dict[str, int], grad: torch.Tensor, out: torch.Tensor) -> None:
    """Reduce as the default does, but return half of it."""
    state["calls"] += 1
    torch.distributed.reduce_scatter_tensor(out, grad)
    out.div_(2 * torch.distributed.get_world_size())


def hooks(rank: int, name: str) -> None:
    model = ours(name)
    if not name.startswith("fsdp1"):
        with pytest.raises(UnsupportedCallError, match=r"need engine='fsdp1'.*reduce_dtype") as caught:
            model.register_comm_hook(None, halving)
        assert isinstance(caught.value, NotImplementedError)
        return
    state = {"calls": 0}
    step(model, None)
    want = model.clip_grad_norm_(1e9)
    model.zero_grad()
    other = ours(name)
    other.register_comm_hook(state, halving)
    step(other, None)
    assert state["calls"] == 3
    close(other.clip_grad_norm_(1e9), want / 2)


def all_of_them(rank: int, name: str) -> None:
    for function in (whole_ones, nested_ones, settings, units, hooks):
        function(rank, name)


@pytest.mark.sample("fsdp2", "fsdp1-flat")
@pytest.mark.parametrize("name", ENGINES)
def test_state_dict_types(name: str) -> None:
    """All in one call, because worlds start slowly; the trace names the function that failed."""
    run_ranks(all_of_them, 2, name)
