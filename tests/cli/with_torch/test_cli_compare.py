"""``mmfsdp-cli compare``: exit codes, text, JSON and the page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.cli.support import fields_of, invoke, run

import mmfsdp


def train(folder: Path, lr: float) -> Path:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with mmfsdp.recording(folder, model, optimizer):
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    return train(tmp_path / "a", 0.1), train(tmp_path / "b", 0.2)


def test_equal_runs(runs: tuple[Path, Path]) -> None:
    result = invoke("compare", runs[0], runs[0], "--perturbed", runs[0])
    assert result.exit_code == 0
    assert result.output.startswith("Equal: 23 tensors of 1 step, 1 and 1 ranks.")


def test_different_runs(runs: tuple[Path, Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = invoke("compare", *runs, "--html", page)
    assert result.exit_code == 1
    assert "The first difference: setting of weight[lr] (step 0): " in result.output
    assert "update of weight (step 0)" in page.read_text()
    assert invoke("compare", *runs, "--html", page).exit_code == 2
    assert invoke("compare", *runs, "--html", page, "--force").exit_code == 1


def test_it_needs_no_torch(runs: tuple[Path, Path], tmp_path: Path) -> None:
    assert run("compare", runs[0], runs[0]).returncode == 0
    assert run("compare", *runs, "--perturbed", runs[0], "--html", tmp_path / "page.html").returncode == 1


def test_json(runs: tuple[Path, Path]) -> None:
    result = invoke("compare", *runs, "--json")
    assert result.exit_code == 1
    kinds = [item["kind"] for item in fields_of("compare", result.output)["differences"]]
    assert kinds[:3] == ["setting", "setting", "update"]


def test_no_record(tmp_path: Path) -> None:
    result = invoke("compare", tmp_path, tmp_path)
    assert result.exit_code == 2
    assert "holds no record" in result.output
