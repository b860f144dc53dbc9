"""Every command takes distributed checkpoints as other projects lay them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cli.support import invoke
from tests.core.layout_writers import like_the_tutorial, like_torchtitan

from mmfsdp.checkpoint import diff, find_tensor, open_layout


@pytest.mark.sample("like_the_tutorial")
@pytest.mark.parametrize("write", [like_torchtitan, like_the_tutorial])
def test_every_command_takes_it(tmp_path: Path, write: Any) -> None:
    source, weights = write(tmp_path / "step-3")
    for target in ("out.safetensors", "out.pth"):
        done = invoke("convert", source, tmp_path / target, "--no-fsync")
        assert done.exit_code == 0, done.output
        assert diff(source, tmp_path / target).same
        done = invoke("diff", source, tmp_path / target)
        assert done.exit_code == 0, done.output
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    loaded = torch.load(tmp_path / "out.pth", weights_only=True)["state_dict"]
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    for command in (["inspect"], ["inspect", "--tree"], ["verify"]):
        done = invoke(*command, source)
        assert done.exit_code == 0, done.output
    changed = {**weights, "output.bias": weights["output.bias"] + 1}
    save_file(changed, tmp_path / "changed.safetensors")
    report = diff(source, tmp_path / "changed.safetensors")
    assert [value.name for value in report.values] == ["output.bias"]
    assert report.only_in_a == report.only_in_b == ()
    assert find_tensor(open_layout(source), "layers.3.norm.weight").shape == (8,)


@pytest.mark.exhaustive
def test_inspect_prints_what_it_was_asked_for(tmp_path: Path) -> None:
    source, weights = like_torchtitan(tmp_path / "step-3")
    done = invoke("inspect", source, "--limit", "3")
    assert len(done.output.splitlines()) < 14, done.output
    assert f"(at the top): {len(weights)} tensors, " in done.output
    whole = invoke("inspect", source)
    for key in ("optimizer", "lr_scheduler", "dataloader", "train_state"):
        assert f"  {key}: " in whole.output
    many = {"state_dict": {"w": torch.ones(1)}, **{f"key_{i}": {"x": i} for i in range(50)}}
    torch.save(many, tmp_path / "many.pth")
    done = invoke("inspect", tmp_path / "many.pth", "--limit", "3")
    assert len(done.output.splitlines()) < 14, done.output
    assert "... and 48 more (--limit 0 shows all)" in done.output


def test_long_values_are_shown_where_they_differ(tmp_path: Path) -> None:
    """MMEngine keeps the whole config in a checkpoint."""
    lines = [f"setting_{number} = {number}" for number in range(500)]
    for name, epochs in (("a.pth", 2), ("b.pth", 3)):
        config = "\n".join([*lines[:250], f"max_epochs = {epochs}", *lines[250:]])
        torch.save({"state_dict": {"weight": torch.ones(2)}, "meta": {"cfg": config, "epoch": epochs}}, tmp_path / name)
    done = invoke("diff", tmp_path / "a.pth", tmp_path / "b.pth")
    assert done.exit_code == 1
    assert "meta/epoch: 2 and 3" in done.output
    (line,) = (line for line in done.output.splitlines() if "meta/cfg" in line)
    assert "max_epochs = 2" in line
    assert "max_epochs = 3" in line
    assert "--json has both" in line
    assert len(line) < 300
    full = invoke("diff", tmp_path / "a.pth", tmp_path / "b.pth", "--json")
    assert "setting_499 = 499" in full.output
