"""A LoRA adapter trained on ranks, on a base that none of them holds whole, is the one that peft trains alone."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import mmfsdp
from mmfsdp.checkpoint import convert, merge_lora
from mmfsdp.testing import run_ranks

transformers.utils.logging.disable_progress_bar()
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft calls it

LLAMA = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, use_cache=False
)
ADAPTER = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
NAMES = {
    "{m:.*}.{x:[qv]_proj}.{y}": "base_model.model.{m}.{x}.base_layer.{y}",
    "{m:.*}": "base_model.model.{m}",
}
BLOCKS = {"kind": "module_class", "classes": "LlamaDecoderLayer"}
TOKENS = torch.arange(64).reshape(4, 16) * 7 % 64


def train(model: nn.Module, tokens: torch.Tensor, clip: Any) -> list[float]:
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def on_rank(rank: int, config: dict[str, Any], folder: str, dtype: torch.dtype) -> list[float]:
    with mmfsdp.parameters_on_meta():
        model = get_peft_model(AutoModelForCausalLM.from_config(LLAMA, dtype=dtype), ADAPTER)
    factors = {module for name, module in model.named_modules() if ".lora_" in name}

    def initialise(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            nn.init.normal_(param) if module in factors else nn.init.zeros_(param)

    model = mmfsdp.shard(model, config, param_init_fn=initialise)
    with warnings.catch_warnings(action="ignore"):  # the first rank's, of what is missing
        report = mmfsdp.load_pretrained(model, f"{folder}/base", f"{folder}/names.json")
    assert not report.unexpected
    assert all(".lora_" in name for name in report.missing)
    mmfsdp.save_checkpoint(f"{folder}/before", model)
    losses = train(model, TOKENS[rank::2], lambda model: mmfsdp.clip_grad_norm_(model, 0.1))
    mmfsdp.save_checkpoint(f"{folder}/after", model)
    return losses


@pytest.mark.sample("sharded-torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", [{}, {"sharding": "NO_SHARD"}], ids=["sharded", "replicated"])
def test_it_is_what_peft_trains_alone(config: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LLAMA, dtype=dtype).save_pretrained(tmp_path / "base")
    (tmp_path / "names.json").write_text(json.dumps({"rules": [{"rename": NAMES}]}))
    ranks = run_ranks(on_rank, 2, {"wrap": BLOCKS, **config}, str(tmp_path), dtype)

    for step in ("before", "after"):
        folder = tmp_path / f"adapter_{step}"
        ADAPTER.save_pretrained(folder)
        convert(tmp_path / step, folder / "adapter_model.safetensors", recipe="peft-to-adapter")

    def loaded(adapter: str) -> Any:
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        return PeftModel.from_pretrained(base, tmp_path / adapter, is_trainable=True)

    exact = dtype == torch.float32
    alone, tolerance = loaded("adapter_before"), {"rtol": 1e-5, "atol": 1e-6} if exact else {"rtol": 0.05, "atol": 0.02}
    losses = train(alone, TOKENS, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    torch.testing.assert_close(torch.tensor(ranks).mean(0), torch.tensor(losses), **tolerance)
    trained = loaded("adapter_after")
    if exact:
        expected = dict(alone.named_parameters())
        for name, param in trained.named_parameters():
            torch.testing.assert_close(param, expected[name], **tolerance)

    merge_lora(tmp_path / "base", tmp_path / "adapter_after", tmp_path / "merged", to="hf")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(TOKENS).logits, trained(TOKENS).logits, **tolerance)
