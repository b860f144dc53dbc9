"""The vocabulary of older configs, with both engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.models.comparing import check_equal, check_resumes, note, run, strategy
from tests.models.training import Outcome

CONFIGS: dict[str, dict[str, Any]] = {
    "deit": {
        "sharding_strategy": "FULL_SHARD",
        "auto_wrap_policy": {
            "type": "torch.distributed.fsdp.wrap.transformer_auto_wrap_policy",
            "transformer_layer_cls": {"DeiTLayer"},
        },
        "backward_prefetch": "pre",
        "use_orig_params": True,
    },
    "segformer": {
        "sharding_strategy": "SHARD_GRAD_OP",
        "auto_wrap_policy": {"type": "size_based_auto_wrap_policy", "min_num_params": 500},
        "backward_prefetch": "BACKWARD_POST",
        "limit_all_gathers": True,
    },
    "gpt2": {
        "sharding_strategy": "FULL_SHARD",
        "auto_wrap_policy": {
            "type": "torch.distributed.fsdp.wrap.ModuleWrapPolicy",
            "module_classes": ["transformers.models.gpt2.modeling_gpt2.GPT2Block"],
        },
        "sync_module_states": True,
    },
}


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize("family", CONFIGS)
def test_old_arguments(tmp_path: Path, alone: Callable[..., Outcome], family: str, engine: str) -> None:
    settings = strategy("full", engine=engine, **CONFIGS[family])
    whole = run(tmp_path / "whole", family, settings)
    note(f"{family} old, {engine}", whole, alone(family))
    check_equal(whole, alone(family))
    check_resumes(tmp_path, family, settings, whole)


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_mixed_precision(tmp_path: Path, alone: Callable[..., Outcome], engine: str) -> None:
    policy = {"type": "ModuleWrapPolicy", "module_classes": ["LlamaDecoderLayer"]}
    precision = {"param_dtype": "torch.bfloat16", "reduce_dtype": "float32", "buffer_dtype": "float32"}
    settings = strategy("local", engine=engine, auto_wrap_policy=policy, mixed_precision=precision)
    whole = run(tmp_path / "whole", "llama", settings)
    expected = alone("llama")
    note(f"llama bf16, {engine}", whole, expected)
    assert whole.losses != expected.losses
    assert whole.groups == expected.groups
    assert whole.losses == pytest.approx(expected.losses, rel=1e-2)
    assert whole.norms == pytest.approx(expected.norms, rel=5e-2)
    check_resumes(tmp_path, "llama", settings, whole)
