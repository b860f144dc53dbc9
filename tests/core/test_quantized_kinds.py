"""Weights that other libraries quantised are never taken for numbers: errors say which library can restore them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mmfsdp.checkpoint import average_checkpoints, convert, merge_lora
from mmfsdp.errors import ConfigError, FormatError, UnsafePickleError

pytest.importorskip("numpy")

TORCHAO = Path(__file__).with_name("quantized") / "torchao-0.18.0.pth"
CODES, SCALE = torch.ones(4, 8).to(torch.float8_e4m3fn), torch.full((4, 1), 2.0)
BYTES = torch.ones(4, 4, dtype=torch.uint8)
WORDS = torch.ones(4, 1, dtype=torch.int32)
# What the libraries give the parts of a linear layer, and in which words the errors name them.
KINDS = {
    r"bitsandbytes \(4 bits\)": {"weight": BYTES, "weight.absmax": SCALE, "weight.quant_map": torch.ones(16)},
    r"bitsandbytes \(8 bits\)": {"weight": torch.ones(4, 8, dtype=torch.int8), "SCB": SCALE[:, 0]},
    "GPTQ or AWQ": {"qweight": WORDS, "qzeros": WORDS.clone(), "scales": SCALE},
    "torchao": {"_weight_qdata": CODES, "_weight_scale": SCALE},
    r"ModelOpt \(4 bits\)": {"weight": BYTES, "weight_scale": CODES, "weight_scale_2": torch.ones(1)},
    "compressed-tensors": {"weight_packed": BYTES, "weight_scale": CODES, "weight_global_scale": torch.ones(1)},
}


def folder(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_the_library_is_named(kind: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "source", {f"layers.0.q_proj.{name}": part for name, part in KINDS[kind].items()})
    like = folder(tmp_path / "like", {"layers.0.q_proj.weight": torch.ones(4, 8)})
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    factors = {"A": torch.ones(1, 8), "B": torch.ones(4, 1)}
    save_file(
        {f"base_model.model.layers.0.q_proj.lora_{side}.weight": factor for side, factor in factors.items()},
        adapter / "adapter_model.safetensors",
    )
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1}))
    named = rf"is of weights quantised by {kind}.*, which mmfsdp does not restore\. Load the model with the library"
    with pytest.raises(ConfigError, match=named):
        convert(source, tmp_path / "out", to="hf", like=like)
    with pytest.raises(ConfigError, match=named):
        convert(source, tmp_path / "out.safetensors", quantize="none")
    with pytest.raises(ConfigError, match=named):
        merge_lora(source, adapter, tmp_path / "out.safetensors")
    if any(part.dtype == CODES.dtype for part in KINDS[kind].values()):
        with pytest.raises(ConfigError, match=f"such numbers cannot be averaged.*{named}"):
            average_checkpoints([source, source], tmp_path / "out.safetensors")
        with pytest.raises(ConfigError, match=f"a cast would take codes for numbers.*{named}"):
            convert(source, tmp_path / "out.safetensors", dtype="bf16")
    assert not any(path.name.startswith("out") for path in tmp_path.iterdir())
    convert(source, tmp_path / "copied.safetensors")  # the bytes as they are


@pytest.mark.parametrize("scale", ["weight_scale_inv", "scale", "scale_weight"])
def test_no_cast_takes_codes_for_numbers(scale: str, tmp_path: Path) -> None:
    """The second is DeepSeek's own code's name, the third ComfyUI's."""
    source = tmp_path / "codes.safetensors"
    other = torch.ones(3).to(torch.float8_e4m3fn)  # numbers: nothing scales them
    save_file({"fc.weight": CODES, f"fc.{scale}": SCALE[:1], "fc.bias": torch.ones(4), "other.weight": other}, source)
    remedy = r"Add quantize='none'" if scale == "weight_scale_inv" else r"Load the model with the library"
    with pytest.raises(ConfigError, match=rf"'fc\.weight' is float8_e4m3fn in units of 'fc\.{scale}'.*{remedy}"):
        convert(source, tmp_path / "out.safetensors", dtype="bf16")
    assert not (tmp_path / "out.safetensors").exists()
    convert(source, tmp_path / "out.safetensors", dtype={"*.bias": "bf16", "other.*": "bf16"})
    if scale == "weight_scale_inv":
        convert(source, tmp_path / "numbers.safetensors", dtype="bf16", quantize="none")


def test_a_hugging_face_folder_of_codes_is_to_be_restored(tmp_path: Path) -> None:
    source = folder(tmp_path / "source", {"fc.weight": CODES, "fc.weight_scale": SCALE})
    like = folder(tmp_path / "like", {"fc.weight": torch.ones(4, 8)})
    with pytest.raises(ConfigError, match=r"it has 'fc\.weight_scale' besides.*Add quantize='none', which restores"):
        convert(source, tmp_path / "out", to="hf", like=like)
    convert(source, tmp_path / "out", to="hf", like=like, quantize="none")


def test_tensors_of_torchao_in_a_pickle(tmp_path: Path) -> None:
    with pytest.raises(UnsafePickleError, match=r"Int8Tensor': weights quantised by torchao.*after dequantize\(\)"):
        convert(TORCHAO, tmp_path / "out.safetensors")
    with pytest.raises(FormatError, match=r"not a plain one: 'torchao.*Int8Tensor'.*dequantize\(\)"):
        convert(TORCHAO, tmp_path / "out.safetensors", trust=True)
