"""A torch that has changed where mmfsdp relies on it fails with one error, before anything is trained."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

import mmfsdp
from mmfsdp.errors import UnknownTorchError
from mmfsdp.runtime.torch_fsdp2 import private_names
from mmfsdp.testing import single_rank

PACKAGES = Path(__file__).parents[3] / "packages"
FOLDER = Path(mmfsdp.__file__).parent / "runtime/torch_fsdp2"


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr(private_names, "_checked", False)
    with single_rank():
        yield monkeypatch


def test_this_torch_has_them(unchecked: pytest.MonkeyPatch) -> None:
    model = mmfsdp.shard(nn.Linear(2, 2))
    assert private_names._checked
    assert [*private_names._lacking(model)] == []


@pytest.mark.parametrize("method", private_names._METHODS)
def test_a_method_that_is_gone_is_named(unchecked: pytest.MonkeyPatch, method: str) -> None:
    unchecked.setattr(_fsdp_param_group.FSDPParamGroup, method, None)
    with pytest.raises(UnknownTorchError, match=rf"FSDPParamGroup\.{method}\(\) is missing.*or use engine 'fsdp1'"):
        mmfsdp.shard(nn.Linear(2, 2))


def test_attributes_that_are_gone_are_named(unchecked: pytest.MonkeyPatch) -> None:
    model: Any = fully_shard(nn.Linear(2, 2))
    group = private_names.groups_in_module(model)[0]
    for name in ("reduce_grads", "mesh_info"):
        del vars(group)[name]
    del vars(group.fsdp_params[0])["sharded_param"]
    found = [*private_names._lacking(model)]
    assert found == ["FSDPParamGroup.reduce_grads", "FSDPParamGroup.mesh_info", "FSDPParam.sharded_param"]


def test_gradients_of_another_kind_are_named(unchecked: pytest.MonkeyPatch) -> None:
    """torch's main branch has a module of this name, with gradients whose reading runs collectives."""
    unchecked.setattr(private_names, "_OWN_GRADIENTS", "torch.distributed.fsdp._fully_shard._fsdp_param")
    with pytest.raises(UnknownTorchError, match="a form of torch's own"):
        mmfsdp.shard(nn.Linear(2, 2))


def test_no_other_module_touches_them() -> None:
    asking = re.compile(
        r"fsdp_params\b|_get_fsdp_state|_fsdp_param_group|_all_gather_result|_to_(un)?sharded|_module_info\b"
        r"|_unsharded_param\b|wait_for_unshard|\._lazy_init|_register_state_dict_hooks"
    )
    found = {path for path in PACKAGES.rglob("src/**/*.py") if asking.search(path.read_text())}
    assert {path.parent for path in found} == {FOLDER}
