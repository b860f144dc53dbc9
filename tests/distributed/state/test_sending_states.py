"""States of which only the first rank has the values, and states that one rank alone cannot load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.models import BLOCKS, build, train
from tests.distributed.state.test_state_dicts import CASES, equal, optimizer_of

import mmfsdp
from mmfsdp.errors import MmfsdpError, ShardStateError, StateDictError
from mmfsdp.saving import read_checkpoint
from mmfsdp.testing import run_ranks


def trained(config: dict[str, Any]) -> tuple[Any, torch.optim.Optimizer]:
    model = mmfsdp.shard(build(), config)
    optimizer = optimizer_of(model, "adamw")
    train(model, optimizer, steps=1)
    return model, optimizer


def error_of(action: Any, *args: Any, **kwargs: Any) -> tuple[type, str]:
    with pytest.raises(MmfsdpError) as caught:
        action(*args, **kwargs)
    return type(caught.value), caught.value.message


def anothers_optimizer(rank: int, config: dict[str, Any]) -> list[tuple[type, str]]:
    """Rank 1's optimizer is that of another model."""
    model, own = trained(config)
    state = mmfsdp.optim_state_dict(model, own, rank0_only=False)
    named = mmfsdp.optim_state_dict(model, own, rank0_only=False, by_name=True)
    optimizer = optimizer_of(build(seed=5), "adamw") if rank == 1 else own
    return [
        error_of(mmfsdp.load_optim_state_dict, model, optimizer, state),
        error_of(mmfsdp.load_optim_state_dict, model, optimizer, state, from_rank0=True),
        error_of(mmfsdp.optim_state_dict, model, optimizer, by_name=True),
        error_of(mmfsdp.FullyShardedDataParallel.full_optim_state_dict, model, optimizer),
        error_of(mmfsdp.FullyShardedDataParallel.shard_full_optim_state_dict, named, model, optim=optimizer),
    ]


@pytest.mark.parametrize("case", ["fsdp2", "fsdp1", "fsdp1-flat"])
def test_another_models_optimizer_on_one_rank_is_an_error_on_all(case: str) -> None:
    for rank, found in enumerate(run_ranks(anothers_optimizer, *CASES[case])):
        assert {kind for kind, _ in found} == {ShardStateError}
        for _, text in found:
            assert text.startswith("Rank 1 failed: " if rank == 0 else "AdamW holds parameters that ")


def different_arguments(rank: int, folder: str) -> list[tuple[type, str]]:
    model, optimizer = trained({"wrap": BLOCKS})
    path = f"{folder}/saved"
    mmfsdp.save_checkpoint(path, model, optimizer)
    odd = rank == 1
    malformed = {"state": {}, "param_groups": [{"lr": 1.0}]}
    return [
        error_of(mmfsdp.save_checkpoint, f"{folder}/other", model, optimizer, kind="local" if odd else "sharded"),
        error_of(mmfsdp.save_checkpoint, f"{folder}/other", model, None if odd else optimizer),
        error_of(mmfsdp.load_checkpoint, path, model, None if odd else optimizer),
        error_of(mmfsdp.load_pretrained, model, path, strict=odd),
        error_of(mmfsdp.load_optim_state_dict, model, optimizer, malformed),
    ]


def test_ranks_that_call_with_different_arguments_do_not_wait(tmp_path: Path) -> None:
    first, second = run_ranks(different_arguments, 2, str(tmp_path))
    assert first == second
    assert [text for _, text in first] == [
        "Ranks called save_checkpoint() with different arguments: rank 0 with kind='sharded', rank 1 with "
        "kind='local'. Call it with the same arguments on every rank.",
        "Ranks called save_checkpoint() with different arguments: rank 0 with optimizer='AdamW', rank 1 with "
        "optimizer=None. Call it with the same arguments on every rank.",
        "Ranks called load_checkpoint() with different arguments: rank 0 with optimizer='AdamW', rank 1 with "
        "optimizer=None. Call it with the same arguments on every rank.",
        "Ranks called load_pretrained() with different arguments: rank 0 with strict=False, rank 1 with strict=True. "
        "Call it with the same arguments on every rank.",
        "'param_groups' of an optimizer's state must be a list of dicts, each with 'params'.",
    ]
    assert [place.name for place in tmp_path.iterdir()] == ["saved"]


def shards_from_first(rank: int, config: dict[str, Any]) -> list[tuple[type, str]]:
    model, optimizer = trained(config)
    weights = mmfsdp.model_state_dict(model, "sharded")
    state = mmfsdp.optim_state_dict(model, optimizer, "sharded")
    before = mmfsdp.model_state_dict(model, rank0_only=False)
    found = [
        error_of(mmfsdp.load_model_state_dict, model, weights, from_rank0=True),
        error_of(mmfsdp.load_optim_state_dict, model, optimizer, state, from_rank0=True),
    ]
    assert equal(mmfsdp.model_state_dict(model, rank0_only=False), before)
    return found


@pytest.mark.parametrize("case", ["fsdp2", "fsdp1"])
def test_shards_cannot_come_from_the_first_rank(case: str) -> None:
    for found in run_ranks(shards_from_first, *CASES[case]):
        for kind, text in found:
            assert kind is StateDictError
            assert "from_rank0=True sends whole tensors, and " in text
            assert text.endswith("is a shard. Leave out from_rank0, and pass each rank's own state dict.")


def stored_from_first(rank: int, folder: str) -> None:
    model, optimizer = trained({"wrap": BLOCKS})
    want = mmfsdp.optim_state_dict(model, optimizer, rank0_only=False)
    mmfsdp.save_checkpoint(folder, model, optimizer, kind="local")
    fresh = optimizer_of(model, "adamw")
    state = read_checkpoint(folder)["optimizer"] if rank == 0 else {}
    mmfsdp.load_optim_state_dict(model, fresh, state, from_rank0=True)
    assert equal(mmfsdp.optim_state_dict(model, fresh, rank0_only=False), want)


def test_the_first_rank_sends_what_is_still_on_disk(tmp_path: Path) -> None:
    run_ranks(stored_from_first, 2, str(tmp_path / "saved"))


def unreadable_first(rank: int, folder: str) -> tuple[type, str]:
    model, optimizer = trained({"wrap": BLOCKS})
    mmfsdp.save_checkpoint(folder, model, optimizer, kind="local")
    state = read_checkpoint(folder)["optimizer"] if rank == 0 else {}
    if rank == 0:
        for file in Path(folder).glob("rank*.pth"):
            file.unlink()
    return error_of(mmfsdp.load_optim_state_dict, model, optimizer, state, from_rank0=True)


def test_a_first_rank_that_cannot_read_an_optimizers_state_is_not_waited_for(tmp_path: Path) -> None:
    for _, text in run_ranks(unreadable_first, 2, str(tmp_path / "saved")):
        assert ".pth" in text
