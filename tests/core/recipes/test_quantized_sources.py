"""A recipe, an average and a merge of quantised weights give in one step what they give of the restored ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmfsdp.checkpoint import average_checkpoints, convert, diff, merge_lora
from mmfsdp.errors import ConfigError

pytest.importorskip("numpy")

HIDDEN, INNER, HEADS, EXPERTS = 256, 192, {"heads": 4, "kv_heads": 2}, 3


def llama(seed: int, *, experts: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    places = [f"mlp.experts.{e}" for e in range(EXPERTS)] if experts else ["mlp"]
    shapes = {"model.embed_tokens.weight": (32, HIDDEN), "model.norm.weight": (HIDDEN,), "lm_head.weight": (32, HIDDEN)}
    layer = "model.layers.0"
    shapes |= {f"{layer}.self_attn.{part}_proj.weight": (HIDDEN, HIDDEN) for part in "qo"}
    shapes |= {f"{layer}.self_attn.{part}_proj.weight": (HIDDEN // 2, HIDDEN) for part in "kv"}
    shapes |= {f"{layer}.{place}.{part}_proj.weight": (INNER, HIDDEN) for place in places for part in ("gate", "up")}
    shapes |= {f"{layer}.{place}.down_proj.weight": (HIDDEN, INNER) for place in places}
    shapes |= {f"{layer}.{norm}_layernorm.weight": (HIDDEN,) for norm in ("input", "post_attention")}
    return {name: (torch.randn(shape, generator=generator) / 20).bfloat16() for name, shape in shapes.items()}


def codes(path: Path, kind: str, seed: int = 0, *, experts: bool = False) -> Path:
    save_file(llama(seed, experts=experts), path.with_suffix(".tmp"))
    convert(path.with_suffix(".tmp"), path, source_format="safetensors", quantize=kind)
    return path


def same(one: Path, two: Path) -> bool:
    a, b = load_file(one), load_file(two)
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("kind", "recipe", "inverse"),
    [
        ("fp8", "meta-llama-to-hf", True),
        ("fp8_tensor", "hf-llama-to-fused", False),
        ("fp8_channel", "megatron-llama-to-hf", True),
        ("fp8", "hf-qwen-moe-to-stacked", False),
    ],
)
def test_recipes_take_restored_weights(kind: str, recipe: str, inverse: bool, tmp_path: Path) -> None:
    source = codes(tmp_path / "codes.safetensors", kind, experts="moe" in recipe)
    values = {} if "moe" in recipe else HEADS | ({"vocab": 32} if "megatron" in recipe else {})
    rewrite = {"recipe": recipe, "inverse": inverse, "recipe_values": values or None}
    if kind == "fp8_tensor":  # the rule sees the scales as well
        refused = r"q_proj.weight_scale', .* have 1, 1, 1 elements"
    else:
        refused = r"codes in units of .*, and a recipe rearranges numbers. Add quantize='none'"
    with pytest.raises(ConfigError, match=refused):
        convert(source, tmp_path / "refused.safetensors", **rewrite)
    convert(source, tmp_path / "numbers.safetensors", quantize="none", dtype="bf16")
    convert(tmp_path / "numbers.safetensors", tmp_path / "two.safetensors", **rewrite)
    settings = {**rewrite, "quantize": "none", "dtype": "bf16"}
    convert(source, tmp_path / "one.safetensors", **settings)
    assert same(tmp_path / "one.safetensors", tmp_path / "two.safetensors")
    if "megatron" in recipe:
        convert(source, tmp_path / "dcp", to="dcp", ranks=3, **settings)
        convert(tmp_path / "dcp", tmp_path / "sharded.safetensors")
        assert same(tmp_path / "sharded.safetensors", tmp_path / "two.safetensors")


def test_recipes_come_before_quantising(tmp_path: Path) -> None:
    save_file(llama(0), tmp_path / "a.safetensors")
    rewrite = {"recipe": "meta-llama-to-hf", "inverse": True, "recipe_values": HEADS}
    convert(tmp_path / "a.safetensors", tmp_path / "meta.safetensors", **rewrite)
    convert(tmp_path / "meta.safetensors", tmp_path / "two.safetensors", quantize="fp8")
    convert(tmp_path / "a.safetensors", tmp_path / "one.safetensors", **rewrite, quantize="fp8")
    one, two = load_file(tmp_path / "one.safetensors"), load_file(tmp_path / "two.safetensors")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name].view(torch.uint8), two[name].view(torch.uint8)) for name in one)


def test_averages_and_merges_take_restored_weights(tmp_path: Path) -> None:
    sources = [codes(tmp_path / f"{seed}.safetensors", "fp8", seed) for seed in range(2)]
    numbers = [tmp_path / f"numbers{seed}.safetensors" for seed in range(2)]
    for source, restored in zip(sources, numbers, strict=True):
        convert(source, restored, quantize="none")
    module = "model.layers.0.self_attn.q_proj"
    (adapter := tmp_path / "adapter").mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    factors = {f"base_model.model.{module}.lora_{x}.weight": torch.randn(2, HIDDEN) for x in "AB"}
    factors = {name: value.t().contiguous() if "lora_B" in name else value for name, value in factors.items()}
    save_file(factors, adapter / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"float8_e4m3fn in units of .*cannot be averaged. Add quantize='none'"):
        average_checkpoints(sources, tmp_path / "out.safetensors")
    with pytest.raises(ConfigError, match=rf"'{module}.weight' of the base is float8.*Add quantize='none'"):
        merge_lora(sources[0], adapter, tmp_path / "out.safetensors")
    average_checkpoints(numbers, tmp_path / "average2.safetensors", dtype="bf16")
    merge_lora(numbers[0], adapter, tmp_path / "merged2.safetensors", dtype="bf16")
    settings = {"quantize": "none", "dtype": "bf16"}
    average_checkpoints([sources[0], numbers[1]], tmp_path / "average1.safetensors", **settings)
    merge_lora(sources[0], adapter, tmp_path / "merged1.safetensors", **settings)
    # New codes are made of restored weights.
    average_checkpoints(numbers, tmp_path / "codes2.safetensors", quantize="fp8_channel")
    average_checkpoints(sources, tmp_path / "codes1.safetensors", quantize="fp8_channel")
    merge_lora(numbers[0], adapter, tmp_path / "coded2.safetensors", quantize="fp8")
    merge_lora(sources[0], adapter, tmp_path / "coded1.safetensors", quantize="fp8")
    for result in ("average", "merged", "codes", "coded"):
        assert same(tmp_path / f"{result}1.safetensors", tmp_path / f"{result}2.safetensors")
    # A difference of codes is that of the numbers: less than a sixteenth of them, and none to what was restored.
    given = sources[0].with_suffix(".tmp")
    convert(given, tmp_path / "given.pth", source_format="safetensors")
    report = diff(sources[0], tmp_path / "given.pth")
    assert report.quantized
    assert len(report.only_in_a) == len(report.dtypes) == 7
    assert diff(sources[0], tmp_path / "given.pth", dequantize=True, rtol=0.07, atol=1e-4).same
    assert len(diff(sources[0], tmp_path / "given.pth", dequantize=True, rtol=0.02, atol=1e-4).values) == 7
    assert diff(numbers[0], sources[0], dequantize=True).same
    with pytest.raises(ConfigError, match="holds nothing that is quantised"):
        average_checkpoints(numbers, tmp_path / "out.safetensors", quantize="none")
