"""Checkpoints in torch's distributed format: torch reads ours, we read torch's, bit by bit, on any world size."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.distributed.models import BLOCKS, build, train
from tests.distributed.saving.test_checkpoints_online import CONFIGS, EXTRA, State, load, told, whole_state
from tests.distributed.state.test_state_dicts import HYBRID, equal, optimizer_of
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import mmfsdp
from mmfsdp.checkpoint import convert, open_layout, verify
from mmfsdp.errors import CheckpointError, StateDictError
from mmfsdp.testing import run_ranks

WRITERS = {**CONFIGS, "hybrid": {"sharding": HYBRID, "wrap": BLOCKS}}


def save(rank: int, case: str, path: str) -> State:
    model = mmfsdp.FullyShardedDataParallel(build(), config=WRITERS[case])
    optimizer = optimizer_of(model, "adamw")
    train(model, optimizer, steps=2)
    mmfsdp.save_checkpoint(path, model, optimizer, kind="sharded", extra=EXTRA)
    return whole_state(model, optimizer)


def torch_loads(model: Any, path: str, full: bool) -> State:
    """Load with nothing but torch, and return what the unsharded model and optimizer would have."""
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1.0)
    content = {"state_dict": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(content, checkpoint_id=path, no_dist=full)
    set_model_state_dict(model, content["state_dict"])
    set_optimizer_state_dict(model, optimizer, content["optimizer"])
    options = StateDictOptions(full_state_dict=True)
    names = [name for name, _ in model.named_parameters()]
    state = get_optimizer_state_dict(model, optimizer, options=options)
    assert state["param_groups"][0]["lr"] == 1e-2
    return get_model_state_dict(model, options=options), {names.index(name): v for name, v in state["state"].items()}


def into_fsdp2(rank: int, path: str) -> State:
    model = build(seed=4)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, ignored_params={model.scale})
    return torch_loads(model, path, full=False)


@pytest.mark.sample("fsdp2", "fsdp1-flat")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("case", WRITERS)
def test_torch_reads_what_is_saved(case: str, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    want = run_ranks(save, 4 if case == "hybrid" else 2, case, str(path))[0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]
    assert equal(torch_loads(build(seed=4), str(path), full=True), want)
    assert equal(run_ranks(into_fsdp2, 3, str(path))[0], want)
    rest = {"meta": {"iter": 0, "names": []}}
    dcp.load(rest, checkpoint_id=path, no_dist=True)
    assert rest["meta"] == EXTRA["meta"]


@pytest.mark.sample("replicate", "fsdp1-flat")
@pytest.mark.parametrize("reader", CONFIGS)
def test_every_reader(reader: str, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    want = run_ranks(save, 2, "fsdp1-flat" if reader == "fsdp2" else "fsdp2", path)[0]
    assert equal(run_ranks(load, 1 if reader == "replicate" else 3, reader, path)[0], want)
    report = verify(path)
    assert report.ok
    assert report.manifest
    assert open_layout(path).world_size == 2


ODD = {
    "empty": {},
    "numbers": {0: {"a": torch.arange(3)}, "0": 1},
    "averages": {0: torch.ones(2), -1: {"step": 3, "part": [{7: torch.zeros(2)}, {}]}},
    "milestones": collections.Counter({3: 1}),
    "counts": collections.defaultdict(int, {"a": 1}),
    "other": {(1, 2): torch.ones(1)},
    "a.b": 1,
    5: 1,
    "pair": (1, {"x": torch.ones(2)}),
    "list": [1, {}, [{"deep": torch.zeros(())}], None],
    "nothing": None,
}


def odd_content(rank: int, path: str) -> tuple[type, str]:
    model = mmfsdp.shard(build("Conv"), {"wrap": {"kind": "size", "min_num_params": 60}})
    model.norm.running_mean.fill_(rank)
    mmfsdp.save_checkpoint(path, model, kind="sharded", extra=ODD)
    rest, _ = mmfsdp.load_checkpoint(path, model)
    assert equal(rest, ODD)
    mmfsdp.save_checkpoint(f"{path}.pth", model, kind="full", extra=ODD)
    assert equal(model.norm.running_mean, torch.zeros(6))  # the first rank's
    sharded = mmfsdp.model_state_dict(model, "sharded")
    return told(mmfsdp.save_checkpoint, f"{path}2", model, kind="sharded", extra={"more": {(1,): sharded}})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_content_comes_back_as_it_was(tmp_path: Path) -> None:
    saved, converted = tmp_path / "saved", tmp_path / "converted"
    for kind, text in run_ranks(odd_content, 2, str(saved)):
        assert kind is StateDictError
        assert "'more' is a dict with sharded tensors" in text
    convert(f"{saved}.pth", converted, to="dcp", fsync=False)
    names = [sorted(dcp.FileSystemReader(path).read_metadata().state_dict_metadata) for path in (saved, converted)]
    assert names[0] == names[1]
    for path in (saved, converted):
        averages = {0: torch.zeros(2), -1: {"step": 0, "part": [{7: torch.ones(2)}]}}
        dcp.load({"averages": averages}, checkpoint_id=path, no_dist=True)  # in place
        assert equal(averages[0], torch.ones(2))
        assert equal(averages[-1]["part"][0][7], torch.zeros(2))  # type: ignore[index]
        convert(path, tmp_path / f"{path.name}.out.pth", keep="all", fsync=False)
    found = torch.load(tmp_path / "converted.out.pth", weights_only=False)
    assert equal({key: found[key] for key in ODD}, ODD)


def damaged(rank: int, path: str) -> str:
    model = mmfsdp.shard(build(seed=7), {"wrap": BLOCKS})
    before = mmfsdp.model_state_dict(model, rank0_only=False)
    kind, text = told(mmfsdp.load_checkpoint, path, model)
    assert issubclass(kind, CheckpointError), kind
    assert equal(mmfsdp.model_state_dict(model, rank0_only=False), before)
    return text


@pytest.mark.exhaustive
def test_files_of_another_save_are_noticed(tmp_path: Path) -> None:
    run_ranks(save, 2, "fsdp2", str(tmp_path / "saved"))
    with (tmp_path / "saved" / "__1_0.distcp").open("ab") as file:
        file.write(bytes(8))  # longer than .metadata says: torch would not notice
    for text in run_ranks(damaged, 2, str(tmp_path / "saved")):
        assert "by manifest.json): it is damaged, or of another save" in text
