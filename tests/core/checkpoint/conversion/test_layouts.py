"""Contents as torchtitan and torch's tutorials lay them out: every command takes them without further options."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tests.core.layout_writers import like_composer, like_the_tutorial, like_torchtitan

from mmfsdp.checkpoint import convert, diff
from mmfsdp.checkpoint.tree import find_weights, usual_content
from mmfsdp.errors import FormatError


@pytest.mark.sample("local-like_composer", "dcp-like_the_tutorial")
@pytest.mark.parametrize("write", [like_torchtitan, like_the_tutorial, like_composer])
@pytest.mark.parametrize("to", ["dcp", "local"])
def test_everything_is_resharded_as_it_is(tmp_path: Path, write: Any, to: str) -> None:
    source, weights = write(tmp_path / "step-3")
    convert(source, tmp_path / "out", to=to, ranks=3, fsync=False)
    assert diff(source, tmp_path / "out", keep="model").same
    if to == "dcp":
        assert diff(source, tmp_path / "out").same or write is like_torchtitan  # whose optimizer is unflattened
        into: dict[str, Any] = {name: torch.zeros_like(value) for name, value in weights.items()}
        key = "state" if write is like_composer else "app"
        content = into if write is like_torchtitan else {key: {"model": into}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(content, checkpoint_id=tmp_path / "out", no_dist=True)
        assert all(torch.equal(into[name], weights[name]) for name in weights)
    convert(tmp_path / "out", tmp_path / "back.safetensors", fsync=False)
    assert load_file(tmp_path / "back.safetensors").keys() == weights.keys()


TENSOR = torch.ones(1)
WEIGHTS = {"a": TENSOR, "b": TENSOR}


@pytest.mark.parametrize(
    ("tree", "where", "beside"),
    [
        ({"state_dict": WEIGHTS, "optimizer": {}}, ("state_dict",), ["optimizer"]),
        ({"model": WEIGHTS, "optim": {}, "x": TENSOR}, ("model",), ["optim", "x"]),
        ({"app": {"model": WEIGHTS, "optim": {}}}, ("app", "model"), ["optim"]),
        ({"state": {"model": WEIGHTS, "run_name": "run"}, "rng": [{}]}, ("state", "model"), ["run_name"]),
        (WEIGHTS, (), []),
        ({**WEIGHTS, "optimizer": {"s": TENSOR}, "step": 3}, (), ["optimizer", "step"]),
        ({**WEIGHTS, "args": {"lr": 1}}, (), ["args"]),
        ({**WEIGHTS, "model": TENSOR}, (), []),
    ],
)
def test_where_the_weights_are(tree: dict[str, Any], where: tuple[str, ...], beside: list[str]) -> None:
    found = find_weights(tree, torch.is_tensor)
    assert found is not None
    assert found.where == where
    assert {"a", "b"} <= {*found.weights}
    assert [*found.beside] == beside


@pytest.mark.parametrize(
    "tree",
    [
        {"net": WEIGHTS, "optimizer": {}},
        {"net": WEIGHTS},
        {"scale": TENSOR, "net": {"w": TENSOR}, "head": {"w": TENSOR}},  # one of them must be asked for
        {"app": {"other": {"model": WEIGHTS}}, "more": 1},
        {"rng": [{}]},
        {},
        [TENSOR],
        None,
    ],
)
def test_where_no_weights_are_found(tree: Any) -> None:
    assert find_weights(tree, torch.is_tensor) is None
    assert usual_content(tree, torch.is_tensor) is None


def test_usual_content() -> None:
    tree = {"app": {"model": WEIGHTS, "optim": {"state": {}}, "step": 3}}
    assert usual_content(tree, torch.is_tensor) == {"state_dict": WEIGHTS, "optimizer": {"state": {}}, "step": 3}
    assert tree == {"app": {"model": WEIGHTS, "optim": {"state": {}}, "step": 3}}
    flat = {**WEIGHTS, "optimizer": {"state": {}}, "train_state": {"step": TENSOR}}
    assert usual_content(flat, torch.is_tensor) == {
        "state_dict": WEIGHTS,
        "optimizer": {"state": {}},
        "train_state": {"step": TENSOR},
    }


def test_composers_state(tmp_path: Path) -> None:
    source, weights = like_composer(tmp_path / "ep1-ba3")
    report = convert(source, tmp_path / "out.pth", fsync=False)
    assert report.tensors == len(weights)
    assert {"state/optimizers", "rng"} <= {*report.dropped}
    convert(source, tmp_path / "all.pth", keep="all", fsync=False)
    found = torch.load(tmp_path / "all.pth", weights_only=False)
    optimizer = found["state"]["optimizers"]["AdamW"]
    assert optimizer["param_groups"][0]["params"] == [*range(len(weights))]  # by place, as in every .pth
    usual = usual_content(found, torch.is_tensor)
    assert usual is not None
    assert usual["optimizer"] is optimizer
    assert usual["rng"] is found["rng"]


def test_an_unknown_mapping_of_tensors_must_be_named(tmp_path: Path) -> None:
    torch.save({"scale": TENSOR, "net": {"w": TENSOR}, "head": {"w": TENSOR}}, tmp_path / "in.pth")
    with pytest.raises(FormatError, match=r"has no 'state_dict'.*'scale', 'net', 'head'; name one"):
        convert(tmp_path / "in.pth", tmp_path / "out.safetensors")
    convert(tmp_path / "in.pth", tmp_path / "out.safetensors", keep="net")
