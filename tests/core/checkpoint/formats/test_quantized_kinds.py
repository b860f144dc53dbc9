"""Weights that other libraries quantised are never taken for numbers: errors say which library can restore them."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mmfsdp.checkpoint import average_checkpoints, convert, diff, merge_lora, open_layout, tensor_statistics, verify
from mmfsdp.errors import ConfigError, FormatError, UnknownDtypeError, UnsafePickleError

pytest.importorskip("numpy")

TORCHAO = Path(__file__).parents[2].joinpath("quantized") / "torchao-0.18.0.pth"
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


def write_raw(path: Path, tensors: dict[str, tuple[str, list[int], int]], data: bytes) -> None:
    """Write a safetensors file of dtypes that torch lacks: each tensor's code, shape and number of bytes."""
    header, end = {}, 0
    for name, (code, shape, size) in tensors.items():
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [end, end := end + size]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


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
    for quantize in ("fp8", "fp8_channel"):
        with pytest.raises(
            ConfigError, match=f"'quantize' makes codes of numbers, and some weights are codes.*{named}"
        ):
            convert(source, tmp_path / "out", to="hf", quantize=quantize)
    assert not any(path.name.startswith("out") for path in tmp_path.iterdir())
    convert(source, tmp_path / "copied.safetensors")  # the bytes as they are


@pytest.mark.parametrize("scale", ["weight_scale_inv", "scale", "scale_weight", "fp8_scale"])
def test_no_cast_takes_codes_for_numbers(scale: str, tmp_path: Path) -> None:
    """The second is DeepSeek's own code's name, the third ComfyUI's, the last nobody's."""
    source = tmp_path / "codes.safetensors"
    other = torch.ones(3).to(torch.float8_e4m3fn)  # numbers: nothing scales them
    save_file({"fc.weight": CODES, f"fc.{scale}": SCALE[:1], "fc.bias": torch.ones(4), "other.weight": other}, source)
    remedy = r"Load the model with the library" if scale == "fp8_scale" else r"Add quantize='none'"
    with pytest.raises(ConfigError, match=rf"'fc\.weight' is float8_e4m3fn in units of 'fc\.{scale}'.*{remedy}"):
        convert(source, tmp_path / "out.safetensors", dtype="bf16")
    assert not (tmp_path / "out.safetensors").exists()
    convert(source, tmp_path / "out.safetensors", dtype={"*.bias": "bf16", "other.*": "bf16"})
    if scale == "fp8_scale":
        with pytest.raises(
            ConfigError, match=r"in units of 'fc\.fp8_scale', which mmfsdp does not read. Load the model"
        ):
            convert(source, tmp_path / "numbers.safetensors", quantize="none")
        return
    convert(source, tmp_path / "numbers.safetensors", dtype="bf16", quantize="none")
    found = load_file(tmp_path / "numbers.safetensors")
    assert {*found} == {"fc.weight", "fc.bias", "other.weight"}
    assert torch.equal(found["fc.weight"], torch.full((4, 8), 2.0).bfloat16())


# Shapes of codes and of their scales, and the sizes of the blocks that share one.
BLOCKS = {
    "64 x 64": ((200, 300), (4, 5), (64, 64)),
    "1 x 128": ((200, 300), (200, 3), (1, 128)),
    "32 of a row": ((64, 96), (64, 3), (1, 32)),
    "a column": ((5, 7), (1, 7), (5, 1)),
    "experts, 128 x 128": ((2, 256, 130), (2, 2, 2), (1, 128, 128)),
    "experts, a row": ((3, 40, 20), (3, 40, 1), (1, 1, 20)),
    "experts, each": ((3, 4, 5), (3,), (1, 4, 5)),
    "a convolution": ((6, 3, 2, 2), (6, 1, 1, 1), (1, 3, 2, 2)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu])
def test_scales_of_many_shapes(dtype: torch.dtype, tmp_path: Path) -> None:
    """Also of what ranks hold, whose boxes begin anywhere."""
    torch.manual_seed(0)
    tensors, expected = {}, {}
    for name, (sizes, counts, block) in BLOCKS.items():
        codes, scales = torch.randn(sizes).to(torch.float8_e4m3fn), (torch.rand(counts) + 0.5).to(dtype)
        tensors |= {f"{name}.weight": codes, f"{name}.weight_scale_inv": scales}
        scales = scales.float().reshape(*counts, *(1,) * (len(sizes) - len(counts)))
        for dim, (size, side) in enumerate(zip(sizes, block, strict=True)):
            scales = scales.repeat_interleave(side, dim).narrow(dim, 0, size)
        expected[f"{name}.weight"] = codes.float() * scales
    save_file(tensors, tmp_path / "codes.safetensors")
    convert(tmp_path / "codes.safetensors", tmp_path / "whole.safetensors", quantize="none", verify_output=True)
    convert(tmp_path / "codes.safetensors", tmp_path / "dcp", to="dcp", ranks=3, quantize="none")
    convert(tmp_path / "dcp", tmp_path / "parts.safetensors")
    for found in (load_file(tmp_path / "whole.safetensors"), load_file(tmp_path / "parts.safetensors")):
        assert {*found} == {*expected}
        assert all(torch.equal(found[name], value) for name, value in expected.items())


EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"
# Kinds of codes, what lies beside numbers there, the weight that the note names, and what may be cast.
STAY: dict[str, tuple[dict[str, torch.Tensor], str, set[str]]] = {
    "MXFP4": (
        {f"{EXPERTS}_blocks": BYTES, f"{EXPERTS}_scales": BYTES.clone(), f"{EXPERTS}_bias": torch.ones(4)},
        EXPERTS,
        {f"{EXPERTS}_bias"},
    ),
    "GPTQ or AWQ": (
        {"fc.qweight": WORDS, "fc.qzeros": WORDS.clone(), "fc.scales": SCALE.half(), "fc.bias": torch.ones(4)},
        "fc.weight",
        {"fc.bias"},
    ),
    r"bitsandbytes \(4 bits\)": (
        {
            "fc.weight": BYTES,
            "fc.weight.absmax": BYTES[0].clone(),
            "fc.weight.nested_absmax": torch.ones(1),
            "fc.weight.quant_map": torch.ones(16),
            "fc.weight.nested_quant_map": torch.ones(256),
            "fc.weight.quant_state.bitsandbytes__nf4": BYTES[1].clone(),
        },
        "fc.weight",
        set(),
    ),
    r"bitsandbytes \(8 bits\)": (
        {"fc.weight": torch.ones(4, 8, dtype=torch.int8), "fc.SCB": SCALE[:, 0]},
        "fc.weight",
        set(),
    ),
    "HQQ": (
        {"fc.W_q": BYTES, "fc.scale": SCALE, "fc.zero": SCALE.clone(), "fc.bias": torch.ones(4)},
        "fc.weight",
        {"fc.bias"},
    ),
}


def test_nothing_is_added_to_codes_of_unknown_units(tmp_path: Path) -> None:
    save_file({"fc.weight": CODES, "fc.my_scale": torch.ones(1)}, tmp_path / "codes.safetensors")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    factors = {"A": torch.ones(1, 8), "B": torch.ones(4, 1)}
    names = {f"base_model.model.fc.lora_{side}.weight": factor for side, factor in factors.items()}
    save_file(names, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1}))
    with pytest.raises(
        ConfigError, match=r"in units of 'fc.my_scale', and nothing can be added .* Load the model with"
    ):
        merge_lora(tmp_path / "codes.safetensors", adapter, tmp_path / "out.safetensors")


@pytest.mark.parametrize("kind", STAY)
def test_a_cast_leaves_the_scales_of_other_codes(kind: str, tmp_path: Path) -> None:
    tensors, weight, cast = STAY[kind]
    tensors = tensors | {"norm.weight": torch.ones(4)}
    save_file(tensors, tmp_path / "codes.safetensors")
    report = convert(tmp_path / "codes.safetensors", tmp_path / "out.safetensors", dtype="bf16")
    assert {*report.casts} == cast | {"norm.weight"}
    [note] = report.notes
    assert re.fullmatch(f"not cast, as they are quantised by {kind}: '{weight}', with their scales", note)
    found = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(found[name], part) for name, part in tensors.items() if name not in report.casts)
    for name in found.keys() - report.casts.keys():
        if tensors[name].is_floating_point():
            with pytest.raises(
                ConfigError, match=f"matches only what belongs to codes, such as '{re.escape(name)}' of"
            ):
                convert(tmp_path / "codes.safetensors", tmp_path / "no.safetensors", dtype={name: "bf16"})


def test_codes_that_can_be_restored_are_not_left_beside_rounded_scales(tmp_path: Path) -> None:
    state = {"fc.weight": torch.ones(4, 8, dtype=torch.int8), "fc.weight_scale": SCALE, "fc.bias": torch.ones(4)}
    save_file(state, tmp_path / "codes.safetensors")
    with pytest.raises(ConfigError, match=r"'fc.weight_scale' holds the scales of 'fc.weight', .*Add quantize='none'"):
        convert(tmp_path / "codes.safetensors", tmp_path / "out.safetensors", dtype="bf16")
    convert(tmp_path / "codes.safetensors", tmp_path / "out.safetensors", dtype="bf16", quantize="none")
    assert torch.equal(load_file(tmp_path / "out.safetensors")["fc.weight"], torch.full((4, 8), 2.0).bfloat16())
    save_file({"fc.weight": state["fc.weight"], "out.weight": torch.ones(4, 8)}, tmp_path / "bytes.safetensors")
    with pytest.raises(ConfigError, match=r"'fc.weight' is int8, and nothing beside it says what its codes stand for"):
        convert(tmp_path / "bytes.safetensors", tmp_path / "no.safetensors", quantize="fp8")


def test_bytes_of_two_floats_are_no_numbers(tmp_path: Path) -> None:
    """DeepSeek-V4's experts; the advice does not contradict itself."""
    scales = torch.ones(64, 4).to(torch.float8_e8m0fnu)
    tensors = {
        "attn.wq.weight": torch.ones(128, 128).to(torch.float8_e4m3fn),
        "attn.wq.scale": torch.ones(1, 1).to(torch.float8_e8m0fnu),
        "experts.0.w1.weight": torch.ones(64, 64, dtype=torch.int8),
        "experts.0.w1.scale": scales,
    }
    save_file(tensors, tmp_path / "codes.safetensors")
    for settings in ({"quantize": "none"}, {"dtype": "bf16"}, {"quantize": "fp8"}):
        with pytest.raises(
            ConfigError, match=r"'experts.0.w1.weight' is of weights quantised by NVFP4 or MXFP4 .*library"
        ):
            convert(tmp_path / "codes.safetensors", tmp_path / "out.safetensors", **settings)
    experts = {name: tensors[name] for name in [*tensors][2:]}
    save_file(experts, tmp_path / "one.safetensors")
    average_checkpoints([tmp_path / "one.safetensors"] * 2, tmp_path / "same.safetensors")
    save_file(experts | {"experts.0.w1.scale": (scales.float() * 4).to(scales.dtype)}, tmp_path / "two.safetensors")
    with pytest.raises(
        ConfigError, match=r"'experts.0.w1.scale' is float8_e8m0fnu .*differs .*quantised weights cannot"
    ):
        average_checkpoints(
            [tmp_path / f"{name}.safetensors" for name in ("one", "two")], tmp_path / "mean.safetensors"
        )
    save_file({name: tensors[name] for name in [*tensors][:2]}, tmp_path / "dense.safetensors")
    convert(tmp_path / "dense.safetensors", tmp_path / "out.safetensors", quantize="none")
    assert torch.equal(load_file(tmp_path / "out.safetensors")["attn.wq.weight"], torch.ones(128, 128))


def test_four_bit_floats_of_torch(tmp_path: Path) -> None:
    """As torch and safetensors write them: two in an element of torch, which safetensors counts apart."""
    packed = torch.arange(32, dtype=torch.uint8).reshape(4, 8).view(torch.float4_e2m1fn_x2)
    state = {"fc.weight": packed, "norm.weight": torch.ones(3)}
    save_file(state, tmp_path / "codes.safetensors")
    torch.save(state, tmp_path / "codes.pth")
    assert open_layout(tmp_path / "codes.safetensors").tensors["fc.weight"].shape == (4, 8)
    convert(tmp_path / "codes.safetensors", tmp_path / "dcp", to="dcp", ranks=3)
    convert(tmp_path / "dcp", tmp_path / "local", to="local", ranks=2)
    convert(tmp_path / "local", tmp_path / "back.safetensors", verify_output=True)
    for path in ("codes.safetensors", "codes.pth", "dcp", "local", "back.safetensors"):
        assert verify(tmp_path / path).ok
        assert diff(tmp_path / "codes.safetensors", tmp_path / path, keep="model").same
    found = load_file(tmp_path / "back.safetensors")["fc.weight"]
    assert found.dtype == packed.dtype
    assert torch.equal(found.view(torch.uint8), packed.view(torch.uint8))
    report = convert(tmp_path / "codes.safetensors", tmp_path / "out.safetensors", dtype="bf16")
    assert {*report.casts} == {"norm.weight"}
    assert report.notes[0].startswith("not cast, as they are quantised by NVFP4 or MXFP4")
    for settings in ({"quantize": "none"}, {"quantize": "fp8"}):
        with pytest.raises(ConfigError, match=r"'fc\.weight' is of weights quantised by NVFP4 or MXFP4"):
            convert(tmp_path / "codes.pth", tmp_path / "no.safetensors", **settings)


def test_six_bit_floats_of_safetensors(tmp_path: Path) -> None:
    """Four to three bytes, which safetensors' own library opens, and torch has no dtype for."""
    data = bytes(range(24)) + bytes(3) + bytes(8)
    write_raw(
        tmp_path / "codes.safetensors",
        {"fc.weight": ("F6_E2M3", [4, 8], 24), "head.weight": ("F6_E3M2", [4], 3), "norm.weight": ("F32", [2], 8)},
        data,
    )
    with safe_open(tmp_path / "codes.safetensors", "pt") as file:
        assert file.get_slice("fc.weight").get_shape() == [4, 8]
    assert verify(tmp_path / "codes.safetensors").ok
    convert(tmp_path / "codes.safetensors", tmp_path / "back.safetensors", verify_output=True)
    assert diff(tmp_path / "codes.safetensors", tmp_path / "back.safetensors").same
    with safe_open(tmp_path / "back.safetensors", "pt") as file:
        assert (file.get_slice("fc.weight").get_dtype(), file.get_slice("head.weight").get_shape()) == ("F6_E2M3", [4])
    changed = (tmp_path / "codes.safetensors").read_bytes()
    (tmp_path / "other.safetensors").write_bytes(changed[:-35] + b"\1\0" + changed[-33:])
    [values] = diff(tmp_path / "codes.safetensors", tmp_path / "other.safetensors").values
    assert (values.name, values.elements) == ("fc.weight", 8)
    report = convert(tmp_path / "codes.safetensors", tmp_path / "out.safetensors", dtype="bf16")
    assert {*report.casts} == {"norm.weight"}
    assert report.notes[0].startswith("not cast, as they are quantised by MXFP6")
    for target, form in (("no.pth", None), ("dcp", "dcp"), ("local", "local")):
        with pytest.raises(ConfigError, match=r"Only safetensors holds 'float6_e2m3fn_x4'"):
            convert(tmp_path / "codes.safetensors", tmp_path / target, to=form)
        assert not (tmp_path / target).exists()
    with pytest.raises(ConfigError, match=r"'fc\.weight' is of weights quantised by MXFP6"):
        convert(tmp_path / "codes.safetensors", tmp_path / "no.safetensors", quantize="none")
    with pytest.raises(ConfigError, match="each element holds 4 codes"):
        tensor_statistics(open_layout(tmp_path / "codes.safetensors"), "fc.weight")


def test_a_dtype_that_is_not_known_is_no_damage(tmp_path: Path) -> None:
    write_raw(tmp_path / "new.safetensors", {"fc.weight": ("F3_E1M1", [4, 8], 12)}, bytes(12))
    for act in (verify, open_layout):
        with pytest.raises(
            UnknownDtypeError, match=r"'fc\.weight' of new\.safetensors: 'F3_E1M1' is not a dtype of safe"
        ):
            act(tmp_path / "new.safetensors")
    write_raw(tmp_path / "rows.safetensors", {"fc.weight": ("F6_E2M3", [4, 6], 18)}, bytes(18))
    with pytest.raises(
        FormatError, match=r"has dtype F6_E2M3 and shape \[4, 6\]. mmfsdp reads only rows of whole bytes"
    ):
        open_layout(tmp_path / "rows.safetensors")
    save_file({"fc.weight": torch.ones(4)}, tmp_path / "plain.safetensors")
    convert(tmp_path / "plain.safetensors", tmp_path / "sealed.safetensors")
    sealed = (tmp_path / "sealed.safetensors").read_bytes()
    (tmp_path / "sealed.safetensors").write_bytes(sealed.replace(b'"F32"', b'"F33"'))
    [problem] = verify(tmp_path / "sealed.safetensors").problems  # a header with a checksum knows that it is damaged
    assert "The checksums in the header" in problem.message


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
