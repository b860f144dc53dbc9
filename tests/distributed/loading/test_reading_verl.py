"""What verl's own FSDPCheckpointManager wrote: read to what torch gathers and verl merges, and loaded on any ranks."""

from __future__ import annotations

import copy
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.distributed.loading.test_reading_mmengine_local import same
from torch import nn

import mmfsdp
from mmfsdp.checkpoint import convert, diff, open_layout, verify
from mmfsdp.errors import CheckpointNotFoundError, FormatError, IncompleteCheckpointError
from mmfsdp.testing import run_ranks

GOLDEN = Path(__file__).parents[2] / "core" / "verl" / "0.9.1"
CASES = {"fsdp1-1": 1, "fsdp1-2": 2, "fsdp2-2": 2}
TIED = {"fsdp2-2"}


def full(case: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(GOLDEN / case / "full.pth", weights_only=True)
    return found


@pytest.mark.parametrize(("case", "ranks"), CASES.items())
def test_weights_equal_what_torch_gathers_and_verl_merges(tmp_path: Path, case: str, ranks: int) -> None:
    source, expected = GOLDEN / case / "actor", full(case)
    assert verify(source).ok
    assert open_layout(source).world_size == ranks
    convert(source, tmp_path / "weights.pth", fsync=False)
    assert same(torch.load(tmp_path / "weights.pth")["state_dict"], expected["model"])
    convert(source, tmp_path / "cast.pth", dtype="bf16", fsync=False)
    assert same(torch.load(tmp_path / "cast.pth")["state_dict"], expected["merged"])


@pytest.mark.parametrize("case", CASES)
def test_the_folder_that_verl_writes_is_what_like_takes(tmp_path: Path, case: str) -> None:
    source = GOLDEN / case / "actor"
    convert(source, tmp_path / "out", to="hf", like=source / "huggingface", verify_output=True, fsync=False)
    found = load_file(tmp_path / "out" / "model.safetensors")
    theirs = source / "huggingface" / "model.safetensors"
    expected = load_file(theirs) if theirs.exists() else full(case)["model"]
    assert same(found, dict(expected))


def test_what_lies_beside_the_weights(tmp_path: Path) -> None:
    convert(GOLDEN / "fsdp2-2" / "actor", tmp_path / "all.pth", keep="all", fsync=False)
    found, expected = torch.load(tmp_path / "all.pth", weights_only=False), full("fsdp2-2")
    names = list(expected["optimizer"]["state"])
    assert same(
        {names[place]: state for place, state in found["optimizer"]["state"].items()}, expected["optimizer"]["state"]
    )
    for rank, own in enumerate(found["extra_state"]):
        path = GOLDEN / "fsdp2-2" / "actor" / f"extra_state_world_size_2_rank_{rank}.pt"
        theirs = torch.load(path, weights_only=False)
        assert own["lr_scheduler"] == theirs["lr_scheduler"]
        assert np.array_equal(own["rng"]["numpy"][1], theirs["rng"]["numpy"][1])


def pieces(case: str) -> list[Any]:
    paths = [GOLDEN / case / "actor" / f"optim_world_size_{CASES[case]}_rank_{rank}.pt" for rank in range(CASES[case])]
    return [torch.load(path) for path in paths]


def test_optimizer_state_of_fsdp1_is_a_list_by_rank(tmp_path: Path) -> None:
    convert(GOLDEN / "fsdp1-2" / "actor", tmp_path / "all.pth", keep="all", fsync=False)
    assert same(torch.load(tmp_path / "all.pth", weights_only=False)["optimizer"], pieces("fsdp1-2"))
    convert(GOLDEN / "fsdp1-2" / "actor", tmp_path / "dcp", to="dcp", ranks=3, fsync=False)
    assert diff(GOLDEN / "fsdp1-2" / "actor", tmp_path / "dcp", keep="all").same
    convert(GOLDEN / "fsdp1-1" / "actor", tmp_path / "one.pth", keep="all", fsync=False)
    assert same(torch.load(tmp_path / "one.pth", weights_only=False)["optimizer"], pieces("fsdp1-1")[0])


def test_a_script_that_saves_all_in_one_file(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed._mesh_layout", reason="torch 2.9 does not load the files of torch 2.13")
    for rank in range(2):
        held = {
            key: torch.load(GOLDEN / f"fsdp1-2/actor/{key}_world_size_2_rank_{rank}.pt", weights_only=False)
            for key in ("model", "optim")
        }
        torch.save({"train": held, "step": 1}, tmp_path / f"rank{rank}.pt")
    convert(tmp_path, tmp_path / "all.pth", keep="all", fsync=False)
    found = torch.load(tmp_path / "all.pth")
    assert same(found["train"]["optim"], pieces("fsdp1-2"))
    assert same(found["train"]["model"], full("fsdp1-2")["model"])


def model_like(weights: dict[str, torch.Tensor], *, tied: bool) -> nn.Module:
    """Return a model with parameters of these names."""
    root = nn.Module()
    for name, value in weights.items():
        *path, last = name.split(".")
        owner = root
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(last, nn.Parameter(torch.zeros_like(value)))
    if tied:
        root.get_submodule("lm_head").weight = root.get_parameter("model.embed_tokens.weight")
    return root


def load(rank: int, case: str, with_optimizer: bool, engine: str) -> Any:
    weights = full(case)["model"]
    config = {"engine": engine, "wrap": {"kind": "none"}}
    path = GOLDEN / case / "actor"
    started = mmfsdp.shard(model_like(weights, tied=case in TIED), config)
    assert mmfsdp.load_pretrained(started, path).clean
    assert same(dict(mmfsdp.model_state_dict(started, rank0_only=False)), dict(weights))
    model = mmfsdp.shard(model_like(weights, tied=case in TIED), config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0) if with_optimizer else None
    try:
        rest, report = mmfsdp.load_checkpoint(path, model, optimizer)
    except FormatError as error:
        return str(error)
    assert report.clean
    assert same(dict(mmfsdp.model_state_dict(model, rank0_only=False)), dict(weights))
    state = mmfsdp.optim_state_dict(model, optimizer) if optimizer is not None else None
    return copy.deepcopy(rest["extra_state"]), state, len(rest.get("optimizer", ()))


@pytest.mark.sample("fsdp1-2-2-fsdp1", "fsdp2-2-3-fsdp2")
@pytest.mark.parametrize(("ranks", "engine"), [(3, "fsdp2"), (2, "fsdp1")])
@pytest.mark.parametrize("case", CASES)
def test_ranks_load_them(case: str, ranks: int, engine: str) -> None:
    for extra, _, _ in run_ranks(load, ranks, case, False, engine):
        assert [state["lr_scheduler"]["last_epoch"] for state in extra] == [1] * CASES[case]
        for state in extra:  # as verl restores it
            np.random.set_state(state["rng"]["numpy"])
            random.setstate(state["rng"]["random"])
            torch.set_rng_state(state["rng"]["cpu"])


def test_ranks_load_the_optimizer() -> None:
    expected = full("fsdp2-2")["optimizer"]
    [(_, found, _), *_] = run_ranks(load, 3, "fsdp2-2", True, "fsdp2")
    assert same(list(found["state"].values()), list(expected["state"].values()))
    assert found["param_groups"][0]["lr"] == expected["param_groups"][0]["lr"]
    for message in run_ranks(load, 2, "fsdp1-2", True, "fsdp2"):
        assert "is a list by rank" in message
        assert "Load without the optimizer" in message


class TestWrongPaths:
    def test_of_one_rank_but_some_files_are_missing(self, tmp_path: Path) -> None:
        source = tmp_path / "actor"
        shutil.copytree(GOLDEN / "fsdp1-1" / "actor", source)
        for path in source.glob("*rank_0.pt"):
            path.rename(path.with_name(path.name.replace("size_1", "size_2")))
        with pytest.raises(FormatError, match="holds no DTensor"):
            open_layout(source)
        (source / "optim_world_size_2_rank_0.pt").unlink()
        shutil.copy(GOLDEN / "fsdp1-2/actor/model_world_size_2_rank_0.pt", source)
        with pytest.raises(IncompleteCheckpointError, match=r"model_world_size_2_rank_1\.pt is missing"):
            open_layout(source)

    @pytest.mark.parametrize("kind", ["model", "optim", "extra_state"])
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_missing_file_is_named(self, tmp_path: Path, kind: str, rank: int) -> None:
        shutil.copytree(GOLDEN / "fsdp1-2" / "actor", tmp_path / "actor")
        path = tmp_path / "actor" / f"{kind}_world_size_2_rank_{rank}.pt"
        path.unlink()
        with pytest.raises(IncompleteCheckpointError, match=rf"{path.name} is missing"):
            open_layout(path.parent)

    def test_folders_above_and_below(self, tmp_path: Path) -> None:
        step = tmp_path / "run" / "global_step_1"
        step.mkdir(parents=True)
        for name in ("actor", "critic"):
            shutil.copytree(GOLDEN / "fsdp1-2" / "actor", step / name)
        torch.save({"state": 1}, step / "data.pt")
        (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("1")
        for path, names in (
            (step, "'actor', 'critic'"),
            (step.parent, "'global_step_1/actor', 'global_step_1/critic'"),
        ):
            with pytest.raises(CheckpointNotFoundError, match=f"Open a checkpoint within it: {names}"):
                open_layout(path)
        with pytest.raises(CheckpointNotFoundError, match=r"The directory above it is a checkpoint: '.*/actor'\."):
            open_layout(step / "actor" / "huggingface")
