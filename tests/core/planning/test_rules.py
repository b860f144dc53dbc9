"""Rules of the section `parallel` become divisions of a plan, or errors that say what to write instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import mmfsdp
from mmfsdp.config import ShardConfig
from mmfsdp.errors import ConfigError, MmfsdpError, PlanError, PolicyError

MESH = {"shard": 2, "tensor": 2}


class Attention(nn.Module):
    """An attention that finds the number of its heads, as transformers' do."""

    head_dim = 8

    def __init__(self, *, kv: int = 4, fused: str = "") -> None:
        super().__init__()
        self.num_key_value_heads = kv
        if fused:
            self.add_module(fused, nn.Linear(32, 96))
        else:
            self.q_proj, self.k_proj, self.v_proj = nn.Linear(32, 32), nn.Linear(32, 8 * kv), nn.Linear(32, 8 * kv)
        self.o_proj = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads(x)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim)


class Counting(Attention):
    """An attention that reads how many heads all ranks have."""

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, self.num_key_value_heads, self.head_dim)


class Gated(nn.Module):
    """Two matrices in one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(32, 96), nn.Linear(48, 32)


class Tied(nn.Module):
    """An embedding and a head with one weight."""

    def __init__(self, words: int = 50) -> None:
        super().__init__()
        self.embed, self.attn, self.head = nn.Embedding(words, 32), Attention(), nn.Linear(32, words, bias=False)
        self.head.weight = self.embed.weight


class Conv1D(nn.Module):
    """As GPT-2's: its weight is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32, 96))


WHOLE = {"style": "colwise", "output": "replicate"}
RULES = {"attn.[qkv]_proj": "colwise", "attn.o_proj": "rowwise", "embed": "rowwise", "head": WHOLE}


def test_rules_become_divisions_that_a_laptop_plans_for_many_ranks() -> None:
    with torch.device("meta"):
        model = Tied()
    plan = mmfsdp.plan(model, {"parallel": RULES}, {"replicate": 4, "shard": 128, "tensor": 2})
    assert {param.fqn: param.divided for param in plan.all_params()} == {
        "embed.weight": (("tensor", 0),),
        **{f"attn.{part}_proj.{name}": (("tensor", 0),) for part in "qkv" for name in ("weight", "bias")},
        "attn.o_proj.weight": (("tensor", 1),),
        "attn.o_proj.bias": (),
    }
    assert plan.mesh.world_size == 1024
    assert mmfsdp.ShardPlan.from_json(plan.to_json()) == plan
    assert "tensor 1, shard 0" in plan.params_table()
    alone = mmfsdp.plan(model, {"parallel": RULES}, {"shard": 1, "tensor": 1})
    assert alone == mmfsdp.plan(model, mesh=1)
    assert "parallel" not in alone.to_dict()


def test_a_later_rule_wins_and_norms_of_heads_sum_their_gradients() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    rules = {"*": "rowwise", "0": "replicate", "1": {"style": "sequence", "input": "heads"}}
    plan = mmfsdp.plan(model, {"parallel": rules}, MESH)
    assert [(found.fqn, found.style, found.input) for found in plan.parallel] == [
        ("1", "sequence", "heads"),
        ("2", "rowwise", "features"),
    ]
    assert "mean over shard; sum over tensor" in plan.params_table()


def test_auto_takes_the_plan_that_a_model_states_and_divides_what_is_tied_to_its_head() -> None:
    model: Any = nn.ModuleDict({"model": Tied()})
    model["model"]._tp_plan = {"head": "colwise_gather_output", "attn.*_proj": "colwise", "attn.o_proj": "rowwise"}
    plan = mmfsdp.plan(model, {"parallel": "auto"}, MESH)
    entries = {param.fqn: param.divided for param in plan.all_params()}
    assert entries["model.embed.weight"] == (("tensor", 0),)
    assert [note.fqns for note in plan.notes if note.kind == "tied" and "parallel" in note.text] == [("model.embed",)]
    model["model"]._tp_plan |= {"embed": "moe_tp_experts", "gate": "packed_colwise"}
    with pytest.raises(ConfigError, match=r"'moe_tp_experts' for 'embed', which is 'model.embed', .* Write rules"):
        mmfsdp.plan(model, {"parallel": "auto"}, MESH)


@pytest.mark.parametrize(
    ("model", "rules", "mesh", "error", "message"),
    [
        (Tied(), {"*.q_prj": "colwise"}, MESH, PolicyError, "'*.q_prj' matches no module. Did you mean 'attn.q_proj'"),
        (Tied(), RULES, 4, ConfigError, "axis 'tensor', and the mesh, 4 ranks, has none. Give it its ranks"),
        (Tied(), "auto", MESH, ConfigError, "Tied has none. Write rules"),
        (Tied(), {"head": "colwise"}, MESH, PlanError, "'embed.weight' and 'head.weight' are one parameter"),
        (Tied(), {"attn": "colwise"}, MESH, PlanError, "a Attention, and styles divide nn.Linear and nn.Embedding. It"),
        (Tied(), {"head": "replicate"}, MESH, ConfigError, "parallel divides no parameter"),
        (
            Attention(kv=1),
            {"q_proj": "colwise"},
            MESH,
            PlanError,
            "num_key_value_heads=1, which cannot be divided by 2",
        ),
        (Attention(), {"k_proj": "colwise"}, {"tensor": 8}, PlanError, "num_key_value_heads=4, which cannot be"),
        (Attention(), {"o_proj": "rowwise"}, {"tensor": 3}, PlanError, "its in_features, 32, cannot be divided by 3"),
        (Counting(), {"q_proj": "colwise"}, MESH, PlanError, "the forward of Counting reads num_key_value_heads"),
        (Attention(fused="qkv"), {"qkv": "colwise"}, MESH, PlanError, "several matrices in one (96 outputs from 32"),
        (Attention(fused="all"), {"all": "colwise"}, MESH, PlanError, "several matrices in one (96 outputs from 32"),
        (Gated(), {"fc1": "colwise", "fc2": "rowwise"}, MESH, PlanError, "several matrices in one (96 outputs from 32"),
        (
            nn.ModuleDict({"c": Conv1D()}),
            {"c": "colwise"},
            MESH,
            PlanError,
            "it is a Conv1D, whose weight is transposed",
        ),
        (nn.MultiheadAttention(8, 2), {"out_proj": "rowwise"}, MESH, PlanError, "MultiheadAttention reads its weights"),
        (
            nn.Sequential(nn.Linear(8, 9)),
            {"0": "colwise"},
            MESH,
            PlanError,
            "its out_features, 9, cannot be divided by 2",
        ),
        (
            nn.Sequential(nn.Linear(8, 5)),
            {"0": WHOLE},
            {"tensor": 4},
            PlanError,
            "leaves nothing to the last of 4 ranks",
        ),
        (nn.Sequential(nn.Linear(8, 8)), None, MESH, PlanError, "Give parallel='auto' or rules; or divide the model"),
    ],
)
def test_what_rules_cannot_divide_is_named_before_the_first_step(
    model: nn.Module, rules: Any, mesh: Any, error: type[MmfsdpError], message: str
) -> None:
    with pytest.raises(error) as raised:
        mmfsdp.plan(model, {"parallel": rules}, mesh)
    assert message in str(raised.value)


def test_matrices_that_can_be_cut_are_no_error() -> None:
    side_by_side = {"style": "colwise", "head_by_head": True}
    for model, rules in (
        (Attention(fused="qkv"), {"qkv": side_by_side}),
        (Attention(fused="qkv"), {"qkv": WHOLE}),
        (Tied(51), {"embed": "rowwise", "head": WHOLE}),
        (nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)), {"0": "colwise", "1": "rowwise"}),
    ):
        plan = mmfsdp.plan(model, {"parallel": rules}, MESH)
        assert sum(plan.param_bytes(rank) for rank in range(4)) > 4 * sum(param.numel for param in plan.all_params())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("aut", "ShardConfig.parallel: 'aut' is not accepted. Did you mean 'auto'?"),
        ({}, "ShardConfig.parallel: expected 'auto' or a mapping"),
        ({"fc1": "colwse"}, "ShardConfig.parallel.fc1.style: 'colwse' is not accepted. Did you mean 'colwise'"),
        ({"fc1": {"style": "colwise", "inpt": "sequence"}}, "unknown setting 'inpt'. Did you mean 'input'"),
        ({"fc1": {"style": "rowwise", "output": "features"}}, "parallel.fc1: output='features' is no layout of style"),
        (
            {"n": {"style": "sequence", "input": "heads", "output": "sequence"}},
            "keeps the layout of its input, 'heads'",
        ),
        ({"fc1": {"style": "rowwise", "head_by_head": True}}, "head_by_head is said of 'colwise' matrices"),
        ({"re:(": "colwise"}, "'re:(' is not a regular expression"),
    ],
)
def test_settings_that_are_no_rules_are_named(given: Any, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ShardConfig(parallel=given)
    assert message in str(raised.value)


def test_rules_survive_as_plain_data() -> None:
    config = ShardConfig(parallel=RULES)  # type: ignore[arg-type]
    assert config.to_dict()["parallel"] == RULES
    assert ShardConfig.from_json(config.to_json()) == config
    assert ShardConfig(parallel="auto").to_dict()["parallel"] == "auto"


def test_names_of_heads_are_found_in_configs() -> None:
    attention = Attention()
    del attention.num_key_value_heads
    attention.config = SimpleNamespace(num_attention_heads=6)  # type: ignore[assignment]
    with pytest.raises(PlanError, match="num_attention_heads=6, which cannot be divided by 4"):
        mmfsdp.plan(attention, {"parallel": {"q_proj": "colwise"}}, {"tensor": 4})
