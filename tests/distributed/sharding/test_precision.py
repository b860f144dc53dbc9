"""Mixed precision: bf16 as torch's own sharding computes it, fp16 with loss scaling that all ranks agree on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.models import BLOCKS, Attention, Tied, adamw, batches, build, train
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import mmfsdp
from mmfsdp.errors import GradScalerError
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.testing import run_ranks


def bf16_steps(rank: int, folder: Path, raw: bool, reduce_dtype: str) -> None:
    """Record steps of a model without anything that torch's own sharding refuses."""
    model: Any = build("Attention")
    if raw:
        policy = MixedPrecisionPolicy(torch.bfloat16, getattr(torch, reduce_dtype))
        fully_shard(model.block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    else:
        precision = {"param_dtype": "bfloat16", "reduce_dtype": reduce_dtype}
        mmfsdp.shard(model, {"wrap": BLOCKS, "precision": precision})
    optimizer = adamw(model)
    with mmfsdp.recording(folder, model, optimizer):
        for step in range(3):
            [(inputs, targets)] = batches(step, rank, dist.get_world_size(), 1)
            nn.functional.cross_entropy(model(inputs).float(), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.sample("bfloat16")
@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
def test_bf16_is_torchs_own_to_the_bit(reduce_dtype: str, tmp_path: Path) -> None:
    for raw in (True, False):
        run_ranks(bf16_steps, 2, tmp_path / str(raw), raw, reduce_dtype)
    found = mmfsdp.compare(tmp_path / "True", tmp_path / "False", rtol=0)
    assert found.same, str(found)


def dtypes_inside(rank: int, engine: str) -> dict[str, Any]:
    model: Any = build("Conv").train()
    sharded = mmfsdp.shard(model, {"engine": engine, "precision": "bf16"})
    seen = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.BatchNorm2d, nn.Linear)):
            key = name.partition(".")[0]
            module.register_forward_hook(lambda m, i, o, key=key: seen.update({key: (i[0].dtype, m.weight.dtype)}))
    optimizer = adamw(sharded)
    sharded(torch.arange(4)).float().sum().backward()
    optimizer.step()
    return seen | {"state": optimizer.state[next(p for p in sharded.parameters() if p.numel())]["exp_avg"].dtype}


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "replicate"])
def test_batch_norm_and_optimizer_stay_in_float32(engine: str) -> None:
    for seen in run_ranks(dtypes_inside, 2, engine):
        assert seen["stem"] == seen["head"] == (torch.bfloat16, torch.bfloat16)
        assert seen["norm"] == (torch.float32, torch.float32)
        assert seen["state"] == torch.float32


SCALERS = {"torch": torch.amp.GradScaler, "sharded": ShardedGradScaler, "ours": mmfsdp.GradScaler}


def fp16_curve(rank: int, engine: str, scaler: str, name: str) -> tuple[list[float], list[float], list[float]]:
    """Scales after each of three steps, the second of which is infinite on one rank alone; loss curves after that."""
    model = mmfsdp.shard(build(name), {"engine": engine, "precision": "fp16", "wrap": BLOCKS})
    optimizer = adamw(model)
    scale = SCALERS[scaler]("cpu", init_scale=64.0, growth_interval=100)
    scales = []
    for step in range(3):
        loss = model(torch.arange(4) + step).float().square().mean()
        if step == 1 and rank == 1:
            loss = loss * float("inf")
        scale.scale(loss).backward()
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad()
        scales.append(scale.get_scale())
    curve = train(model, optimizer, steps=2, scaler=scale)
    steps = [float(entry["step"]) for entry in optimizer.state.values()]
    return scales, [loss for loss, _ in curve], steps


@pytest.mark.sample("fsdp2-torch-Attention", "fsdp1-ours-Tied", "replicate-ours-Tied", "fsdp1-sharded-Attention")
@pytest.mark.parametrize(
    ("engine", "scaler", "name"),
    [
        ("fsdp2", "torch", "Attention"),
        ("replicate", "torch", "Attention"),
        ("fsdp1", "sharded", "Attention"),
        *((engine, "ours", name) for engine in ("fsdp2", "fsdp1", "replicate") for name in ("Attention", "Tied")),
    ],
)
def test_an_infinite_gradient_on_one_rank_is_skipped_by_all(engine: str, scaler: str, name: str) -> None:
    """Tied has a scalar, which is held whole, and sharded parameters: torch's own scaler cannot unscale both."""
    found = run_ranks(fp16_curve, 2, engine, scaler, name)
    for scales, losses, steps in found:
        assert scales == [64.0, 32.0, 32.0]
        assert set(steps) == {4.0}
        assert all(loss == loss for loss in losses)
    assert len({tuple(losses) for _, losses, _ in found}) == 1


def first_fp16_step(rank: int, engine: str, scaler: str | None) -> str:
    model = mmfsdp.shard(Attention(), {"engine": engine, "precision": "fp16"})
    optimizer = adamw(model)
    before = [param.detach().clone() for param in model.parameters()]
    loss = model(torch.arange(4)).float().mean()
    try:
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scale = SCALERS[scaler]("cpu")
            scale.scale(loss).backward()
            scale.step(optimizer)
    except GradScalerError as error:
        assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
        return error.message
    return ""


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "replicate"])
def test_fp16_needs_a_scaler(engine: str) -> None:
    """Without the guard the step goes through; checked by hand."""
    message = (
        "The plan computes in float16, but AdamW steps without a gradient scaler: small gradients become zero. Scale "
        "the loss and step with mmfsdp.GradScaler or torch.amp.GradScaler (AmpOptimWrapper in MMEngine), or use "
        "precision 'bf16'."
    )
    assert run_ranks(first_fp16_step, 2, engine, None) == [message] * 2


def test_flat_shards_need_a_scaler_that_agrees() -> None:
    """Without the guard only the rank whose shard holds the infinite gradient skips its step; see the control."""
    message = (
        "With engine 'fsdp1' an infinite gradient is in one rank's shard only: with GradScaler that rank alone would "
        "skip its step, and ranks would drift apart. Use mmfsdp.GradScaler."
    )
    assert run_ranks(first_fp16_step, 2, "fsdp1", "torch") == [message] * 2
    assert run_ranks(first_fp16_step, 2, "fsdp1", "ours") == [""] * 2
    assert run_ranks(first_fp16_step, 2, "fsdp2", "torch") == [""] * 2


def drifting(rank: int) -> float:
    """Control: torch's FSDP1 and torch's scaler; only one element of one rank's shard is infinite."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(nn.Linear(4, 4, bias=False), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scale = torch.amp.GradScaler("cpu", init_scale=64.0)
    loss = model(torch.ones(2, 4))[:, 0].sum() * float("inf")
    scale.scale(loss).backward()
    scale.step(optimizer)
    scale.update()
    return scale.get_scale()


def test_control_torchs_scaler_drifts_with_flat_shards() -> None:
    assert len(set(run_ranks(drifting, 2))) == 2


def lonely_infinity(rank: int, engine: str) -> float:
    """As in the control, with the model and the scaler of this library."""
    model = mmfsdp.shard(nn.Linear(4, 4, bias=False), {"engine": engine})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scale = mmfsdp.GradScaler("cpu", init_scale=64.0)
    scale.scale(model(torch.ones(2, 4))[:, 0].sum() * float("inf")).backward()
    scale.step(optimizer)
    scale.update()
    return scale.get_scale()


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "replicate"])
def test_an_infinity_in_one_shard_is_skipped_by_all(engine: str) -> None:
    """Fails if GradScaler does not ask the other ranks."""
    assert run_ranks(lonely_infinity, 2, engine) == [32.0, 32.0]


def reduce_dtypes(rank: int) -> list[tuple[Any, Any]]:
    model = mmfsdp.shard(Tied(), {"precision": {"param_dtype": "bfloat16"}, "wrap": BLOCKS})
    return [
        (unit.precision.param_dtype, unit.precision.reduce_dtype) for unit in find_sharded_model(model).plan.units
    ] + [
        (str(state._mp_policy.param_dtype), str(state._mp_policy.reduce_dtype))
        for module in model.modules()
        if (state := getattr(module, "_get_fsdp_state", lambda: None)()) is not None
    ]


def test_reduce_dtype_is_always_said() -> None:
    """What torch makes of None differs between its versions 2.13 and 2.15."""
    for found in run_ranks(reduce_dtypes, 2):
        assert found[:3] == [("bfloat16", "bfloat16")] * 3
        assert found[3:] == [("torch.bfloat16", "torch.bfloat16")] * 3


class Declaring(nn.Module):
    """A model that declares which of its modules need float32, as those of transformers do."""

    _keep_in_fp32_modules = ("wo",)
    _keep_in_fp32_modules_strict = ("router.weight", "sinks")

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"wi": nn.Linear(4, 6), "wo": nn.Linear(6, 4), "router": nn.Linear(4, 4, bias=False)})
            for _ in range(2)
        )
        self.sinks = nn.Parameter(torch.zeros(4))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            hidden = block["wi"](x)
            x = block["router"](x + block["wo"](hidden.to(block["wo"].weight.dtype))).to(x.dtype)
        return x + self.sinks


def dtypes_of_declaring(rank: int, configs: list[dict[str, Any]]) -> list[set[tuple[str, torch.dtype]]]:
    found = []
    for config in configs:
        model = Declaring()
        seen: set[tuple[str, torch.dtype]] = set()
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                key = name.rpartition(".")[2]
                module.register_forward_hook(lambda m, i, o, key=key, seen=seen: seen.add((key, m.weight.dtype)))
        mmfsdp.shard(model, config)(torch.arange(8)).float().sum().backward()
        found.append(seen)
    return found


def test_what_a_model_declares_to_need_float32_computes_in_it() -> None:
    """transformers binds float16 by the one attribute, and bfloat16 too by the strict one."""
    half, brain, full = torch.float16, torch.bfloat16, torch.float32
    kept = {("wi", half), ("wo", full), ("router", full)}
    cases: list[tuple[dict[str, Any], set[tuple[str, torch.dtype]]]] = [
        ({"precision": "fp16"}, kept),
        ({"precision": "fp16", "wrap": "Linear", "engine": "fsdp1"}, kept),
        ({"precision": "fp16", "sharding": "NO_SHARD", "wrap": "none"}, kept),
        ({"precision": "bf16"}, {("wi", brain), ("wo", brain), ("router", full)}),
        ({"precision": "bf16-pure"}, {("wi", brain), ("wo", brain), ("router", full)}),
        ({"precision": "bf16-pure", "engine": "fsdp1"}, {("wi", brain), ("wo", brain), ("router", full)}),
        ({"precision": "bf16-pure", "sharding": "NO_SHARD"}, {("wi", brain), ("wo", brain), ("router", full)}),
        ({"precision": "fp32"}, {("wi", full), ("wo", full), ("router", full)}),
        (
            {"precision": {"preset": "fp16", "overrides": [{"modules": "blocks.*.wo", "param_dtype": "float16"}]}},
            {("wi", half), ("wo", half), ("router", full)},
        ),
    ]
    for found in run_ranks(dtypes_of_declaring, 2, [config for config, _ in cases]):
        assert found == [wanted for _, wanted in cases]
    notes = [note for note in mmfsdp.plan(Declaring(), {"precision": "bf16"}, 2).notes if note.kind == "precision"]
    assert [note.fqns for note in notes] == [("blocks.0.router", "blocks.1.router"), ()]
    assert "declares float32 for 'sinks'" in notes[1].text


class Timed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 2)
        self.seen: torch.Tensor | None = None

    def forward(self, timestep: torch.Tensor) -> torch.Tensor:
        self.seen = timestep
        return self.inner(timestep.to(self.inner.weight.dtype))


def inputs_seen(rank: int, configs: list[dict[str, Any]]) -> list[float]:
    found = []
    for config in configs:
        model: Any = Timed()
        mmfsdp.shard(model, config)(torch.tensor([[999.0]]))
        found.append(model.seen.item())
    return found


def notes_of(model: nn.Module, kind: str, config: dict[str, Any]) -> list[str]:
    return [note.text for note in mmfsdp.plan(model, config, 2).notes if note.kind == kind]


def test_the_plan_says_which_inputs_are_rounded_and_how_to_keep_them() -> None:
    kept = {"preset": "bf16", "cast_root_forward_inputs": False}
    configs = [{"precision": "bf16"}, {"precision": kept}, {"precision": kept, "engine": "fsdp1"}]
    assert run_ranks(inputs_seen, 1, configs) == [[1000.0, 999.0, 999.0]]
    rounded, exact, _ = (notes_of(Timed(), "precision", config) for config in configs)
    assert ["cast_root_forward_inputs=False" in text for text in rounded] == [True]
    assert exact == []


def test_the_plan_says_that_low_weights_make_low_optimizer_states() -> None:
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    [note] = notes_of(model, "dtype", {"precision": "bf16"})
    assert "precision.storage_dtype to 'float32'" in note
    advised = {"precision": {"preset": "bf16", "storage_dtype": "float32"}}
    assert notes_of(model, "dtype", advised) == []
    assert {param.dtype for param in mmfsdp.plan(model, advised, 2).all_params()} == {"float32"}
    assert notes_of(model, "dtype", {"precision": "bf16-pure"}) == []  # asked for
    assert notes_of(model.requires_grad_(False), "dtype", {"precision": "bf16"}) == []  # no optimizer has it
