"""A training checkpoint of a PEFT model gives its base and its adapter, as peft itself writes them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmfsdp.checkpoint import convert, merge_lora
from mmfsdp.errors import ConfigError

WRITTEN = Path(__file__).parent.parent / "arithmetic/adapters"
CASES = ("plain", "rslora", "conv1d", "dora")


def same(path: Path, expected: dict[str, torch.Tensor]) -> bool:
    found = load_file(path)
    return {*found} == {*expected} and all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("case", CASES)
def test_the_adapter_is_the_one_that_peft_writes(case: str, tmp_path: Path) -> None:
    convert(WRITTEN / case / "trained.safetensors", tmp_path / "sharded", to="dcp", ranks=3)
    convert(tmp_path / "sharded", tmp_path / "adapter.safetensors", recipe="peft-to-adapter")
    expected = load_file(WRITTEN / case / "adapter_model.safetensors")
    if case != "plain":  # biases were not trained, so peft does not write those of the base
        trained = load_file(WRITTEN / case / "trained.safetensors")
        expected |= {name: tensor for name, tensor in trained.items() if name.endswith(".base_layer.bias")}
    assert same(tmp_path / "adapter.safetensors", expected)


def test_an_adapter_alone_needs_no_base(tmp_path: Path) -> None:
    """As verl saves it with `save_lora_only`."""
    trained = {
        name: tensor for name, tensor in load_file(WRITTEN / "plain/trained.safetensors").items() if "lora_" in name
    }
    torch.save(trained, tmp_path / "adapter.pth")
    convert(tmp_path / "adapter.pth", tmp_path / "adapter.safetensors", recipe="peft-to-adapter")
    expected = load_file(WRITTEN / "plain/adapter_model.safetensors")
    assert same(tmp_path / "adapter.safetensors", {name: expected[name] for name in expected if "lora_" in name})
    with pytest.raises(ConfigError, match=r"matches no tensor: no name is like .* No tensor is left\."):
        convert(WRITTEN / "plain/base.safetensors", tmp_path / "none.safetensors", recipe="peft-to-adapter")


@pytest.mark.parametrize("case", [case for case in CASES if case != "dora"])
def test_the_base_is_the_one_that_was_wrapped(case: str, tmp_path: Path) -> None:
    convert(WRITTEN / case / "trained.safetensors", tmp_path / "base.safetensors", recipe="peft-to-base")
    expected = load_file(WRITTEN / case / "base.safetensors")
    if case == "plain":  # trained biases are the base's own parameters
        trained = load_file(WRITTEN / case / "trained.safetensors")
        expected |= {
            name.removeprefix("base_model.model.").replace(".base_layer", ""): tensor
            for name, tensor in trained.items()
            if name.endswith(".base_layer.bias")
        }
    assert same(tmp_path / "base.safetensors", expected)


@pytest.mark.parametrize("case", [case for case in CASES if case != "dora"])
def test_both_merge_into_what_peft_merges(case: str, tmp_path: Path) -> None:
    trained, adapter = WRITTEN / case / "trained.safetensors", tmp_path / "adapter"
    adapter.mkdir()
    shutil.copy(WRITTEN / case / "adapter_config.json", adapter)
    convert(trained, adapter / "adapter_model.safetensors", recipe="peft-to-adapter")
    convert(trained, tmp_path / "base.safetensors", recipe="peft-to-base")
    merge_lora(tmp_path / "base.safetensors", adapter, tmp_path / "merged.safetensors", dtype="float64")
    found = load_file(tmp_path / "merged.safetensors")
    merged = load_file(WRITTEN / case / "merged.safetensors")
    assert {*found} == {*merged}
    for name, tensor in merged.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-14, atol=1e-16)


def test_a_folder_that_transformers_would_load_without_its_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "like").mkdir()
    (tmp_path / "like/config.json").write_text(json.dumps({"model_type": "own"}))
    with pytest.raises(ConfigError, match=r"base_layer.*recipe='peft-to-base'.*'peft-to-adapter'"):
        convert(WRITTEN / "rslora/trained.safetensors", tmp_path / "out", to="hf", like=tmp_path / "like")
    assert not (tmp_path / "out").exists()
    settings = {"to": "hf", "like": tmp_path / "like", "recipe": "peft-to-base"}
    convert(WRITTEN / "rslora/trained.safetensors", tmp_path / "out", **settings)
    assert same(tmp_path / "out/model.safetensors", load_file(WRITTEN / "rslora/base.safetensors"))
