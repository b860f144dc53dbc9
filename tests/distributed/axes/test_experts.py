"""Models whose experts transformers has divided train, save and resume on any mesh as one process does."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.axes.divided_models import (
    KINDS,
    Steps,
    check_files,
    make_small,
    near,
    resume,
    train_alone,
    train_and_save,
    train_step,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mmfsdp
from mmfsdp.errors import ConfigError, MeshError, PlanError
from mmfsdp.runtime import find_sharded_model
from mmfsdp.testing import run_ranks

CONFIG = {"wrap": {"kind": "module_class", "classes": "Qwen3MoeDecoderLayer"}}
MESHES = {  # replicate, shard, tensor, and how many ranks divide experts
    "shard 4, expert 2": (1, 4, 1, 2),
    "shard 2, tensor 2, expert 2": (1, 2, 2, 2),
    "replicate 2, shard 2, expert 2": (2, 2, 1, 2),
    "expert 4": (1, 4, 1, 4),
    "shard 4": (1, 4, 1, 1),
}


def make_meshes(name: str) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the mesh of all parameters but experts, and that of experts."""
    replicate, shard, tensor, expert = MESHES[name]
    dense = init_device_mesh("cpu", (replicate, shard, tensor), mesh_dim_names=("replicate", "shard", "tensor"))
    sizes = replicate, shard * tensor // expert, expert
    return dense, init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "efsdp", "expert"))


def divide(model: Any, dense: DeviceMesh, experts: DeviceMesh) -> None:
    """Divide a model by transformers' own functions and plans."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    modules = dict(model.named_modules())
    names = [*modules, *(name for name, _ in model.named_parameters())]

    def rules(plan: dict[str, str], *, of_experts: bool) -> dict[str, str]:
        found = {}
        for pattern, style in plan.items():
            for name in names if (".experts" in pattern) == of_experts else ():
                if re.sub(r"\.\d+\.", ".*.", name) == pattern:
                    found[name] = style
                    owned = () if of_experts or name not in modules else modules[name].named_parameters(recurse=False)
                    found |= {f"{name}.{own}": style for own, _ in owned}
        return found

    ep, tp = rules(model.ep_plan, of_experts=True), rules(model.tp_plan, of_experts=False)
    if dense["tensor"].size() > 1:
        apply_tensor_parallelism(model, dense["tensor"], tp)
    if experts["expert"].size() > 1:
        apply_expert_parallelism(model, experts["expert"], dense["tensor"], ep)


def build(name: str) -> tuple[DeviceMesh, nn.Module, torch.optim.Optimizer]:
    """Return the mesh of all ranks, a divided and sharded model, and its optimizer."""
    dense, experts = make_meshes(name)
    model = make_family("Qwen3Moe")
    divide(model, dense, experts)
    config = CONFIG if dense.shape[0] == 1 else {**CONFIG, "sharding": {"strategy": "HYBRID_SHARD"}}
    model = mmfsdp.shard(model, config, (dense, experts))
    return dense, model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def everywhere(
    rank: int, names: list[str], pairs: list[tuple[str, str, str]], folder: str, truth: Steps, grads: dict[str, Any]
) -> None:
    for name in names:
        mesh, model, optimizer = build(name)
        plan = find_sharded_model(model).plan
        assert sum(param.to_local().nbytes for param in model.parameters()) == plan.param_bytes(rank)
        train_and_save((mesh, model, optimizer), f"{folder}/{name}", truth, grads)
    for saved, name, kind in pairs:
        resume(build(name), f"{folder}/{saved}", kind, truth, 2e-5)


@pytest.mark.sample("some")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("every", [False, True], ids=["some", "every"])
def test_divided_experts_train_and_resume_on_any_mesh(every: bool, tmp_path: Path) -> None:
    truth, _, grads = train_alone(10, make_family("Qwen3Moe"))
    names = [*MESHES] if every else [*MESHES][1:2]  # with every axis
    pairs = [
        (saved, name, kind) for (saved, name), kind in zip(itertools.product(names, names), itertools.cycle(KINDS))
    ]
    run_ranks(everywhere, 4, names, pairs, str(tmp_path), truth, grads, timeout=880)
    for name in names:
        assert {*check_files(tmp_path / name)} == {*grads}


def in_a_loop(rank: int, folder: str) -> None:
    """Weights come from a Hugging Face folder of single experts, a manager saves and resumes, and weights go to one."""
    mesh, model, optimizer = build("shard 4, expert 2")
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    mmfsdp.load_pretrained(model, f"{folder}/hf")
    truth = make_family("Qwen3Moe")
    with mmfsdp.full_params(model):
        assert all(torch.equal(param, truth.get_parameter(name)) for name, param in model.named_parameters())
    mmfsdp.save_checkpoint(f"{folder}/out", model, kind="hf", like=f"{folder}/hf")
    tiers = {"every_steps": 100, "fast_directory": f"{folder}/fast", "fast_every_steps": 1}
    for run, settings in enumerate([{"every_steps": 2}, tiers]):  # shared, and on the disks of nodes
        mesh, model, optimizer = build("shard 4, expert 2")
        with mmfsdp.CheckpointManager(f"{folder}/{run}", model, optimizer, **settings) as manager:
            for step in range(2):
                train_step(model, optimizer, step, mesh)
                manager.step(step + 1)
        _, again, other = build("shard 4, expert 2")
        with mmfsdp.CheckpointManager(f"{folder}/{run}", again, other, **settings) as manager:
            assert manager.resume() == 2
        assert train_step(again, other, 2, mesh) == train_step(model, optimizer, 2, mesh)


@pytest.mark.exhaustive
def test_a_folder_of_single_experts_in_and_out(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    make_family("Qwen3Moe").save_pretrained(tmp_path / "hf")
    run_ranks(in_a_loop, 4, str(tmp_path))
    found, truth = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), make_family("Qwen3Moe")
    assert all(torch.equal(param, truth.get_parameter(name)) for name, param in found.named_parameters())


FAMILIES = {
    "Mixtral": {"num_local_experts": 4},
    "GptOss": {"num_local_experts": 4, "head_dim": 12},
    "DeepseekV3": {
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
        **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim"), 8),
    },
    "Glm4Moe": {"moe_intermediate_size": 32, "n_routed_experts": 4, "first_k_dense_replace": 1, "head_dim": 12},
    "Olmoe": {"num_experts": 4, "eos_token_id": None},
    "Qwen3Moe": {"num_experts": 4, "head_dim": 12, "moe_intermediate_size": 32, "norm_topk_prob": True},
}


def make_family(name: str) -> Any:
    """Return a small model of a family, the same in every process."""
    return make_small(name, num_key_value_heads=4, num_experts_per_tok=2, **FAMILIES[name])


AXES = {
    "shard 4, expert 2": {"shard": 4, "expert": 2},
    "shard 2, tensor 2, expert 2": {"shard": 2, "tensor": 2, "expert": 2},
    "replicate 2, shard 2, expert 2": {"replicate": 2, "shard": 2, "expert": 2},
    "expert 4": {"shard": 4, "expert": 4},
}


def divided_here(
    rank: int, pairs: list[tuple[str, str]], truths: dict[str, tuple[Steps, nn.Module, dict[str, torch.Tensor]]]
) -> None:
    for name, sizes in pairs:
        truth, _, grads = truths[name]
        model = make_family(name)
        layer = {"kind": "module_class", "classes": type(model.model.layers[0]).__name__}
        plan = mmfsdp.plan(model, {"parallel": "auto", "wrap": layer}, AXES[sizes])
        model = mmfsdp.shard(model, {"parallel": "auto", "wrap": layer}, AXES[sizes])
        assert sum(param.to_local().nbytes for param in model.parameters()) == plan.param_bytes(rank)
        mesh = find_sharded_model(model).mesh
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        near([train_step(model, optimizer, 0, mesh, seen := {})], truth[:1])
        for fqn, grad in grads.items():
            torch.testing.assert_close(seen[fqn], grad, rtol=1e-5, atol=1e-5, msg=f"{name} {sizes} {fqn}")
        near([train_step(model, optimizer, step, mesh) for step in range(1, 5)], truth[1:])


PAIRS = [(name, axes) for at, name in enumerate(FAMILIES) for axes in [*AXES][at % 2 :: 2]]  # all meshes, in turn


@pytest.mark.sample("some")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pairs", [PAIRS[:1], PAIRS], ids=["some", "every"])
def test_experts_of_families(pairs: list[tuple[str, str]]) -> None:
    truths = {name: train_alone(5, make_family(name)) for name, _ in pairs}
    run_ranks(divided_here, 4, pairs, truths, timeout=880)


def test_a_plan_divides_experts_by_rules() -> None:
    model = make_family("Qwen3Moe")
    plan = mmfsdp.plan(model, {"parallel": "auto"}, {"shard": 8, "tensor": 2, "expert": 4})
    table = plan.params_table()
    assert re.search(
        r"layers.{0..1}.mlp.experts.down_proj +4 x 48 x 32 +expert 0, shard 0 +1 x 48 x 32 +sum over shard / 8", table
    )
    assert re.search(r"self_attn.q_proj.weight +48 x 48 +tensor 0, shard 0 +3 x 48 +mean over shard", table)
    assert mmfsdp.ShardPlan.model_validate_json(plan.model_dump_json()) == plan
    rule = {"**.experts": "experts"}
    assert mmfsdp.plan(model, {"parallel": rule}, {"shard": 4, "expert": 2}).parallel[0].style == "experts"
    with pytest.raises(
        ConfigError, match=r"'model.layers.0.mlp.experts' along the axis 'expert', and the mesh, .* has none"
    ):
        mmfsdp.plan(model, {"parallel": rule}, {"shard": 4, "tensor": 2})
    with pytest.raises(
        PlanError, match=r"The 4 experts of 'model.layers.0.mlp.experts' cannot be divided over 8 ranks"
    ):
        mmfsdp.plan(model, {"parallel": rule}, {"shard": 8, "expert": 8})
    with pytest.raises(
        PlanError, match=r"forward of 'model.layers.0.mlp.gate', a \w+, takes hidden_states. Experts are"
    ):
        mmfsdp.plan(model, {"parallel": {"**.gate": "experts"}}, {"shard": 4, "expert": 2})
    with pytest.raises(PlanError, match=r"has no parameters of its own. Experts are divided where one module owns"):
        mmfsdp.plan(model, {"parallel": {"**.mlp": "experts"}}, {"shard": 4, "expert": 2})


class Routed(nn.Module):
    """Experts of which tokens choose the first two only, between two layers that tensor parallelism divides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down, self.router = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4)
        self.experts = Stack()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.down(self.up(inputs).relu())
        weights = self.router(hidden)[:, :2].softmax(-1)
        chosen = torch.zeros_like(weights, dtype=torch.long)
        chosen[:, 1] = 1
        return hidden + self.experts(hidden, chosen, weights)


class Stack(nn.Module):
    """Four experts, each one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        made = torch.einsum("tkoi,ti->tko", self.weight[experts], tokens).tanh()
        return (made * weights[..., None]).sum(1)


def without_tokens(rank: int, inputs: torch.Tensor, truth: dict[str, torch.Tensor]) -> None:
    for name in ("shard 2, tensor 2, expert 2", "expert 4", "shard 4, expert 2"):
        dense, experts = make_meshes(name)
        model = Routed()
        shared = dense["tensor"] if dense["tensor"].size() > 1 else None
        if shared is not None:
            styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(model, shared, styles, src_data_rank=None)
        mmfsdp.divide_experts(model.experts, experts["expert"], shared)
        model = mmfsdp.shard(model, {"activation_checkpointing": {"modules": "Stack"}}, (dense, experts))
        own = inputs.chunk(mmfsdp.data_parallel_size(model))[mmfsdp.data_parallel_rank(model)]
        model(own).square().mean().backward()
        with mmfsdp.full_params(model, with_grads=True, writeback=False):
            for fqn, param in model.named_parameters():
                torch.testing.assert_close(param.grad, truth[fqn], rtol=1e-5, atol=1e-6)


def test_ranks_without_tokens() -> None:
    model = Routed()
    model(inputs := torch.randn(12, 8)).square().mean().backward()
    run_ranks(without_tokens, 4, inputs, {name: param.grad for name, param in model.named_parameters()})


class Experts(nn.Module):
    """Two stacks of experts' weights, and one weight that is no expert's."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.ones(4, 6, 6)), nn.Parameter(torch.ones(4, 6, 6))
        self.scale = nn.Parameter(torch.ones(6)) if shared else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs


def refusals(rank: int) -> None:
    dense, experts = make_meshes("shard 4, expert 2")

    def refused(expected: str, kind: type[Exception], mesh: Any, *, shared: bool = False, **settings: Any) -> None:
        model = nn.Sequential(nn.Linear(6, 6), Experts(shared))
        for name in ("up", "down"):
            whole = model[1].get_parameter(name)
            setattr(model[1], name, nn.Parameter(distribute_tensor(whole.data, experts["expert"], [Shard(0)])))
        with pytest.raises(kind, match=expected):
            mmfsdp.shard(model, settings, mesh)

    refused("but the model is planned for 4 ranks. Give the mesh that 'expert' is an axis of", PlanError, dense)
    refused("no mesh of experts is given. Give two meshes: .mesh, experts.", PlanError, {"shard": 4, "expert": 2})
    refused(
        "holds experts, .* and '1.scale', which the axis 'expert' does not divide",
        PlanError,
        (dense, experts),
        shared=True,
    )
    refused("axes beside 'replicate' and 'shard' need engine 'fsdp2'", ConfigError, (dense, experts), engine="fsdp1")
    refused(
        "has the dimensions 'efsdp' and 'expert', which may follow 'replicate'; this one has", MeshError, (dense, dense)
    )
    wrong = init_device_mesh("cpu", (4, 1), mesh_dim_names=("efsdp", "ep"))
    refused("no parameter is divided along|is planned for 4 ranks", PlanError, (dense, wrong))
    strided = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    other = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("efsdp", "expert"))
    refused("number other ranks, or the same ones in another order", MeshError, (strided, other))
    model = nn.Sequential(nn.Linear(6, 6), Experts(shared=False))
    for name in ("up", "down"):
        setattr(model[1], name, nn.Parameter(distribute_tensor(torch.ones(4, 6, 6), other["expert"], [Shard(0)])))
    with pytest.raises(
        PlanError, match=r"'1.up' is divided over the ranks \[\d, \d\], but the axis 'expert' of the given"
    ):
        mmfsdp.shard(model, mesh=(dense, experts))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "expert"))
    refused("has the axis 'expert', which divides the same ranks in another way", MeshError, both)


def test_what_cannot_be_right_is_refused() -> None:
    run_ranks(refusals, 4)


def test_a_plan_says_where_experts_lie() -> None:
    spec = {"replicate": 2, "shard": 8, "tensor": 2, "expert": 4}
    with pytest.raises(PlanError, match=r"2 x 8 x 2 ranks .*; experts over 4., but no parameter is divided"):
        mmfsdp.plan(nn.Linear(8, 8), mesh=spec)
    with pytest.raises(MeshError, match="The axis 'expert' has 3 ranks, which do not divide the 8 of shard"):
        mmfsdp.plan(nn.Linear(8, 8), mesh={"shard": 8, "expert": 3})
    with pytest.raises(MeshError, match="no number of it is left open"):
        mmfsdp.plan(nn.Linear(8, 8), mesh={"shard": 8, "expert": -1})
