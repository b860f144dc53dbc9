"""Checkpoints that torch, Hugging Face's tools and stock MMEngine wrote, loaded into sharded models bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from tests.distributed.models import BLOCKS, build, train
from tests.distributed.saving.test_checkpoints_online import CONFIGS, State, told, whole_state
from tests.distributed.state.test_state_dicts import equal, optimizer_of
from tests.distributed.stock_local import save_local, toy
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import mmfsdp
from mmfsdp.errors import IncompleteCheckpointError, StateDictError
from mmfsdp.testing import run_ranks


class Spare(nn.Module):
    """With a trainable parameter that never gets a gradient."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner, self.spare = build(seed=seed), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for seed in range(2):
        torch.manual_seed(seed)
        model(torch.randint(0, 10, (8,))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def torch_saves(rank: int, form: str, path: str) -> State:
    """Train with nothing but torch, save with DCP, and return what the unsharded model and optimizer would have."""
    model: nn.Module = Spare(1)
    scale = model.inner.scale
    if form == "fsdp1":
        model = FullyShardedDataParallel(
            model, use_orig_params=True, device_id=torch.device("cpu"), ignored_states=[scale]
        )
    else:
        fully_shard(model.inner.blocks[0])
        fully_shard(model, ignored_params={scale})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flattened")
    weights, state = get_state_dict(model, optimizer, options=options)
    content: dict[str, Any] = {
        "app": {"app": {"model": weights, "optim": state}},
        "bare": weights,
        "by place": {"model": weights, "optimizer": optimizer.state_dict()},
    }.get(form, {"model": weights, "optimizer": state, "epoch": 3})
    dcp.save(content, checkpoint_id=path)
    full = StateDictOptions(full_state_dict=True)
    named = get_optimizer_state_dict(model, optimizer, options=full)["state"]
    names = [*dict(Spare(1).named_parameters())]
    state = {names.index(name): {key: value.clone() for key, value in named[name].items()} for name in named}
    return get_model_state_dict(model, options=full), dict(sorted(state.items()))


def load(rank: int, reader: str, path: str, optim: bool) -> tuple[State, Any]:
    model = mmfsdp.shard(Spare(7), CONFIGS[reader])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    rest, report = mmfsdp.load_checkpoint(path, model, optimizer if optim else None)
    assert report.clean
    assert not optim or optimizer.param_groups[0]["lr"] == 1e-2
    found = whole_state(model, optimizer)
    step(model, optimizer)
    return found, rest


@pytest.mark.sample("flattened", "fsdp1", "bare")
@pytest.mark.parametrize("form", ["by name", "flattened", "by place", "app", "bare", "fsdp1"])
def test_distributed_checkpoints_of_torch(form: str, tmp_path: Path) -> None:
    weights, state = run_ranks(torch_saves, 2, form, str(tmp_path))[0]
    for reader in ("fsdp2", "fsdp1") if form in ("by name", "flattened") else ("fsdp2",):
        (found, moments), rest = run_ranks(load, 3, reader, str(tmp_path), form != "bare")[0]
        assert equal(found, weights)
        if form == "bare":
            continue
        if reader == "fsdp1":  # which has zeros for what never got a gradient
            moments = {place: moments[place] for place in state}
        assert equal(moments, state)
        assert rest == ({} if form in ("app", "by place") else {"epoch": 3})


def placed_saves(rank: int, path: str) -> dict[str, torch.Tensor]:
    """Save weights as hybrid, tensor-parallel and 2-D sharding place them."""
    weights = Spare(1).state_dict()
    mesh = init_device_mesh("cpu", (2, 2))
    forms: list[list[Placement]] = [[Replicate(), Shard(0)], [Shard(0), Shard(1)], [Replicate(), Shard(1)]]
    placed = {
        name: distribute_tensor(value, mesh, forms[place % 3]) if value.dim() == 2 else value
        for place, (name, value) in enumerate(weights.items())
    }
    dcp.save({"model": placed}, checkpoint_id=path)
    return dict(weights)


def test_any_placement(tmp_path: Path) -> None:
    want = run_ranks(placed_saves, 4, str(tmp_path))[0]
    assert equal(run_ranks(load, 3, "fsdp2", str(tmp_path), False)[0][0][0], want)


def write_index(folder: Path, weights: dict[str, torch.Tensor], kind: str) -> None:
    """Two files and their index, as transformers writes them."""
    folder.mkdir()
    names = sorted(weights)
    stem, suffix = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")
    where = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"{stem}-0000{number}-of-00002.{suffix}"
        held = {name: weights[name].clone() for name in part}
        if kind == "safetensors":
            save_file(held, folder / file)
        else:
            torch.save(held, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def test_files_of_one_process(tmp_path: Path) -> None:
    model = Spare(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer)
    weights = model.state_dict()
    wrapped = {f"module.{name}": value for name, value in weights.items()}
    # Not in row-major order in the file, as with channels-last weights.
    turned = {name: value.t().contiguous().t() if value.dim() == 2 else value for name, value in weights.items()}
    state = optimizer.state_dict()
    torch.save({"model": weights, "optim": state}, tmp_path / "keys.pth")
    torch.save({"state_dict": wrapped, "optimizer": state}, tmp_path / "module.pth")
    torch.save(wrapped, tmp_path / "bare_module.pth")
    legacy = {"state_dict": turned, "optimizer": state, "note": {0: "kept"}}
    torch.save(legacy, tmp_path / "legacy.pth", _use_new_zipfile_serialization=False)
    write_index(tmp_path / "bin", weights, "bin")
    write_index(tmp_path / "safe", weights, "safetensors")
    for path in tmp_path.iterdir():
        optim = path.name in ("keys.pth", "module.pth", "legacy.pth")
        (found, moments), rest = run_ranks(load, 3, "fsdp2", str(path), optim)[0]
        assert equal(found, dict(weights)), path.name
        assert rest == ({"note": {0: "kept"}} if path.name == "legacy.pth" else {})
        if optim:
            assert equal(moments, state["state"]), path.name
    index = tmp_path / "bin" / "pytorch_model.bin.index.json"
    assert equal(run_ranks(load, 3, "fsdp2", str(index), False)[0][0][0], dict(weights))


def load_local(rank: int, path: str, optim: bool) -> tuple[dict[str, Any], Any, Any]:
    model = mmfsdp.shard(toy("plain"))
    optimizer = None
    if optim:
        trained = [*model.parameters()]
        optimizer = torch.optim.AdamW([{"params": trained[::2]}, {"params": trained[1::2]}], lr=1.0)
    rest, report = mmfsdp.load_checkpoint(path, model, optimizer)
    assert report.clean
    state = optimizer and mmfsdp.optim_state_dict(model, optimizer, rank0_only=False, by_name=True)
    return mmfsdp.model_state_dict(model, rank0_only=False), state, rest


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_local_checkpoints_of_stock_mmengine(use_orig_params: bool, tmp_path: Path) -> None:
    run_ranks(save_local, 2, tmp_path, "plain", use_orig_params, "adamw" if use_orig_params else "sgd", use_orig_params)
    truth = torch.load(tmp_path / "truth.pth")
    # Without optimizer state the files do not say shapes: they are the model's.
    weights, state, rest = run_ranks(load_local, 3, str(tmp_path / "local"), use_orig_params)[0]
    assert equal(weights, {name: truth["state_dict"][name] for name in weights})
    assert weights.keys() == truth["state_dict"].keys()
    assert rest == {"meta": {"epoch": 1, "iter": 2}, "message_hub": {"log": {}}}
    if use_orig_params:
        assert equal(state["state"], {name: truth["optimizer"]["state"][name] for name in state["state"]})
        assert state["state"].keys() == truth["optimizer"]["state"].keys()
        assert [group["weight_decay"] for group in state["param_groups"]] == [0.01, 0.1]


def refused(rank: int, folder: str) -> list[tuple[type, str]]:
    """Whatever does not fit, nothing of the model and the optimizer has changed."""
    model = mmfsdp.shard(build(), {"wrap": BLOCKS})
    optimizer = optimizer_of(model, "groups")
    train(model, optimizer, steps=1)
    before = whole_state(model, optimizer)
    good = mmfsdp.model_state_dict(mmfsdp.shard(build(seed=3), {}), rank0_only=False)
    named = mmfsdp.optim_state_dict(model, optimizer, rank0_only=False, by_name=True)
    found = []

    def attempt(state: Any, weights: Any = good) -> None:
        if rank == 0:
            torch.save({"state_dict": weights, "optimizer": state}, f"{folder}/content.pth")
        torch.distributed.barrier()
        found.append(told(mmfsdp.load_checkpoint, f"{folder}/content.pth", model, optimizer))
        torch.distributed.barrier()
        assert equal(whole_state(model, optimizer), before)

    first, second = named["param_groups"]
    less = {**second, "params": second["params"][1:]}
    attempt({**named, "param_groups": [first, less]})
    attempt({**named, "param_groups": [first, {**second, "params": [*second["params"], "neck.weight"]}]})
    moved = {**first, "params": [*first["params"], second["params"][0]]}
    attempt({**named, "param_groups": [moved, less]})
    attempt({**named, "param_groups": [moved, second]})
    attempt({**named, "state": {**named["state"], "head.bias": {"step": torch.tensor(1.0)}}})
    shrunk = {name: {**entries, "exp_avg": torch.zeros(2, 2)} for name, entries in named["state"].items()}
    attempt({**named, "state": {**named["state"], "embed.weight": shrunk["embed.weight"]}})
    attempt({"state": named["state"]})
    attempt(named, {**good, "neck.weight": torch.zeros(1)})
    return found


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    for found in run_ranks(refused, 2, str(tmp_path)):
        texts = [text for _, text in found]
        assert {kind for kind, _ in found} == {StateDictError}
        assert "The optimizer has 'scale', which the state does not hold." in texts[0]
        assert "The state holds 'neck.weight', which the optimizer does not have." in texts[1]
        assert "one param group of the optimizer, but the state has lr=0.01 for the first and 0.02" in texts[2]
        assert "The state has 'scale' in two param groups." in texts[3]
        assert "The state holds 'head.bias', which the optimizer does not have." in texts[4]
        assert "(2, 2)" in texts[5]
        assert "fqn='embed.weight'" in texts[5]
        assert "'param_groups' is missing" in texts[6]
        assert "neck.weight" in texts[7]


def load_cut(rank: int, path: str) -> tuple[type, str]:
    model = mmfsdp.shard(Spare(7), CONFIGS["fsdp2"])
    before = mmfsdp.model_state_dict(model, rank0_only=False)
    found = told(mmfsdp.load_checkpoint, path, model)
    assert equal(mmfsdp.model_state_dict(model, rank0_only=False), before)
    return found


def test_a_missing_file_changes_nothing(tmp_path: Path) -> None:
    run_ranks(torch_saves, 2, "by name", str(tmp_path))
    (tmp_path / "__1_0.distcp").unlink()
    for kind, text in run_ranks(load_cut, 2, str(tmp_path)):
        assert kind is IncompleteCheckpointError
        assert "__1_0.distcp" in text


def laid_out(rank: int, folder: str, layout: str) -> None:
    """Save with torch's DCP as torchtitan does, and as torch's tutorial does; load without further options."""
    model = mmfsdp.shard(build(), {"wrap": BLOCKS})
    optimizer = optimizer_of(model, "adamw")
    train(model, optimizer, steps=2)
    weights, state = get_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=layout == "torchtitan")
    )
    content: dict[str, Any] = {"app": {"model": weights, "optim": state}}
    if layout == "torchtitan":
        content = {**weights, "optimizer": state, "train_state": {"step": torch.tensor(2)}, "lr_scheduler": {"a": 1}}
    dcp.save(content, checkpoint_id=f"{folder}/{layout}")
    other = mmfsdp.shard(build(seed=7), {"wrap": BLOCKS})
    fresh = optimizer_of(other, "adamw")
    rest, report = mmfsdp.load_checkpoint(f"{folder}/{layout}", other, fresh)
    assert report.clean
    assert equal(mmfsdp.model_state_dict(other, rank0_only=False), mmfsdp.model_state_dict(model, rank0_only=False))
    assert equal(
        mmfsdp.optim_state_dict(other, fresh, rank0_only=False)["state"],
        mmfsdp.optim_state_dict(model, optimizer, rank0_only=False)["state"],
    )
    assert layout != "torchtitan" or int(rest["train_state"]["step"]) == 2


@pytest.mark.parametrize("layout", ["torchtitan", "tutorial"])
def test_layouts_of_training_scripts_load_as_they_are(layout: str, tmp_path: Path) -> None:
    run_ranks(laid_out, 2, str(tmp_path), layout)
