"""Parameters that only some ranks use, or none, train as DistributedDataParallel(find_unused_parameters=True) does."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import mmfsdp
from mmfsdp.errors import RankMismatchError
from mmfsdp.runtime.gradients.agreement import Message
from mmfsdp.testing import run_ranks

STEPS = 4


class Branch(nn.Module):
    """A unit of which a part is used or not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.shift = nn.Linear(6, 6), nn.Linear(6, 6), nn.Parameter(torch.zeros(6))

    def forward(self, x: torch.Tensor, use: int) -> torch.Tensor:
        x = self.first(x) if use % 2 else self.second(x)
        return x + self.shift if use > 1 else x


class Heads(nn.Module):
    """Two heads of equal shape, one of another, a unit with parts, a head that nobody uses, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.branch = Branch()
        self.a, self.b, self.c = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(6, 3, bias=False)
        self.never, self.frozen = nn.Linear(6, 5), nn.Linear(6, 5).requires_grad_(False)
        self.checkpointed = False

    def forward(self, x: torch.Tensor, use: int) -> torch.Tensor:
        x = self.body(x)
        if self.checkpointed:
            x = checkpoint(self.branch, x, use, use_reentrant=False)
        else:
            x = self.branch(x, use)
        head = [self.a, self.b, self.c, self.frozen][use]
        return head(x).square().mean()


def uses(step: int, rank: int, case: str) -> int:
    if case == "alike":
        return step % 3
    if case == "now and then":
        return 1 if rank == 0 and step == 2 else 0
    return (rank + step // 2) % 4 if case == "turns" else rank % 3


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "plain SGD": lambda params: torch.optim.SGD(params, lr=0.05),
}
WRAP = {"kind": "module_class", "classes": "Branch"}
CONFIGS: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {"wrap": WRAP},
    "one unit": {"wrap": "none"},
    "SHARD_GRAD_OP": {"wrap": WRAP, "sharding": "SHARD_GRAD_OP"},
    "NO_SHARD": {"wrap": WRAP, "sharding": "NO_SHARD"},
    "HYBRID_SHARD": {"wrap": WRAP, "sharding": {"strategy": "HYBRID_SHARD", "shard_size": 2}},
    "offload": {"wrap": WRAP, "cpu_offload": True},
    "whole": {"wrap": WRAP, "sharding": {"ignored_parameters": ["a.*", "never.*", "branch.shift"]}},
    "fsdp1 whole": {"wrap": WRAP, "engine": "fsdp1", "sharding": {"ignored_parameters": ["a.*", "b.*", "never.*"]}},
    "fsdp1": {"wrap": WRAP, "engine": "fsdp1"},
    "checkpointed": {"wrap": WRAP},
    "no_sync": {"wrap": WRAP},
    "no_sync, bf16": {"wrap": "none", "precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}},
    "accumulated": {"wrap": WRAP},
    "clipped": {"wrap": WRAP},
    "scaled": {"wrap": WRAP},
}


def grow(model: Any, optimizer: Any, case: str, how: str) -> dict[str, Any]:
    """Train, and return which gradients there were at each step."""
    rank = dist.get_rank()
    is_ddp = isinstance(model, DistributedDataParallel)
    scaler = mmfsdp.GradScaler("cpu", enabled=how == "scaled", init_scale=4.0)
    seen = {}
    for step in range(STEPS):
        micro_batches = 3 if how.startswith(("no_sync", "accumulated")) else 1
        for micro in range(micro_batches):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            x = torch.randn(4, 6, generator=generator)
            hold = how.startswith("no_sync") and micro < micro_batches - 1
            no_sync = model.no_sync() if is_ddp else mmfsdp.no_sync(model)
            with no_sync if hold else contextlib.nullcontext():
                loss = model(x, uses(step + micro, rank, case))
            if is_ddp and hold:
                with model.no_sync():
                    scaler.scale(loss).backward()
            else:
                scaler.scale(loss).backward()
        if how == "clipped":
            if is_ddp:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            else:
                mmfsdp.clip_grad_norm_(model, 0.1)
        root = model.module if is_ddp else model
        seen[step] = {name: param.grad is not None for name, param in root.named_parameters()}
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return seen


def build(how: str) -> nn.Module:
    torch.manual_seed(0)
    model = Heads()
    model.checkpointed = how == "checkpointed"
    return model


def compare(rank: int, how: str, case: str, optimizer: str) -> float:
    config = CONFIGS[how]
    reference = build(how)
    wrapped = DistributedDataParallel(reference, find_unused_parameters=True)
    expected = grow(wrapped, OPTIMIZERS[optimizer](reference.parameters()), case, how)
    model = mmfsdp.shard(build(how), config)
    seen = grow(model, OPTIMIZERS[optimizer](model.parameters()), case, how)
    if config.get("engine") != "fsdp1":  # its flat gradients exist wherever a rank has one of the unit
        assert seen == expected
    found = mmfsdp.model_state_dict(model, rank0_only=False)
    worst = max((found[name] - value).abs().max().item() for name, value in reference.state_dict().items())
    for value in found.values():
        others = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(others, value.contiguous())
        assert all(torch.equal(value, other) for other in others)
    return worst


# Each use with each optimizer where parameters are sharded and where they are whole; everywhere, two of them.
EVERY = [(case, optimizer) for case in ("apart", "turns", "alike", "now and then") for optimizer in ("AdamW", "SGD")]
TWO = [("turns", "AdamW"), ("now and then", "SGD")]


@pytest.mark.sample("SHARD_GRAD_OP", "whole", "clipped", "checkpointed", "FULL_SHARD")
@pytest.mark.parametrize("how", [how for how in CONFIGS if how not in ("fsdp1", "fsdp1 whole", "no_sync, bf16")])
def test_trains_as_ddp(how: str) -> None:
    """Fails without `GradientAgreement`: gradients of two heads are added up, or decay moves what nobody used."""
    for case, optimizer in EVERY if how in ("FULL_SHARD", "NO_SHARD") else TWO:
        worst = run_ranks(compare, 4 if how == "HYBRID_SHARD" else 2, how, case, optimizer)
        assert max(worst) < 1e-5, (case, optimizer)


@pytest.mark.parametrize("how", ["fsdp1", "fsdp1 whole"])
def test_flat_parameters_train_as_ddp(how: str) -> None:
    """Without decay and momentum: a flat gradient is zero where a rank lacks a parameter of the unit."""
    for case in ("apart", "turns"):
        assert max(run_ranks(compare, 2, how, case, "plain SGD")) < 1e-5


def two_dtypes(rank: int) -> list[float | None]:
    """A parameter that only the last micro-batch uses, on one rank, beside those that were accumulated in float32."""
    model = mmfsdp.shard(build(""), CONFIGS["no_sync, bf16"])
    x = torch.ones(4, 6)
    with mmfsdp.no_sync(model):
        model(x, 0).backward()
    model(x, rank).backward()
    parts = (model.a.weight, model.b.weight, model.c.weight)
    return [None if part.grad is None else part.grad.full_tensor().abs().sum().item() for part in parts]


def test_no_sync_in_two_dtypes() -> None:
    first, second = run_ranks(two_dtypes, 2)
    assert first == second
    assert min(first[:2]) > 0
    assert first[2] is None


class EqualHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "abc"})

    def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.heads[name](x)


def mean_of_heads(rank: int, config: dict[str, Any]) -> list[float | None]:
    model = mmfsdp.shard(EqualHeads(), config)
    model(torch.full((1, 4), [1.0, 10.0][rank]), "ab"[rank]).sum().backward()
    grads = (model.heads[name].weight.grad for name in "abc")
    return [None if grad is None else grad.full_tensor().mean().item() for grad in grads]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_each_head_has_its_own_gradient(strategy: str) -> None:
    """torch alone gives 5.5 and 5.5."""
    assert run_ranks(mean_of_heads, 2, {"sharding": strategy}) == [[0.5, 5.0, None]] * 2


class Chosen(nn.Module):
    """Each rank uses a unit of its own: nothing that sharding could do right."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in "ab")

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.parts[which](self.body(x)).square().mean()


def units_apart(rank: int, strategy: str) -> str:
    wrap = {"kind": "module_name", "patterns": ["parts.*"]}
    model = mmfsdp.shard(Chosen(), {"wrap": wrap, "sharding": strategy})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(2, 6), rank).backward()
        optimizer.step()

    with pytest.raises(RankMismatchError) as caught:
        step()
    return caught.value.message


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_ranks_that_use_different_units_are_told(strategy: str) -> None:
    """Fails without the digest: units of equal size are mixed up in silence."""
    for message in run_ranks(units_apart, 2, strategy):
        assert message.startswith("Ranks gathered or reduced different shard units")


def units_apart_once(rank: int) -> tuple[int, str]:
    """With a device that is behind: no message has arrived when the host asks."""
    model = mmfsdp.shard(Chosen(), {"wrap": {"kind": "module_name", "patterns": ["parts.*"]}})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Message, "has_arrived", lambda message: False)
        for step in range(20):
            try:
                model(torch.ones(2, 6), rank if step == 0 else 0).backward()
                optimizer.step()
            except RankMismatchError as error:
                return step, error.message
    return 20, ""


def test_a_message_that_is_late_is_not_forgotten() -> None:
    """Fails if the next message takes its place: the mix-up of the first step would never be told."""
    for step, message in run_ranks(units_apart_once, 2):
        assert 1 < step < 6
        assert message.startswith("Ranks gathered or reduced different shard units")


def test_a_message_that_is_late_is_read_before_a_save(tmp_path: Path) -> None:
    for message in run_ranks(saved_after_mixing_up, 2, str(tmp_path / "checkpoint")):
        assert message.startswith("Ranks gathered or reduced different shard units")
    assert not [*tmp_path.iterdir()]


def saved_after_mixing_up(rank: int, path: str) -> str:
    model = mmfsdp.shard(Chosen(), {"wrap": {"kind": "module_name", "patterns": ["parts.*"]}})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Message, "has_arrived", lambda message: False)
        model(torch.ones(2, 6), rank).backward()
        optimizer.step()
        with pytest.raises(RankMismatchError) as caught:
            mmfsdp.save_checkpoint(path, model, optimizer, kind="sharded")
    return caught.value.message


def whole_in_buckets(rank: int, engine: str) -> int:
    """All-reduces of a backward with many parameters held whole, of two dtypes."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    model[3].double()
    model.forward = lambda x: model[4](model[2](model[1](model[0](x)))) + model[3](x.double()).float()
    mmfsdp.shard(model, {"engine": engine, "sharding": {"ignored_parameters": ["[0-3].*"]}})
    with torch.profiler.profile() as profile:
        model(torch.full((2, 4), rank + 1.0)).sum().backward()
    assert not any(isinstance(param, DTensor) for param in model[0].parameters()) or engine == "fsdp1"
    return sum(event.count for event in profile.key_averages() if event.key == "c10d::allreduce_")


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_whole_parameters_are_reduced_in_one_bucket_per_dtype(engine: str) -> None:
    """One for float32, one for float64, one for what was used."""
    assert run_ranks(whole_in_buckets, 2, engine) == [3, 3]
