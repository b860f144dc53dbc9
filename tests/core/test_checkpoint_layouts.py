"""Contents as torchtitan and torch's tutorials lay them out: every command takes them without further options."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from mmfsdp.checkpoint import convert, diff, find_tensor, open_layout
from mmfsdp.checkpoint.tree import find_weights, usual_content
from mmfsdp.errors import FormatError
from mmfsdp_cli.main import app


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.wo(self.wq(x).relu())


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = Attention(), torch.nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.attention(x))


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.add_module("tok_embeddings", torch.nn.Embedding(11, 8))
    model.add_module("layers", torch.nn.Sequential(*(Layer() for _ in range(12))))
    model.add_module("output", torch.nn.Linear(8, 11))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        model(torch.arange(11)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model, optimizer, scheduler


def saved(content: dict[str, Any], directory: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is one process
        dcp.save(content, checkpoint_id=directory, no_dist=True)
    return directory


def like_torchtitan(directory: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Save as torchtitan's CheckpointManager: the weights flat, the rest beside them, the optimizer flattened."""
    model, optimizer, scheduler = trained()
    weights = get_model_state_dict(model)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    content = {
        **weights,
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        "lr_scheduler": scheduler.state_dict(),
        "dataloader": {"dp_rank_0": b"\x80\x04state", "world_size": 1},
        "train_state": {"step": torch.tensor(3), "ntokens_seen": torch.tensor(99)},
    }
    return saved(content, directory), weights


def like_the_tutorial(directory: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Save as torch's recipe for distributed checkpoints: one Stateful that holds both."""
    model, optimizer, _ = trained()
    weights = get_model_state_dict(model)
    return saved({"app": {"model": weights, "optim": get_optimizer_state_dict(model, optimizer)}}, directory), weights


@pytest.mark.parametrize("write", [like_torchtitan, like_the_tutorial])
def test_every_command_takes_it(tmp_path: Path, write: Any) -> None:
    source, weights = write(tmp_path / "step-3")
    invoke = CliRunner().invoke
    for target in ("out.safetensors", "out.pth"):
        done = invoke(app, ["convert", str(source), str(tmp_path / target), "--no-fsync"])
        assert done.exit_code == 0, done.output
        assert diff(source, tmp_path / target).same
        done = invoke(app, ["diff", str(source), str(tmp_path / target)])
        assert done.exit_code == 0, done.output
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    loaded = torch.load(tmp_path / "out.pth", weights_only=True)["state_dict"]
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    for command in (["inspect"], ["inspect", "--tree"], ["verify"]):
        done = invoke(app, [*command, str(source)])
        assert done.exit_code == 0, done.output
    changed = {**weights, "output.bias": weights["output.bias"] + 1}
    save_file(changed, tmp_path / "changed.safetensors")
    report = diff(source, tmp_path / "changed.safetensors")
    assert [value.name for value in report.values] == ["output.bias"]
    assert report.only_in_a == report.only_in_b == ()
    assert find_tensor(open_layout(source), "layers.3.norm.weight").shape == (8,)


@pytest.mark.parametrize("write", [like_torchtitan, like_the_tutorial])
@pytest.mark.parametrize("to", ["dcp", "local"])
def test_everything_is_resharded_as_it_is(tmp_path: Path, write: Any, to: str) -> None:
    source, weights = write(tmp_path / "step-3")
    convert(source, tmp_path / "out", to=to, ranks=3, fsync=False)
    assert diff(source, tmp_path / "out", keep="model").same
    if to == "dcp":
        assert diff(source, tmp_path / "out").same or write is like_torchtitan  # whose optimizer is unflattened
        into: dict[str, Any] = {name: torch.zeros_like(value) for name, value in weights.items()}
        content = into if write is like_torchtitan else {"app": {"model": into}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(content, checkpoint_id=tmp_path / "out", no_dist=True)
        assert all(torch.equal(into[name], weights[name]) for name in weights)
    convert(tmp_path / "out", tmp_path / "back.safetensors", fsync=False)
    assert load_file(tmp_path / "back.safetensors").keys() == weights.keys()


def test_inspect_prints_what_it_was_asked_for(tmp_path: Path) -> None:
    source, weights = like_torchtitan(tmp_path / "step-3")
    done = CliRunner().invoke(app, ["inspect", str(source), "--limit", "3"])
    assert len(done.output.splitlines()) < 14, done.output
    assert f"(at the top): {len(weights)} tensors, " in done.output
    whole = CliRunner().invoke(app, ["inspect", str(source)])
    for key in ("optimizer", "lr_scheduler", "dataloader", "train_state"):
        assert f"  {key}: " in whole.output
    many = {"state_dict": {"w": torch.ones(1)}, **{f"key_{i}": {"x": i} for i in range(50)}}
    torch.save(many, tmp_path / "many.pth")
    done = CliRunner().invoke(app, ["inspect", str(tmp_path / "many.pth"), "--limit", "3"])
    assert len(done.output.splitlines()) < 14, done.output
    assert "... and 48 more (--limit 0 shows all)" in done.output


TENSOR = torch.ones(1)
WEIGHTS = {"a": TENSOR, "b": TENSOR}


@pytest.mark.parametrize(
    ("tree", "where", "beside"),
    [
        ({"state_dict": WEIGHTS, "optimizer": {}}, ("state_dict",), ["optimizer"]),
        ({"model": WEIGHTS, "optim": {}, "x": TENSOR}, ("model",), ["optim", "x"]),
        ({"app": {"model": WEIGHTS, "optim": {}}}, ("app", "model"), ["optim"]),
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


def test_an_unknown_mapping_of_tensors_must_be_named(tmp_path: Path) -> None:
    torch.save({"scale": TENSOR, "net": {"w": TENSOR}, "head": {"w": TENSOR}}, tmp_path / "in.pth")
    with pytest.raises(FormatError, match=r"has no 'state_dict'.*'scale', 'net', 'head'; name one"):
        convert(tmp_path / "in.pth", tmp_path / "out.safetensors")
    convert(tmp_path / "in.pth", tmp_path / "out.safetensors", keep="net")
