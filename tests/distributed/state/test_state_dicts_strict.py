"""State dicts that do not fit are refused on every rank, and nothing is changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.distributed.models import build, train
from tests.distributed.state.test_state_dicts import CASES, equal, optimizer_of

import mmfsdp
from mmfsdp.errors import StateDictError
from mmfsdp.testing import run_ranks


def strictness(rank: int, config: dict[str, Any]) -> list[str]:
    model = mmfsdp.shard(build(), config)
    before = mmfsdp.model_state_dict(model, rank0_only=False)
    wrong = dict(before)
    del wrong["blocks.0.up.bias"]
    wrong["extra"] = torch.zeros(2)
    wrong["blocks.1.up.bias"] = torch.zeros(3)
    messages = []
    for state_dict, from_rank0 in (
        (wrong, False),
        (wrong if rank == 0 else {}, True),
        (wrong if rank else before, False),
    ):
        with pytest.raises(StateDictError) as caught:
            mmfsdp.load_model_state_dict(model, state_dict, from_rank0=from_rank0)
        messages.append(caught.value.message)
    assert equal(mmfsdp.model_state_dict(model, rank0_only=False), before)
    wrong["blocks.0.down.bias"] = torch.full((7,), 4.0)
    report = mmfsdp.load_model_state_dict(model, wrong, strict=False)
    assert (report.missing_keys, report.unexpected_keys) == (["blocks.0.up.bias"], ["extra"])
    assert report.mismatched == ("blocks.1.up.bias: (3,) in the state dict, (15,) in the model",)
    after = mmfsdp.model_state_dict(model, rank0_only=False)
    assert equal(after, before | {"blocks.0.down.bias": torch.full((7,), 4.0)})
    return messages


@pytest.mark.parametrize("case", ["fsdp2", "fsdp1", "fsdp1-flat", "replicate"])
def test_strictness_on_every_rank(case: str) -> None:
    found = (
        "1 missing: blocks.0.up.bias; 1 unexpected: extra; 1 of another shape: blocks.1.up.bias: (3,) in the state "
        "dict, (15,) in the model."
    )
    for rank, messages in enumerate(run_ranks(strictness, *CASES[case])):
        assert all(message.endswith(found) for message in messages)
        assert messages[2].startswith("Rank 1 failed: " if rank == 0 else "The state dict does not fit ")


FLAT = {"use_orig_params": False}


def two_groups(state: dict[str, Any]) -> dict[str, Any]:
    [group] = state["param_groups"]
    return {
        **state,
        "param_groups": [{**group, "params": group["params"][:4]}, {**group, "params": group["params"][4:]}],
    }


def wrong_optimizer_state(rank: int, config: dict[str, Any]) -> list[str]:
    model, single = mmfsdp.shard(build(), config), build()
    plain = optimizer_of(single, "adamw")
    train(single, plain, steps=1, sharded=False)
    good = plain.state_dict()
    shape = copy.deepcopy(good)
    shape["state"][1]["exp_avg"] = torch.zeros(3, 7)
    stray = {**good, "state": {**good["state"], 99: good["state"][0]}}
    messages = []
    # One flat parameter is of one group: there it is a state of two groups that does not fit.
    groups, other = (good, "groups") if config.get("sharding", {}) != FLAT else (two_groups(good), "adamw")
    for state, kind in (({"state": {}}, "adamw"), (groups, other), (shape, "adamw"), (stray, "adamw")):
        optimizer = optimizer_of(model, kind)
        with pytest.raises(StateDictError) as caught:
            mmfsdp.load_optim_state_dict(model, optimizer, state)
        messages.append(str(caught.value))
        assert not optimizer.state
    return messages


@pytest.mark.parametrize("case", ["fsdp2", "fsdp1", "fsdp1-flat", "replicate"])
def test_an_optimizer_state_that_does_not_fit(case: str) -> None:
    mine, theirs = ("[14]", "[4, 10]") if case == "fsdp1-flat" else ("[4, 10]", "[14]")
    for messages in run_ranks(wrong_optimizer_state, *CASES[case]):
        assert [*messages[:2], messages[3]] == [
            "An optimizer's state needs 'state' and 'param_groups'; 'param_groups' is missing.",
            f"The optimizer has param groups of {mine} parameters, the state has {theirs}. Build the optimizer as it "
            "was built when the state was saved.",
            "The state is for parameter 99, but the optimizer has 14 parameters. Build the optimizer as it was built "
            "when the state was saved.",
        ]
        assert messages[2].startswith("State 'exp_avg' has shape (3, 7), but its parameter has shape (10, 7). [fqn=")
