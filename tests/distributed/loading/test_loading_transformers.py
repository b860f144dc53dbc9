"""Files of transformers 5 fill its models, whose names and shapes in memory differ: from_pretrained is the truth."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

import mmfsdp
from mmfsdp.checkpoint import convert, merge_lora
from mmfsdp.errors import ConfigError
from mmfsdp.testing import run_ranks

TEXT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 40,
    "tie_word_embeddings": False,
}
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
MODELS = {
    "mixtral": ("MixtralForCausalLM", {**TEXT, "num_local_experts": 11}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {**TEXT, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    ),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": {**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
            "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 14},
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                "head_dim": 8,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 12,
                "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
            },
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_heads": 2,
                "patch_size": 14,
                "out_hidden_size": 16,
                "deepstack_visual_indexes": [0],
            },
            "tie_word_embeddings": False,
        },
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**VISION, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 14},
            "image_token_index": 39,
            "tie_word_embeddings": False,
        },
    ),
}


KINDS: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "fsdp1": {"engine": "fsdp1"},
    "replicate": {"sharding": "NO_SHARD"},
}


FILLED = ("mixtral", "qwen3_moe", "qwen2_vl", "llava")


def built(name: str) -> Any:
    model_class = getattr(transformers, MODELS[name][0])
    return model_class(model_class.config_class(**MODELS[name][1]))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.arange(5)[None]).logits
    return found


def fill(rank: int, folder: str) -> dict[str, tuple[torch.Tensor, bool]]:
    found = {}
    for name in FILLED:
        for kind in KINDS if name == "mixtral" else ["fsdp2"]:
            torch.manual_seed(1)
            model = mmfsdp.shard(built(name), {**KINDS[kind], "wrap": {"kind": "size", "min_num_params": 1000}})
            clean = mmfsdp.load_pretrained(model, f"{folder}/{name}").clean
            found[f"{name} {kind}"] = (logits(model), clean)
            out = f"{folder}/{name}_of_{kind}"
            mmfsdp.save_checkpoint(f"{out}_dcp", model, kind="sharded")
            mmfsdp.save_checkpoint(f"{out}_hf", model, kind="hf", like=f"{folder}/{name}")
            save = mmfsdp.save_checkpoint(f"{out}_config", model, kind="hf", like=f"{folder}/{name}_c", blocking=False)
            save.result()
    return found


def test_models_are_filled_and_written_as_transformers_does(tmp_path: Path) -> None:
    truth = {}
    for name in FILLED:
        model_class = MODELS[name][0]
        torch.manual_seed(0)
        built(name).save_pretrained(tmp_path / name)
        truth[name] = logits(getattr(transformers, model_class).from_pretrained(tmp_path / name))
        (tmp_path / f"{name}_c").mkdir()
        shutil.copy(tmp_path / name / "config.json", tmp_path / f"{name}_c")
    for found in run_ranks(fill, 2, str(tmp_path)):
        for case, (computed, clean) in found.items():
            torch.testing.assert_close(computed, truth[case.split()[0]], msg=case)
            assert clean, case
    for case in found:
        name, sharding = case.split()
        out = f"{tmp_path}/{name}_of_{sharding}"
        report = convert(f"{out}_dcp", f"{out}_like", to="hf", like=tmp_path / name)
        assert any("names and shapes of files" in note for note in report.notes)
        convert(f"{out}_dcp", f"{out}_in_memory", to="hf", like=f"{tmp_path}/{name}_c")
        written = load_file(tmp_path / name / "model.safetensors")
        for kind in ("hf", "config", "like", "in_memory"):
            computed = logits(getattr(transformers, MODELS[name][0]).from_pretrained(f"{out}_{kind}"))
            torch.testing.assert_close(computed, truth[name], msg=f"{case} {kind}")
            again = load_file(f"{out}_{kind}/model.safetensors")
            assert kind == "in_memory" or {*again} == {*written}, (case, kind)


def fill_from_transposed(rank: int, folder: str) -> tuple[dict[str, torch.Tensor], str]:
    model = mmfsdp.shard(built("qwen3_vl_moe"), {"wrap": {"kind": "size", "min_num_params": 1000}})
    assert mmfsdp.load_pretrained(model, folder).clean
    with pytest.raises(ConfigError) as raised:
        mmfsdp.save_checkpoint(f"{folder}_again", model, kind="hf", like=folder)
    return mmfsdp.model_state_dict(model, rank0_only=False), str(raised.value)


def test_experts_that_files_hold_transposed(tmp_path: Path) -> None:
    """As Qwen3-VL-MoE is published; they are not written so."""
    torch.manual_seed(0)
    folder = tmp_path / "hub"
    built("qwen3_vl_moe").save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    turned = {name: value.mT.contiguous() if ".experts." in name else value for name, value in weights.items()}
    save_file(turned, folder / "model.safetensors")
    want = transformers.Qwen3VLMoeForConditionalGeneration.from_pretrained(folder).state_dict()
    for found, said in run_ranks(fill_from_transposed, 2, str(folder)):
        assert all(torch.equal(found[name], value) for name, value in want.items())
        assert "give a folder without weights as 'like'" in said


RECIPES = {
    "mixtral": "hf-mixtral-to-stacked",
    "qwen2_vl": "hf-qwen-vl-to-memory",
    "qwen3_moe": "hf-qwen-moe-to-stacked",
    "llava": "hf-llava-to-memory",
}


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipes_do_what_transformers_does(name: str, tmp_path: Path) -> None:
    built(name).save_pretrained(tmp_path / "hub")
    file = tmp_path / "hub/model.safetensors"
    if name == "llava":  # as it is published
        weights = load_file(file)
        save_file({each.replace("tower.", "tower.vision_model."): weights[each] for each in weights}, file)
    want = getattr(transformers, MODELS[name][0]).from_pretrained(tmp_path / "hub").state_dict()
    convert(file, tmp_path / "made.safetensors", recipe=RECIPES[name])
    made = load_file(tmp_path / "made.safetensors")
    assert {*made} == {*want}
    assert all(torch.equal(made[each], want[each]) for each in want)


ADAPTED = {"qwen2_vl": ["q_proj", "v_proj", "proj"], "llava": ["q_proj", "fc1"], "mixtral": ["o_proj"]}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_are_merged_by_the_names_that_models_have_in_memory(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model_class = getattr(transformers, MODELS[name][0])
    built(name).save_pretrained(tmp_path / "base")
    saved = ["lm_head"] if name == "llava" else None
    config = LoraConfig(r=4, target_modules=ADAPTED[name], init_lora_weights=False, modules_to_save=saved)
    adapted: Any = get_peft_model(model_class.from_pretrained(tmp_path / "base"), config)
    if saved is not None:
        with torch.no_grad():
            adapted.get_output_embeddings().weight.normal_()
    adapted.save_pretrained(tmp_path / "adapter")
    report = merge_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", to="hf")
    merged = model_class.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(adapted.merge_and_unload()))
    names = [{*load_file(tmp_path / folder / "model.safetensors")} for folder in ("base", "merged")]
    assert names[0] == names[1]
    assert any("; transformers says what" in note for note in report.notes) == (name != "mixtral")
