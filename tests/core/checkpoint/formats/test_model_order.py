"""Names that somebody sorted are told from those in a model's own order; real models are not taken for sorted."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.fsdp1.flat_state_dicts import in_model_order
from mmfsdp.checkpoint.layout import Layout


def layout(names: list[str], kind: str = "torch_zip") -> Layout:
    tensors = {name: TensorEntry(name, "float32", (), ()) for name in names}
    return Layout(Path("x.pth"), kind, 1, tensors, {})


MODELS = {
    "linear": nn.Sequential(*(nn.Linear(2, 2) for _ in range(12))),
    "without biases": nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(12))),
    "norms": nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(12))),
    "transformer": nn.Transformer(4, 2, 2, 2, 4, batch_first=True),
    "lstm": nn.LSTM(2, 2, 3),
    "dict": nn.ModuleDict({"stem": nn.Conv2d(1, 1, 1), "body": nn.Linear(2, 2), "head": nn.Linear(2, 2)}),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_are_in_their_order(name: str) -> None:
    names = [*MODELS[name].state_dict()]
    assert in_model_order(layout(names), names)
    assert in_model_order(layout(names[:3]), names[:3])


@pytest.mark.parametrize("name", [name for name in MODELS if name != "lstm"])  # whose layers have no dots
def test_sorted_names_are_found(name: str) -> None:
    names = [*MODELS[name].state_dict()]
    for changed in (sorted(names), names[::-1]):
        assert not in_model_order(layout(changed), changed)


def test_formats() -> None:
    names = ["stem.weight", "body.weight"]
    assert not in_model_order(layout(names, "huggingface"), names)
    assert in_model_order(layout(sorted(names), "model"), sorted(names))
    llama = [f"layers.{i}.{part}.weight" for i in range(4) for part in ("wq", "wk", "wv", "wo", "w1", "w2", "norm")]
    assert in_model_order(layout(llama), llama)
    assert not in_model_order(layout(sorted(llama)), sorted(llama))
