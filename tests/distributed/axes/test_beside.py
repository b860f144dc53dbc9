"""What goes with sharding goes with tensor parallelism, too, as in one process."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.distributed.axes.divided_models import (
    MESHES,
    batch_of,
    divide,
    make_llama,
    make_mesh,
    own_rows,
    train_alone,
    train_step,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mmfsdp
from mmfsdp.testing import run_ranks

LAYER = "LlamaDecoderLayer"
Values = list[float]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)


def clip(model: nn.Module, mesh: DeviceMesh | None) -> float:
    own = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5) if mesh is None else None
    return float(mmfsdp.clip_grad_norm_(model, 0.5) if own is None else own)


def accumulate_and_scale(model: nn.Module, mesh: DeviceMesh | None) -> Values:
    """Accumulate two batches per step with a scaler, which leaves out the second step: its loss overflows on a rank."""
    optimizer, scaler, found = adam(model), torch.amp.GradScaler("cpu", init_scale=256.0), list[float]()
    for step in range(3):
        for part in range(2):
            tokens = own_rows(batch_of(2 * step + part), mesh)
            with mmfsdp.no_sync(model) if mesh is not None and not part else nullcontext():
                loss = model(input_ids=tokens, labels=tokens).loss / 2
                if step == 1 and (mesh is None or mesh.get_rank() > 1):
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = clip(model, mesh)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found += [scaler.get_scale(), *([norm] if step != 1 else [])]
    return found


def with_muon(model: nn.Module, mesh: DeviceMesh | None) -> Values:
    named = dict(model.named_parameters())
    matrices = [name for name, param in named.items() if ".layers." in name and param.dim() == 2]
    optimizers = [
        torch.optim.Muon([named.pop(name) for name in matrices], lr=1e-2),
        torch.optim.AdamW(named.values(), lr=1e-3),
    ]
    found = []
    for step in range(2):
        tokens = own_rows(batch_of(step), mesh)
        model(input_ids=tokens, labels=tokens).loss.backward()
        found.append(clip(model, mesh))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return found


def make_adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    model = make_llama()
    torch.manual_seed(5)
    targets = ["q_proj", "o_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))


def divide_adapted(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide layers with adapters: of each pair the matrix that meets the divided dimension."""
    styles: dict[str, Any] = {}
    for name in ("self_attn.q_proj", "mlp.up_proj"):
        styles |= {f"*.{name}.base_layer": ColwiseParallel(), f"*.{name}.lora_B.default": ColwiseParallel()}
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        styles |= {f"*.{name}.base_layer": RowwiseParallel(), f"*.{name}.lora_A.default": RowwiseParallel()}
    styles |= dict.fromkeys(["*.self_attn.k_proj", "*.self_attn.v_proj", "*.mlp.gate_proj"], ColwiseParallel())
    layers = model.get_submodule("base_model.model.model.layers")
    plan = {name.replace("*", str(index)): style for index in range(2) for name, style in styles.items()}
    parallelize_module(layers, mesh["tensor"], plan, src_data_rank=None)


class Branches(nn.Module):
    """Two divided branches, of which each rank of data uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4)
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(2))

    def forward(self, x: torch.Tensor, use: int) -> torch.Tensor:
        return self.branches[use](self.body(x)).square().mean()


def gradients_of_branches(mesh: DeviceMesh) -> None:
    alone, model, x = Branches(), Branches(), torch.arange(8.0).reshape(2, 4)
    ((alone(x, 0) + alone(x + 1, 1)) / 2).backward()
    styles = {"branches.*.0": ColwiseParallel(), "branches.*.1": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], styles, src_data_rank=None)
    model = mmfsdp.shard(model, mesh=mesh)
    own = mmfsdp.data_parallel_rank(model)
    model(x + own, own).backward()
    assert clip(model, mesh) == pytest.approx(clip(alone, None), rel=1e-5)
    with mmfsdp.full_params(model, with_grads=True, writeback=False):
        for name, param in model.named_parameters():
            torch.testing.assert_close(param.grad, alone.get_parameter(name).grad, msg=name)


def beside(rank: int, truth: dict[str, Values], averages: dict[str, torch.Tensor]) -> None:
    mesh = make_mesh(MESHES["shard 2, tensor 2"])

    def sharded(**settings: Any) -> nn.Module:
        model = make_llama(tied=True)
        divide(model, mesh)
        return mmfsdp.shard(model, wrap=LAYER, mesh=mesh, **settings)

    assert accumulate_and_scale(sharded(), mesh) == pytest.approx(truth["scaler"], rel=1e-5)
    assert with_muon(sharded(), mesh) == pytest.approx(truth["muon"], rel=1e-3)  # it computes in bfloat16
    for settings in (
        {"activation_checkpointing": True},
        {"activation_checkpointing": "ops"},
        {"cpu_offload": True},
    ):
        model = sharded(**settings)
        optimizer = adam(model)
        assert train_step(model, optimizer, 0, mesh) == pytest.approx(truth["plain"][:2], rel=1e-5), settings
    averaged = mmfsdp.AveragedModel(model, decay=0.5)
    for step in (1, 2):
        averaged.update_parameters()
        last = train_step(model, optimizer, step, mesh)
    assert last == pytest.approx(truth["plain"][4:], rel=1e-5)
    with averaged.average_parameters(), mmfsdp.full_params(model, writeback=False):
        for name, param in model.named_parameters():
            torch.testing.assert_close(param.detach(), averages[name], rtol=1e-4, atol=1e-5, msg=name)

    adapted = make_adapted()
    divide_adapted(adapted, mesh)
    adapted = mmfsdp.shard(adapted, wrap=LAYER, mesh=mesh)
    optimizer = adam(adapted)
    steps = [value for step in range(2) for value in train_step(adapted, optimizer, step, mesh)]
    assert steps == pytest.approx(truth["lora"], rel=1e-5)
    gradients_of_branches(mesh)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_accumulation_scaling_muon_recomputation_offload_averages_adapters_and_branches() -> None:
    steps, _, _ = train_alone(3, "tied")
    adapted = make_adapted()
    optimizer = adam(adapted)
    truth = {
        "plain": [value for step in steps for value in step],
        "scaler": accumulate_and_scale(make_llama(tied=True), None),
        "muon": with_muon(make_llama(tied=True), None),
        "lora": [value for step in range(2) for value in train_step(adapted, optimizer, step)],
    }
    first, second = (dict(train_alone(count, "tied")[1].named_parameters()) for count in (1, 2))
    averages = {name: (param.detach() + second[name].detach()) / 2 for name, param in first.items()}
    run_ranks(beside, 4, truth, averages, timeout=280)
