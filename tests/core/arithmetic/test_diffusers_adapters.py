"""An adapter in diffusers' file is merged as its own fuse_lora() does in float64; what it does not fit is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mmfsdp.checkpoint import convert, merge_lora
from mmfsdp.errors import ConfigError, CorruptCheckpointError, FormatError

pytest.importorskip("numpy")

GOLDEN = Path(__file__).parent / "adapters" / "diffusers"
FILE = "pytorch_lora_weights.safetensors"


def changed(folder: Path, *, settings: dict[str, object] | None = None, **tensors: torch.Tensor) -> Path:
    """Write an adapter with other settings, or with tensors added."""
    folder.mkdir()
    source = GOLDEN / "settings" / FILE
    with safe_open(source, "pt") as file:
        known = json.loads(file.metadata()["lora_adapter_metadata"])
    metadata = {"format": "pt", "lora_adapter_metadata": json.dumps(known | (settings or {}))}
    save_file({**load_file(source), **tensors}, folder / FILE, metadata)
    return folder


@pytest.mark.parametrize("case", ["settings", "plain"])
@pytest.mark.parametrize("component", ["unet", "text_encoder"])
def test_equals_diffusers(case: str, component: str, tmp_path: Path) -> None:
    expected = load_file(GOLDEN / case / f"{component}.safetensors")
    convert(GOLDEN / component, tmp_path / "base.safetensors")
    base = load_file(tmp_path / "base.safetensors")
    assert sum(not torch.equal(base[name].double(), tensor) for name, tensor in expected.items()) >= 2
    merge_lora(GOLDEN / component, GOLDEN / case, tmp_path / "wide.safetensors", dtype="float64")
    merge_lora(GOLDEN / component, GOLDEN / case / FILE, tmp_path / "out", to="hf")
    wide = load_file(tmp_path / "wide.safetensors")
    convert(tmp_path / "out", tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert {*found} == {*wide} == {*expected}
    for name, tensor in expected.items():
        torch.testing.assert_close(wide[name], tensor, rtol=1e-14, atol=1e-16)
        assert torch.equal(found[name], wide[name].float())
    assert (tmp_path / "out/config.json").read_bytes() == (GOLDEN / component / "config.json").read_bytes()


def test_a_component_is_named_where_the_folder_is_not(tmp_path: Path) -> None:
    convert(GOLDEN / "unet", tmp_path / "base", to="dcp", ranks=3)
    with pytest.raises(
        ConfigError, match=r"factors for 'text_encoder', 'unet': set 'component' to the one that the base is"
    ):
        merge_lora(tmp_path / "base", GOLDEN / "plain", tmp_path / "out.safetensors")
    with pytest.raises(ConfigError, match=r"no factors for 'transformer', but for 'text_encoder', 'unet'"):
        merge_lora(tmp_path / "base", GOLDEN / "plain", tmp_path / "out.safetensors", component="transformer")
    with pytest.raises(ConfigError, match=r"does not fit '.+base': it has no 'encoder\.layers"):
        merge_lora(tmp_path / "base", GOLDEN / "plain", tmp_path / "out.safetensors", component="text_encoder")
    assert not (tmp_path / "out.safetensors").exists()
    merge_lora(tmp_path / "base", GOLDEN / "plain", tmp_path / "out.safetensors", component="unet", dtype="float64")
    expected, found = load_file(GOLDEN / "plain/unet.safetensors"), load_file(tmp_path / "out.safetensors")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-14, atol=1e-16)


def test_a_component_is_not_for_adapters_of_peft(tmp_path: Path) -> None:
    folder = GOLDEN.parent / "plain"
    with pytest.raises(ConfigError, match="component='unet' is for an adapter of a pipeline"):
        merge_lora(folder / "base.safetensors", folder, tmp_path / "out.safetensors", component="unet")


@pytest.mark.parametrize(
    ("settings", "tensors", "error", "message"),
    [
        ({"unet.use_dora": True}, {}, FormatError, "of DoRA"),
        ({"unet.r": 5}, {}, CorruptCheckpointError, "expected rank 5, as pytorch_lora_weights.safetensors says"),
        ({"unet.rank_pattern": []}, {}, CorruptCheckpointError, "expected rank 4"),
        ({"unet.rank_pattern": [1]}, {}, CorruptCheckpointError, "rank_pattern is not a mapping"),
        ({}, {"unet.conv_in.weight": torch.zeros(2)}, FormatError, "'unet.conv_in.weight', which is not a factor"),
        ({}, {"unet.a.lora_magnitude_vector": torch.zeros(2)}, FormatError, "of DoRA"),
        ({}, {"lora_unet_a.lora_down.weight": torch.zeros(2)}, FormatError, "does not begin with a component"),
        ({}, {"unet.a.processor.to_q_lora.down.weight": torch.zeros(2)}, FormatError, "is not a factor of LoRA"),
        ({}, {"unet.a.lora.down.weight": torch.zeros(4, 2)}, CorruptCheckpointError, "not the other factor"),
        ({}, {"unet.a.alpha": torch.tensor(2.0)}, FormatError, "is not a factor of LoRA"),
    ],
)
def test_what_cannot_be_merged(
    settings: dict[str, object],
    tensors: dict[str, torch.Tensor],
    error: type[Exception],
    message: str,
    tmp_path: Path,
) -> None:
    adapter = changed(tmp_path / "adapter", settings=settings, **tensors)
    with pytest.raises(error, match=message):
        merge_lora(GOLDEN / "unet", adapter, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_damaged_settings(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "plain", tmp_path / "adapter"))
    save_file(load_file(folder / FILE), folder / FILE, {"lora_adapter_metadata": "{"})
    with pytest.raises(CorruptCheckpointError, match=r"lora_adapter_metadata of pytorch_lora_weights.* is damaged"):
        merge_lora(GOLDEN / "unet", folder, tmp_path / "out.safetensors")


def test_settings_of_another_component_alone(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "plain", tmp_path / "adapter"))
    metadata = {"lora_adapter_metadata": json.dumps({"text_encoder.peft_type": "LORA", "text_encoder.r": 3})}
    save_file(load_file(folder / FILE), folder / FILE, metadata)
    with pytest.raises(CorruptCheckpointError, match="it says nothing of 'unet'"):
        merge_lora(GOLDEN / "unet", folder, tmp_path / "out.safetensors")
