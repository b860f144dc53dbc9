"""Statistics of a tensor are torch's, and the tree of names adds up."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch

from mmfsdp.basics.dtypes import to_torch
from mmfsdp.checkpoint import open_layout, tensor_statistics, tensor_tree
from mmfsdp.checkpoint.inspection import summaries
from mmfsdp.errors import ConfigError

DTYPES = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "int8", "uint8", "int64", "bool"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_torch_has_it(tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numpy")
    monkeypatch.setattr(summaries, "_BLOCK", 64)
    weight = (torch.randn(13, 7, generator=torch.Generator().manual_seed(0)) * 9).abs().to(to_torch(dtype))
    torch.save({"state_dict": {"w": weight.t()}}, tmp_path / "in.pth")
    seen: list[tuple[int, int]] = []
    found = tensor_statistics(open_layout(tmp_path / "in.pth"), "w", progress=lambda *numbers: seen.append(numbers))
    wide = weight.double()
    assert (found.name, found.dtype, found.shape, found.elements) == ("state_dict/w", dtype, (7, 13), 91)
    assert (found.min, found.max) == (wide.min().item(), wide.max().item())
    assert found.mean == pytest.approx(wide.mean().item(), rel=1e-12)
    assert found.norm == pytest.approx(wide.norm().item(), rel=1e-12)
    assert found.zeros == int((wide == 0).sum())
    assert seen[-1] == (weight.nbytes, weight.nbytes)


def test_what_is_not_finite(tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    tensors = {
        "odd": torch.tensor([math.nan, -math.inf, 2.0, 0.0]),
        "none": torch.zeros(0),
        "nan": torch.tensor(math.nan),
    }
    torch.save({**tensors, "z": torch.tensor([3 + 4j])}, tmp_path / "in.pth")
    layout = open_layout(tmp_path / "in.pth")
    odd = tensor_statistics(layout, "odd")
    assert (odd.min, odd.max, odd.zeros, odd.nans, odd.infs) == (-math.inf, 2.0, 1, 1, 1)
    assert json.loads(json.dumps(odd.describe(), allow_nan=False))["min"] == "-inf"
    for name in ("none", "nan"):
        found = tensor_statistics(layout, name)
        assert (found.min, found.max, found.mean, found.norm) == (None, None, None, 0.0)
    assert tensor_statistics(layout, "z").norm == 5.0
    with pytest.raises(ConfigError, match=r"in\.pth has no tensor 'od'\. Did you mean 'odd'\?"):
        tensor_statistics(layout, "od")


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_bits(tmp_path: Path, dtype: str) -> None:
    pytest.importorskip("numpy")
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (80_000,), dtype=torch.uint8)
    torch.save({"w": raw.view(to_torch(dtype))}, tmp_path / "in.pth")
    found = tensor_statistics(open_layout(tmp_path / "in.pth"), "w")
    assert found.nans == int(raw.view(to_torch(dtype)).double().isnan().sum())


def test_without_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "in.pth")
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(ConfigError, match=r"Statistics of a tensor needs numpy\. Install it with"):
        tensor_statistics(open_layout(tmp_path / "in.pth"), "w")


def test_the_tree_of_names(tmp_path: Path) -> None:
    state = {name: torch.ones(2) for name in ("a.b.c.weight", "a.b.c.bias", "a.d", "e")}
    torch.save({"state_dict": state, "optimizer": {"state": {0: {"m": torch.ones(4)}}}}, tmp_path / "in.pth")
    root = tensor_tree(open_layout(tmp_path / "in.pth"))
    assert (root.tensors, root.nbytes) == (5, 48)
    assert [(level, node.name, node.tensors, node.nbytes) for level, node in root.walk()] == [
        (0, "state_dict/", 4, 32),
        (1, "a.", 3, 24),
        (2, "b.c.", 2, 16),
        (3, "weight", 1, 8),
        (3, "bias", 1, 8),
        (2, "d", 1, 8),
        (1, "e", 1, 8),
        (0, "optimizer/state/0/m", 1, 16),
    ]
    assert [node.name for _, node in root.walk(1)] == ["state_dict/", "optimizer/state/0/m"]
    assert root.describe()["children"][1]["tensor"] == "optimizer/state/0/m"
