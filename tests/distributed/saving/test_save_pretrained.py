"""``save_pretrained()`` of a sharded model says what to call, and works with a whole state dict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig

import mmfsdp
from mmfsdp.errors import UnsupportedCallError
from mmfsdp.testing import run_ranks

SMALL = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=2, vocab_size=64, pad_token_id=0
)


def build() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(SMALL)


def save(rank: int, engine: str, folder: str) -> None:
    transformers.utils.logging.disable_progress_bar()
    model = mmfsdp.shard(build(), engine=engine, wrap="LlamaDecoderLayer")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedCallError) as caught:
        model.save_pretrained(f"{folder}/shards")
    assert "mmfsdp.save_checkpoint(path, model, kind='hf', like=FOLDER) on every rank" in str(caught.value)
    assert not Path(folder, "shards").exists()
    whole = mmfsdp.model_state_dict(model)
    if rank == 0:
        model.save_pretrained(f"{folder}/whole", state_dict=whole)
    mmfsdp.save_checkpoint(f"{folder}/exported", model, kind="hf", like=f"{folder}/like")


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "replicate"])
def test_what_to_call_instead(engine: str, tmp_path: Path) -> None:
    build().save_pretrained(tmp_path / "like")
    run_ranks(save, 2, engine, str(tmp_path))
    expected = build().state_dict()
    for folder in ("whole", "exported"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / folder).state_dict()
        torch.testing.assert_close(loaded, expected, rtol=0, atol=0)


def test_models_that_are_not_sharded_save() -> None:
    assert "save_pretrained" not in vars(build())
