"""Models that rules of the config divide train as one process does, and as the same models divided by hand."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tests.distributed.axes.divided_models import MESHES, batch_of, divide, make_llama, make_mesh, own_rows, take_step
from tests.distributed.axes.ruled_models import RULES, make_ruled, ruled_loss
from torch import nn
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mmfsdp
from mmfsdp.checkpoint import convert
from mmfsdp.errors import ConfigError, PlanError, RankMismatchError
from mmfsdp.runtime import find_sharded_model
from mmfsdp.testing import run_ranks

DIVIDED = [name for name in MESHES if "tensor" in name]


def train(model: nn.Module, kind: str, mesh: Any = None) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Train 5 steps: their losses and norms, and the gradients of the first one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps, grads = [], {}
    for step in range(5):
        loss = ruled_loss(model, kind, own_rows(batch_of(step), mesh))
        loss.backward()
        if step == 0:
            with mmfsdp.full_params(model, with_grads=True, writeback=False) if mesh is not None else nullcontext():
                grads = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
        steps.append(take_step(model, optimizer, loss, mesh))
    return steps, grads


def as_alone(rank: int, kinds: list[str], truth: dict[str, Any]) -> None:
    for kind in kinds:
        for name in DIVIDED:
            torch.manual_seed(rank)
            if rank:
                model = make_ruled(kind).apply(lambda module: getattr(module, "reset_parameters", lambda: None)())
            else:
                model = make_ruled(kind)
            plan = mmfsdp.plan(model, {"parallel": RULES[kind]}, MESHES[name])
            model = mmfsdp.shard(model, {"parallel": RULES[kind]}, MESHES[name])
            held = [param.to_local() for param in model.parameters()]
            assert sum(tensor.nbytes for tensor in held) == plan.param_bytes(rank)
            if kind == "llama":  # no padding: nothing keeps the whole values alive
                assert sum(tensor.untyped_storage().nbytes() for tensor in held) == plan.param_bytes(rank)
            steps, grads = train(model, kind, find_sharded_model(model).mesh)
            for mine, other in zip(steps, truth[kind][0], strict=True):
                assert mine == pytest.approx(other, rel=1e-5, abs=1e-5), (kind, name)
            assert grads.keys() == truth[kind][1].keys()
            for fqn, grad in grads.items():
                torch.testing.assert_close(grad, truth[kind][1][fqn], rtol=1e-5, atol=1e-5, msg=f"{kind} {name} {fqn}")


@pytest.mark.sample("llama-vit")
@pytest.mark.parametrize("kinds", [["llama", "vit"], ["tied", "qwen3"], ["neox", "odd"]], ids="-".join)
def test_models_divided_by_rules_train_as_one_process(kinds: list[str]) -> None:
    run_ranks(as_alone, 4, kinds, {kind: train(make_ruled(kind), kind) for kind in kinds}, timeout=280)


LAYERS = {"kind": "module_class", "classes": "LlamaDecoderLayer"}
LLAMA = {
    "model.embed_tokens": "rowwise",
    "**.[qkv]_proj": "colwise",
    "**.o_proj": "rowwise",
    "re:.*(gate|up)_proj": "colwise",
    "**.down_proj": "rowwise",
    "lm_head": {"style": "colwise", "output": "replicate"},
}


class Sent(TorchDispatchMode):
    """Notes each collective: operator, ranks of its group and bytes. torch may take an older group of equal ranks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, tuple[int, ...], int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls operators on local tensors, which come here again
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            leaves = tree_leaves((args, kwargs))
            groups = [dist.ProcessGroup.unbox(leaf) for leaf in leaves if is_group(leaf)]
            groups += [_resolve_process_group(leaf) for leaf in leaves if isinstance(leaf, str) and leaf.isdigit()]
            nbytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
            ranks = [tuple(dist.get_process_group_ranks(group)) for group in groups]
            self.found += [(func.__name__, found, nbytes) for found in ranks[:1]]  # others send nothing
        return func(*args, **(kwargs or {}))


def is_group(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type())


def step_of(model: Any, tokens: torch.Tensor) -> list[tuple[str, tuple[int, ...], int]]:
    """Return what a step sends, in order, once the first steps with their comparisons are over."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        with Sent() as sent:
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return sent.found


def beside_by_hand(rank: int) -> None:
    mesh = make_mesh(MESHES["shard 2, tensor 2"])
    tokens = own_rows(batch_of(0), mesh)
    for tied in (False, True):
        divide(hand := make_llama(tied=tied), mesh)
        for layer in hand.model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh["shard"])
        fully_shard(hand, mesh=mesh["shard"])
        ours = mmfsdp.shard(make_llama(tied=tied), {"wrap": LAYERS, "parallel": LLAMA}, mesh)
        for (name, mine), other in zip(ours.named_parameters(), hand.parameters(), strict=True):
            assert mine.placements == other.placements, name
            assert torch.equal(mine.to_local(), other.to_local()), name
        [sent, theirs] = step_of(ours, tokens), step_of(hand, tokens)
        groups = {tuple(mesh[axis].mesh.tolist()) for axis in ("shard", "tensor")}
        assert groups == {group for _, group, _ in theirs}, (groups, theirs)
        small = [
            entry for entry in sent if entry[0] == "allreduce_.default" and entry[2] < 100
        ]  # which params were used
        assert len(small) <= 2
        assert [entry for entry in sent if entry not in small] == theirs, (sent, theirs)


def test_a_step_sends_what_the_same_model_divided_by_hand_sends() -> None:
    run_ranks(beside_by_hand, 4)


class Body(nn.Module):
    """Two linear layers and a norm, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)
        self.fc1.bias.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.fc2(torch.relu(self.fc1(x))))


def make_bodies() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Body(), Body(), nn.Linear(16, 4))


BODIES = {"*.fc1": "colwise", "*.fc2": "rowwise"}


def beside_the_rest(rank: int, folder: str) -> None:
    mesh = {"shard": 2, "tensor": 2}
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(5)).chunk(2)[rank // 2]

    def gradients(model: Any) -> dict[str, torch.Tensor]:
        for _ in range(2):
            model.zero_grad()
            model(x).square().mean().backward()
        with mmfsdp.full_params(model, with_grads=True, writeback=False):
            return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}

    def build(mesh: Any = mesh, model: Any = None, **settings: Any) -> Any:
        model = make_bodies() if model is None else model
        return mmfsdp.shard(model, {"wrap": "Body", "parallel": BODIES, **settings}, mesh)

    plain = build()
    truth = gradients(plain)
    assert "0.fc1.bias" not in truth
    for settings in (
        {"activation_checkpointing": "full"},
        {"compile": {"backend": "aot_eager"}},
        {"wrap": "Linear", "activation_checkpointing": "full"},
        {"cpu_offload": True},
        {"engine": "replicate", "mesh": {"replicate": 2, "tensor": 2}},
    ):
        torch.testing.assert_close(gradients(build(**settings)), truth, rtol=1e-5, atol=1e-6)

    frozen = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)).requires_grad_(requires_grad=False)
    sharded = mmfsdp.shard(frozen, {"parallel": {"0": "rowwise", "1": "sequence"}, "wrap": "Linear"}, mesh)
    assert not any(param.requires_grad for param in sharded.parameters())

    values = []
    for sizes, rules in ((mesh, BODIES), ({"tensor": 4}, BODIES), ({"shard": 4}, None)):
        with torch.device("meta"):
            empty = make_bodies()
        model = build(sizes, empty, parallel=rules, init={"seed": 7})
        values.append(mmfsdp.model_state_dict(model, kind="full", rank0_only=False))
    for other in values[1:]:
        for name, value in values[0].items():
            assert torch.equal(value, other[name]), name

    mmfsdp.save_checkpoint(f"{folder}/c", plain)
    resumed = build({"shard": 4}, parallel=None)
    with torch.no_grad():
        for param in resumed.parameters():
            param.zero_()
    mmfsdp.load_checkpoint(f"{folder}/c", resumed)
    before, after = (mmfsdp.model_state_dict(model, kind="full", rank0_only=False) for model in (plain, resumed))
    assert all(torch.equal(value, after[name]) for name, value in before.items())

    with pytest.raises(RankMismatchError, match="different settings"):
        build(parallel={**BODIES, "2": {"style": "colwise", "output": "replicate"}} if rank else BODIES)
    for wrong, error in (({"*.fc3": "colwise"}, PlanError), ("auto", ConfigError)):
        with pytest.raises(error):
            build(parallel=wrong)
    with pytest.raises(ConfigError, match="need engine 'fsdp2'"):
        build(engine="fsdp1")


def test_rules_go_with_what_else_a_config_says(tmp_path: Any) -> None:
    run_ranks(beside_the_rest, 4, str(tmp_path))
    convert(tmp_path / "c", tmp_path / "c.safetensors")
    assert load_file(tmp_path / "c.safetensors").keys() == make_bodies().state_dict().keys()
