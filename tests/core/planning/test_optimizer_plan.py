"""Which optimizer a plan chooses for each parameter, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import mmfsdp
from mmfsdp.errors import ConfigError, PlanError, PolicyError
from mmfsdp.planning import ShardPlan


def chosen(model: nn.Module, **settings: Any) -> dict[str, tuple[str, int, bool]]:
    """Return optimizer, parts and whether it is a stack by FQN."""
    plan = mmfsdp.plan(model, {"optimizer": settings}, 4)
    assert plan.optimizer is not None
    found = {
        fqn: (group.optimizer, group.settings.get("parts", 0), group.settings.get("is_stack", False))
        for group in plan.optimizer.groups
        for fqn in group.fqns
    }
    assert found.keys() == {name for name, param in model.named_parameters() if param.requires_grad}
    assert sum(len(group.fqns) for group in plan.optimizer.groups) == len(found)
    return found


MUON, ADAMW = ("muon", 1, False), ("adamw", 0, False)
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.zeros(1, 9, 8))
        self.patch = nn.Conv2d(3, 8, 4)
        self.depthwise, self.up = nn.Conv2d(8, 8, 3, groups=8), nn.ConvTranspose2d(8, 8, 2)
        self.attn, self.norm = nn.MultiheadAttention(8, 2), nn.LayerNorm(8)
        self.bias_table = nn.Parameter(torch.zeros(9, 2))
        self.blocks = nn.ModuleList([nn.ModuleDict({"fc": nn.Linear(8, 8), "gate": nn.Linear(8, 4)})])
        self.head = nn.Linear(8, 10)


def test_auto_takes_matrices_of_hidden_layers() -> None:
    found = chosen(Vision())
    muon = {name: how for name, how in found.items() if how[0] == "muon"}
    assert muon == {
        "patch.weight": MUON,
        "attn.in_proj_weight": ("muon", 3, False),
        "attn.out_proj.weight": MUON,
        "blocks.0.fc.weight": MUON,
    }


def test_a_language_model() -> None:
    config = LlamaConfig(vocab_size=32, num_hidden_layers=2, tie_word_embeddings=True, **SIZES)
    for name, how in chosen(LlamaForCausalLM(config)).items():
        assert how == (MUON if "proj" in name else ADAMW), name


def test_experts_are_stacks_and_routers_are_not() -> None:
    config = MixtralConfig(vocab_size=32, num_hidden_layers=1, num_local_experts=2, **SIZES)
    found = chosen(MixtralForCausalLM(config))
    stacks = {name for name, how in found.items() if how == ("muon", 1, True)}
    assert stacks == {name for name in found if "experts" in name}
    assert stacks
    assert found["lm_head.weight"] == ADAMW
    assert all(how == ADAMW for name, how in found.items() if name.endswith("gate.weight"))


def test_patterns_and_exceptions() -> None:
    found = chosen(Vision(), muon=["blocks.**.weight", "head.weight"], exclude="**.gate.*", fused={"head.weight": 2})
    assert {name: how for name, how in found.items() if how[0] == "muon"} == {
        "blocks.0.fc.weight": MUON,
        "head.weight": ("muon", 2, False),
    }
    assert set(chosen(Vision(), muon=None).values()) == {ADAMW}


def test_low_rank_factors_on_request() -> None:
    factors = {"lora_A": nn.Linear(8, 2, bias=False), "lora_B": nn.Linear(2, 8, bias=False)}
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"fc": nn.Linear(8, 8), **factors})])})
    names = {f"blocks.0.{name}.weight" for name in factors}
    assert {name for name, how in chosen(model).items() if how == MUON} == {"blocks.0.fc.weight"}
    assert {name for name, how in chosen(model, muon="**.lora_*.weight").items() if how == MUON} == names


def test_frozen_parameters_have_no_optimizer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    model[1].requires_grad_(True)
    assert chosen(model) == {"1.weight": MUON, "1.bias": ADAMW}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"muon": "emb.weight"}, "optimizer.muon selects 'emb.weight' of shape (8, 4), which is an embedding"),
        ({"muon": "lin.bias"}, "optimizer.muon selects 'lin.bias' of shape (4,), which is no matrix"),
        ({"muon": "lim.weight"}, "Pattern 'lim.weight' matches no trained parameter. Did you mean 'lin.weight'"),
        ({"fused": {"lin.weight": 3}}, "optimizer.fused divides 'lin.weight' of shape (4, 4) into 3 matrices"),
        ({"stacked": "lin.weight"}, "optimizer.stacked names 'lin.weight'"),
        ({"muon": 3}, "ShardConfig.optimizer.muon: expected 'auto', a pattern or a list of patterns, got 3"),
        ({"momentum": 1.0}, "ShardConfig.optimizer.momentum"),
        ({"adamw": {"betas": [0.9, 1.5]}}, "ShardConfig.optimizer.adamw.betas.1"),
    ],
)
def test_mistakes(settings: dict[str, Any], message: str) -> None:
    model = nn.ModuleDict({"emb": nn.Embedding(8, 4), "lin": nn.Linear(4, 4)})
    with pytest.raises((PlanError, PolicyError, ConfigError)) as caught:
        mmfsdp.plan(model, {"optimizer": settings}, 2)
    assert message in str(caught.value)


def test_flat_parameters_have_no_matrices() -> None:
    for settings in ({"engine": "fsdp1"}, {"sharding": {"use_orig_params": False}}):
        with pytest.raises(ConfigError, match="optimizer needs parameters of their own shapes"):
            mmfsdp.plan(nn.Linear(4, 4), {"optimizer": {}, **settings}, 2)


def test_is_part_of_the_plan_as_text_and_json() -> None:
    plan = mmfsdp.plan(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), {"optimizer": {}}, 4)
    assert ShardPlan.from_json(plan.to_json()) == plan
    muon = next(line.split() for line in str(plan).splitlines() if line.startswith("muon"))
    # Newton-Schulz: 5 x 2 x (2 x 64³ + 64³) for each of two matrices; 4 x 8192 x 3 / 16 bytes
    assert muon[1:] == ["2", "8,192", "8.00", "KiB", "2", "6.00", "KiB", f"{2 * 5 * 2 * 3 * 64**3:.2e}"]
    without = mmfsdp.plan(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), {}, 4)
    assert "optimizer:" in without.diff(plan)
