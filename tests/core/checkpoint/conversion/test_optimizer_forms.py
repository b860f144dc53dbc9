"""Optimizer state keeps its meaning: by place where plain PyTorch reads it, by name where torch's DCP does."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from mmfsdp.checkpoint import convert, diff, open_layout
from mmfsdp.errors import ConfigError, FormatError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def trained(*, grouped: bool = False, named: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.Linear(5, 5))
    params: Any = model.parameters()
    if grouped:
        matrices = [(name, param) for name, param in model.named_parameters() if param.ndim > 1]
        vectors = [(name, param) for name, param in model.named_parameters() if param.ndim == 1]
        plain = [[param for _, param in group] for group in (matrices, vectors)]
        first, second = (matrices, vectors) if named else plain
        params = [{"params": first, "weight_decay": 0.1}, {"params": second, "lr": 0.5}]
    optimizer = torch.optim.AdamW(params, lr=0.01)
    for step in range(2):
        torch.manual_seed(step)
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def same(one: dict[str, Any], other: dict[str, Any], *ignored: str) -> None:
    assert [*one["state"]] == [*other["state"]]
    torch.testing.assert_close(one["state"], other["state"], rtol=0, atol=0)
    for group, twin in zip(one["param_groups"], other["param_groups"], strict=True):
        assert {key: value for key, value in group.items() if key not in ignored} == {
            key: value for key, value in twin.items() if key not in ignored
        }


def loaded_by_torch(directory: Path, *, grouped: bool) -> torch.optim.Optimizer:
    """Load as users of torch do: into an optimizer that has taken no step."""
    model, optimizer = trained(grouped=grouped)
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()
    content = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(content, checkpoint_id=directory)
    set_optimizer_state_dict(model, optimizer, content["optimizer"])
    return optimizer


@pytest.mark.parametrize(("grouped", "named"), [(False, False), (True, True)])
def test_by_place_becomes_by_name(tmp_path: Path, grouped: bool, named: bool) -> None:
    model, optimizer = trained(grouped=grouped, named=named)
    torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "in.pth")
    report = convert(tmp_path / "in.pth", tmp_path / "dcp", to="dcp", ranks=3, verify_output=True)
    assert any("derived from the order" in note for note in report.notes) != named
    loaded = loaded_by_torch(tmp_path / "dcp", grouped=grouped)
    same(loaded.state_dict(), optimizer.state_dict(), "param_names")
    # And back, by another format with ranks.
    convert(tmp_path / "dcp", tmp_path / "local", to="local", ranks=2)
    convert(tmp_path / "local", tmp_path / "out.pth", keep="all")
    back = torch.load(tmp_path / "out.pth", weights_only=True)["optimizer"]
    same(back, optimizer.state_dict(), "param_names")
    names = [name for group in back["param_groups"] for name in group["param_names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize("flatten", [False, True])
def test_by_name_becomes_by_place(tmp_path: Path, flatten: bool) -> None:
    model, optimizer = trained(grouped=True)
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flatten))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model.state_dict(), "optim": state}, checkpoint_id=tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out.pth", keep="all")
    content = torch.load(tmp_path / "out.pth", weights_only=True)["optim"]
    twin, fresh = trained(grouped=True)
    if flatten:  # a group per parameter, each with its own settings: what the file says
        settings = {name: group for group in content["param_groups"] for name in group["param_names"]}
        assert {name: group["lr"] for name, group in settings.items()} == {
            name: 0.01 if param.ndim > 1 else 0.5 for name, param in model.named_parameters()
        }
        by_name = {group["param_names"][0]: content["state"][group["params"][0]] for group in content["param_groups"]}
        for name, param in model.named_parameters():
            torch.testing.assert_close(by_name[name], optimizer.state[param], rtol=0, atol=0)
        return
    for group in fresh.param_groups:
        group["lr"] = 7.0
    fresh.load_state_dict(content)
    same(fresh.state_dict(), optimizer.state_dict(), "param_names")
    assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), model.parameters(), strict=True))


def test_several_optimizers(tmp_path: Path) -> None:
    model, optimizer = trained(grouped=True, named=True)
    content = {"state_dict": model.state_dict(), "optimizer": {"g": optimizer.state_dict(), "d": {"base": 1}}}
    torch.save(content, tmp_path / "in.pth")
    convert(tmp_path / "in.pth", tmp_path / "dcp", to="dcp")
    assert "optimizer/g/state/0.weight/exp_avg" in open_layout(tmp_path / "dcp").tensors
    convert(tmp_path / "dcp", tmp_path / "out.pth", keep="all")
    assert diff(tmp_path / "in.pth", tmp_path / "out.pth", keep="all").same


def test_what_cannot_be_told_is_refused(tmp_path: Path) -> None:
    model, _ = trained()
    some = torch.optim.AdamW([*model[3].parameters(), *model[0].parameters()])
    torch.save({"state_dict": model.state_dict(), "optimizer": some.state_dict()}, tmp_path / "few.pth")
    with pytest.raises(
        FormatError, match=r"it is of 4 parameters, and the weights hold 8 tensors.*with 'drop' 'optimizer'"
    ):
        convert(tmp_path / "few.pth", tmp_path / "dcp", to="dcp")
    backwards = torch.optim.AdamW(reversed([*model.parameters()]))
    model(torch.randn(4, 6)).sum().backward()
    backwards.step()
    torch.save({"state_dict": model.state_dict(), "optimizer": backwards.state_dict()}, tmp_path / "back.pth")
    with pytest.raises(FormatError, match=r"position 0 is of shape \[5\], and '0.weight' \[5, 6\]"):
        convert(tmp_path / "back.pth", tmp_path / "dcp", to="dcp")
    report = convert(tmp_path / "back.pth", tmp_path / "dcp", to="dcp", drop=["optimizer"])
    assert report.dropped == ("optimizer",)
    with pytest.raises(ConfigError, match=r"drop='optimiser' is no top-level key of back\.pth.*'optimizer'"):
        convert(tmp_path / "back.pth", tmp_path / "x", to="dcp", drop=["optimiser"])
    with pytest.raises(ConfigError, match=r"'drop' leaves keys out of everything"):
        convert(tmp_path / "back.pth", tmp_path / "x", to="dcp", keep="model", drop=["optimizer"])
