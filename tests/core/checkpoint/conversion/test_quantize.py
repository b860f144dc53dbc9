"""Quantised weights are those of the formula that transformers undoes, bit for bit, whatever the form of the target."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmfsdp.checkpoint import average_checkpoints, convert
from mmfsdp.errors import ConfigError

pytest.importorskip("numpy")


def weights(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (300, 200),
        "model.layers.0.self_attn.q_proj.weight": (256, 384),
        "model.layers.0.self_attn.q_proj.bias": (256,),
        "model.layers.0.mlp.gate_proj.weight": (130, 257),
        "model.layers.0.mlp.gate.weight": (8, 200),
        "model.layers.0.norm.weight": (200,),
        "patch.weight": (16, 3, 4, 4),
        "lm_head.weight": (300, 200),
    }
    return {name: (torch.randn(*shape, generator=generator) / 20).to(dtype) for name, shape in shapes.items()}


LINEAR = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight")


def reference(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise block by block with torch."""
    rows, columns = (math.ceil(size / 128) for size in weight.shape)
    codes, scales = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            box = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            scales[row, column] = weight[box].float().abs().max() / 448
            codes[box] = (weight[box].float() / scales[row, column]).to(torch.float8_e4m3fn)
    return codes, scales


def restored(found: dict[str, torch.Tensor], name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What transformers computes of a weight: each code times the scale of its block."""
    codes, scales = found[name].to(dtype), found[f"{name}_scale_inv"].to(dtype)
    whole = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes * whole[: codes.shape[0], : codes.shape[1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_codes_and_scales_are_those_of_torch(dtype: torch.dtype, tmp_path: Path) -> None:
    given = weights(dtype)
    torch.save(given, tmp_path / "model.pth")
    convert(tmp_path / "model.pth", tmp_path / "out.safetensors", quantize="fp8", verify_output=True)
    found = load_file(tmp_path / "out.safetensors")
    assert {*found} == {*given} | {f"{name}_scale_inv" for name in LINEAR}
    for name in LINEAR:
        codes, scales = reference(given[name])
        assert torch.equal(found[f"{name}_scale_inv"], scales)
        assert torch.equal(found[name].view(torch.uint8), codes.view(torch.uint8))
        # Half a step of a mantissa of three bits, and half of the smallest number for what is near zero.
        bound = given[name].float().abs() / 16 + found[f"{name}_scale_inv"].max() * 2**-10
        assert ((restored(found, name) - given[name].float()).abs() <= bound * 1.0001).all()
    assert all(torch.equal(found[name], tensor) for name, tensor in given.items() if name not in LINEAR)


def test_sources_may_be_sharded_and_targets_several_files(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "model.safetensors")
    convert(tmp_path / "model.safetensors", tmp_path / "whole.safetensors", quantize="fp8")
    convert(tmp_path / "model.safetensors", tmp_path / "dcp", to="dcp", ranks=3)
    convert(tmp_path / "dcp", tmp_path / "shards", quantize="fp8", max_shard_size="50kB", verify_output=True)
    convert(tmp_path / "shards", tmp_path / "again.safetensors")
    one, two = load_file(tmp_path / "whole.safetensors"), load_file(tmp_path / "again.safetensors")
    assert {*one} == {*two}
    assert all(torch.equal(one[name].view(torch.uint8), two[name].view(torch.uint8)) for name in one)


def test_an_average_is_quantised_on_the_way(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "a.safetensors")
    save_file({name: tensor * 3 for name, tensor in weights().items()}, tmp_path / "b.safetensors")
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    average_checkpoints(paths, tmp_path / "mean.safetensors")
    convert(tmp_path / "mean.safetensors", tmp_path / "two_steps.safetensors", quantize="fp8")
    average_checkpoints(paths, tmp_path / "one_step.safetensors", quantize="fp8")
    one, two = load_file(tmp_path / "one_step.safetensors"), load_file(tmp_path / "two_steps.safetensors")
    assert all(torch.equal(one[name].view(torch.uint8), two[name].view(torch.uint8)) for name in two)


def test_the_config_of_a_folder_says_it(tmp_path: Path) -> None:
    like = tmp_path / "like"
    like.mkdir()
    save_file(weights(), like / "model.safetensors", metadata={"format": "pt"})
    (like / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": False}))
    convert(like, tmp_path / "out", to="hf", quantize="fp8")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {
        "model_type": "llama",
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"],
        },
    }
    assert json.loads((like / "config.json").read_text()) == {"model_type": "llama", "tie_word_embeddings": False}


def test_stacked_experts_stay_numbers_and_the_config_says_so(tmp_path: Path) -> None:
    """They are no linear layers, but transformers would replace a module of that name by one for codes."""
    like = tmp_path / "like"
    like.mkdir()
    experts = {f"model.layers.0.mlp.experts.{name}": torch.randn(2, 4, 6) for name in ("gate_up_proj", "down_proj")}
    codes = {"model.layers.1.mlp.experts.down_proj": torch.ones(2, 4, 6).to(torch.float8_e4m3fn)}
    scales = {"model.layers.1.mlp.experts.down_proj_scale_inv": torch.full((2, 1, 1), 0.5)}
    save_file({**weights(), **experts, **codes, **scales}, like / "model.safetensors")
    (like / "config.json").write_text("{}")
    convert(like, tmp_path / "out", to="hf", quantize="fp8")
    kept = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert {"model.layers.0.mlp.experts", "model.layers.1.mlp.experts"} <= {*kept}
    found = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(found["model.layers.1.mlp.experts.down_proj"], torch.full((2, 4, 6), 0.5))
    assert all(torch.equal(found[name], value) for name, value in experts.items())


def test_zeros_infinities_and_nans(tmp_path: Path) -> None:
    weight = torch.zeros(3, 300)
    weight[0, 130], weight[1, 131], weight[2, 132], weight[0, 260] = math.inf, 2.0, math.nan, 1e-45
    save_file({"fc.weight": weight}, tmp_path / "model.safetensors")
    report = convert(tmp_path / "model.safetensors", tmp_path / "out.safetensors", quantize="fp8")
    found = load_file(tmp_path / "out.safetensors")
    assert found["fc.weight_scale_inv"].tolist() == [[1.0, pytest.approx(2 / 448), 1.0]]
    codes = found["fc.weight"].float()
    assert codes[0, 130] == 448
    assert codes[1, 131] == 448
    assert codes[2, 132].isnan()
    assert codes.nan_to_num().count_nonzero() == 2
    assert report.overflowed == {"fc.weight": 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["fp8_tensor", "fp8_channel"])
def test_a_scale_for_each_tensor_or_row(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    given = weights(dtype)
    save_file(given, tmp_path / "model.safetensors")
    convert(tmp_path / "model.safetensors", tmp_path / "out.safetensors", quantize=kind, verify_output=True)
    found = load_file(tmp_path / "out.safetensors")
    assert {*found} == {*given} | {f"{name}_scale" for name in LINEAR}
    for name in LINEAR:
        scales, weight = found[f"{name}_scale"], given[name].float()
        assert scales.dtype == dtype  # to which transformers rounds them
        largest = weight.abs().amax(1, keepdim=True) if kind == "fp8_channel" else weight.abs().max()[None]
        assert scales.shape == largest.shape
        # The next number above the exact scale, if that is not one itself: no code is too large.
        below = torch.nextafter(scales, torch.zeros_like(scales)).float()
        assert ((below < largest / 448) & (scales.float() >= (largest / 448).to(torch.float32))).all()
        codes = (weight / scales.float()).to(torch.float8_e4m3fn)
        assert torch.equal(found[name].view(torch.uint8), codes.view(torch.uint8))
        assert codes.float().abs().max() == 448
    assert all(torch.equal(found[name], tensor) for name, tensor in given.items() if name not in LINEAR)


@pytest.mark.parametrize("kind", ["fp8", "fp8_tensor", "fp8_channel"])
def test_weights_are_restored(kind: str, tmp_path: Path) -> None:
    """Each is the product of code and scale, rounded once, whatever the form of the target."""
    like = tmp_path / "like"
    like.mkdir()
    save_file(weights(), like / "model.safetensors", metadata={"format": "pt"})
    (like / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": False}))
    convert(like, tmp_path / "codes", to="hf", quantize=kind)
    found = load_file(tmp_path / "codes/model.safetensors")
    # The scale of an input is of no use to who has numbers.
    save_file(found | {"model.layers.0.mlp.gate_proj.input_scale": torch.ones(())}, tmp_path / "static.safetensors")
    convert(tmp_path / "codes", tmp_path / "bf16", to="hf", quantize="none", dtype="bf16", verify_output=True)
    convert(tmp_path / "static.safetensors", tmp_path / "dcp", to="dcp", ranks=3, quantize="none")
    convert(tmp_path / "dcp", tmp_path / "float32.safetensors")
    assert json.loads((tmp_path / "bf16/config.json").read_text()) == json.loads((like / "config.json").read_text())
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.json").write_text((tmp_path / "codes/config.json").read_text())
    report = convert(like, tmp_path / "wrong", to="hf", like=tmp_path / "config", dry_run=True)
    assert report.notes[-1].startswith("config.json has a quantization_config, and no weight is quantised: remove it")
    assert convert(tmp_path / "codes", tmp_path / "again", to="hf", dry_run=True).notes == ()
    halves, whole = load_file(tmp_path / "bf16/model.safetensors"), load_file(tmp_path / "float32.safetensors")
    assert {*halves} == {*whole} == {*weights()}
    for name in LINEAR:
        for dtype, result in ((torch.float32, whole[name]), (torch.float64, halves[name])):
            scale = found.get(f"{name}_scale")
            exact = restored(found, name, dtype) if scale is None else found[name].to(dtype) * scale.to(dtype)
            assert torch.equal(result, exact.to(result.dtype))
        assert (whole[name] - weights()[name].float()).abs().max() < 0.05 * weights()[name].abs().max()


KINDS = ["fp8", "fp8_tensor", "fp8_channel"]


@pytest.mark.sample(
    "fp8-fp8_channel-bf16",
    "fp8_channel-fp8_tensor-None",
    "fp8_tensor-fp8-bf16",
    "fp8-fp8-None",
    "fp8_tensor-fp8_tensor-bf16",
    "fp8_channel-fp8_channel-None",
)
@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", KINDS)
def test_codes_become_codes_of_another_kind(given: str, kind: str, dtype: str | None, tmp_path: Path) -> None:
    """In one step, byte for byte as in two, and as torch computes it."""
    like = tmp_path / "like"
    like.mkdir()
    save_file(weights(), like / "model.safetensors", metadata={"format": "pt"})
    (like / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": False}))
    convert(like, tmp_path / "codes", to="hf", quantize=given)
    convert(tmp_path / "codes", tmp_path / "dcp", to="dcp", ranks=3)
    convert(tmp_path / "codes", tmp_path / "numbers", to="hf", quantize="none", dtype=dtype)
    convert(tmp_path / "numbers", tmp_path / "two", to="hf", quantize=kind)
    settings = {"to": "hf", "quantize": kind, "dtype": dtype, "verify_output": True}
    report = convert(tmp_path / "codes", tmp_path / "one", **settings)
    assert report.notes[0] == "2 weights were codes of 8 bits, and are restored"
    convert(tmp_path / "dcp", tmp_path / "sharded", like=tmp_path / "codes", jobs=2, **settings)
    for name in ("model.safetensors", "config.json"):
        expected = (tmp_path / "two" / name).read_bytes()
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "sharded" / name).read_bytes() == expected
    codes, found = load_file(tmp_path / "codes/model.safetensors"), load_file(tmp_path / "one/model.safetensors")
    for name in LINEAR:
        exact = restored(codes, name) if given == "fp8" else codes[name].double() * codes[f"{name}_scale"].double()
        numbers = exact.to(torch.bfloat16 if dtype else torch.float32)
        scales = found.get(f"{name}_scale")
        expected, divisors = reference(numbers) if scales is None else (numbers.float() / scales.float(), scales)
        assert torch.equal(found[name].view(torch.uint8), expected.to(torch.float8_e4m3fn).view(torch.uint8))
        assert torch.equal(found[f"{name}_scale_inv"] if scales is None else scales, divisors)
        assert scales is None or scales.dtype == numbers.dtype


@pytest.mark.parametrize("kind", KINDS)
def test_an_element_that_is_too_large_counts_once(kind: str, tmp_path: Path) -> None:
    weight = torch.ones(4, 300)
    weight[1, 2], weight[3, 299] = 1e6, -1e9
    save_file({"fc.weight": weight, "out.weight": weight * 2}, tmp_path / "model.safetensors")
    report = convert(tmp_path / "model.safetensors", tmp_path / "out.safetensors", quantize=kind, dtype="fp16")
    assert report.overflowed == {"fc.weight": 2, "out.weight": 2}


@pytest.mark.parametrize("wrapped", ["ordered", "app", "bare"])
@pytest.mark.parametrize("kind", ["none", "fp8_channel"])
def test_what_lies_beside_codes_is_not_lost(kind: str, wrapped: str, tmp_path: Path) -> None:
    state = torch.nn.Sequential(torch.nn.Linear(256, 2)).state_dict()
    state["0.weight"], state["0.weight_scale_inv"] = state["0.weight"].to(torch.float8_e4m3fn), torch.ones(1, 2)
    state["0.input_scale"] = torch.ones(())
    beside = {"optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": []}, "meta": {"epoch": 3}}
    source = {"state_dict": state, **beside}
    contents = {"ordered": source, "app": {"app": source}, "bare": {**state, **beside}}
    torch.save(contents[wrapped], tmp_path / "source.pth")
    if kind == "none":
        convert(tmp_path / "source.pth", tmp_path / "all.pth", keep="all", quantize=kind)
        found = torch.load(tmp_path / "all.pth", weights_only=True)
        part = found["app"] if wrapped == "app" else found
        restored_state = part if wrapped == "bare" else part["state_dict"]
        assert torch.equal(restored_state["0.weight"], state["0.weight"].float())
        assert not {"0.weight_scale_inv", "0.input_scale"} & {*restored_state}
        assert torch.equal(part["optimizer"]["state"][0]["exp_avg"], torch.ones(3))
        assert part["meta"] == {"epoch": 3}
        assert wrapped == "bare" or restored_state._metadata == state._metadata
        report = convert(tmp_path / "source.pth", tmp_path / "model.pth", quantize=kind)
        assert torch.load(tmp_path / "model.pth", weights_only=True)["meta"] == {"epoch": 3}
    else:
        report = convert(tmp_path / "source.pth", tmp_path / "out.safetensors", quantize=kind, exclude=["*.bias"])
    assert ("app/" if wrapped == "app" else "") + "optimizer" in report.dropped


class TestErrors:
    def refused(self, folder: Path, state: dict[str, torch.Tensor], message: str, **settings: object) -> None:
        save_file(state, folder / "model.safetensors")
        with pytest.raises(ConfigError, match=message):
            convert(folder / "model.safetensors", folder / "out", **{"to": "safetensors", "quantize": "fp8"} | settings)
        assert not (folder / "out").exists()

    def test_twice(self, tmp_path: Path) -> None:
        scaled = {"fc.weight": torch.ones(2, 2), "fc.weight_scale_inv": torch.ones(1, 1)}
        self.refused(tmp_path, scaled, "'fc.weight' is quantised already")
        self.refused(
            tmp_path, {"fc.weight": torch.ones(2, 2).to(torch.float8_e5m2)}, "'fc.weight' is quantised already"
        )

    def test_nothing_to_do(self, tmp_path: Path) -> None:
        self.refused(tmp_path, {"embed.weight": torch.ones(2, 2)}, "finds no weight of a linear layer")

    def test_other_formats(self, tmp_path: Path) -> None:
        message = (
            "'quantize' applies only to the format 'safetensors', 'safetensors_index' or 'huggingface', not to 'dcp'"
        )
        self.refused(tmp_path, weights(), message, to="dcp")

    def test_unknown(self, tmp_path: Path) -> None:
        self.refused(tmp_path, weights(), "should be one of 'fp8', 'fp8_channel', .*got 'int4'", quantize="int4")

    def test_nothing_to_restore(self, tmp_path: Path) -> None:
        self.refused(tmp_path, weights(), "holds nothing that is quantised: no float8", quantize="none")

    def test_scales_that_do_not_fit(self, tmp_path: Path) -> None:
        wrong = {"fc.weight": torch.ones(4, 6).to(torch.float8_e4m3fn), "fc.weight_scale": torch.ones(3, 1)}
        message = r"'fc.weight' of shape \[4, 6\] has float32 scales of shape \[3, 1\]. Expected one"
        self.refused(tmp_path, wrong, message, quantize="none")
