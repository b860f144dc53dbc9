"""Proofs hold for models that are sharded right, and fail for one that computes something else on several ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from tests.console_blocks import without_gloo
from tests.distributed.models import Tied
from tests.forked_scripts import environ_with_commands
from tests.parity.false_alarms import proofs

import mmfsdp
from mmfsdp.config import ShardConfig
from mmfsdp.errors import ConfigError
from mmfsdp.frontends import TrainingStep
from mmfsdp.parity.proving.proof_runs import run_reference
from mmfsdp.parity.proving.proof_task import Task, is_alone
from mmfsdp.rehearsal.running.step import call_with, default_loss
from mmfsdp.testing import RankError, run_ranks

BATCH = torch.empty(4, dtype=torch.int64)
BLOCKS = {"wrap": {"kind": "module_class", "classes": "Block"}}


class Wrong(Tied):
    """Its second block computes something else on one rank of several."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embed(x))
        x = self.blocks[1](x * (1.01 if dist.get_rank() == 1 else 1.0))
        return self.head(x) * self.scale


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Drawing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.rand_like(x)


def drawing() -> nn.Module:
    return nn.Sequential(Drawing(), Drawing())


def summing() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.Linear(64, 4))


@pytest.mark.exhaustive
def test_gradients_that_are_sums_of_equal_terms_are_proven() -> None:
    """That of the norm's bias does not depend on inputs, but on the order in which ranks add."""
    proof = mmfsdp.prove(summing, torch.empty(32, 64, 8), steps=1)
    assert proof.proven, str(proof)


def test_a_model_with_tied_weights_is_proven() -> None:
    proof = mmfsdp.prove("tests.distributed.models:Tied", BATCH, config=BLOCKS, steps=1, accumulate=2)
    assert proof.proven, str(proof)
    assert str(proof).startswith(
        "Proven: Tied computes on 2 ranks what it computes in one process, over 1 step with an evaluation, and "
        "over 1 more from a checkpoint on 1 rank. "
    )
    assert f"torch {torch.__version__}" in str(proof)
    assert len(proof.trained.compared) > 100
    assert len(proof.resumed.compared) > 100
    assert {item.key.step for item in proof.resumed.compared} == {1}
    assert json.loads(json.dumps(proof.describe()))["proven"] is True


@pytest.mark.exhaustive
def test_mixed_precision_and_dropout() -> None:
    proof = mmfsdp.prove(Dropping, {"x": torch.empty(2, 3, 8)}, config={"precision": "bf16"}, steps=1)
    assert proof.proven, str(proof)
    assert "for mixed precision, the one process runs the plan too" in str(proof)


def test_a_model_that_computes_something_else_is_not_proven() -> None:
    proof = mmfsdp.prove(Wrong, BATCH, config=BLOCKS, steps=1)
    assert not proof.proven
    assert proof.trained.first is not None
    assert (proof.trained.first.key.kind, proof.trained.first.key.name) == ("input", "blocks.1[0][0]")
    assert proof.trained.first.ranks == (1,)
    assert "only of rank 1" in str(proof)
    assert proof.resumed.first is not None  # what was trained is not what the reference has
    assert str(proof).startswith("Not proven: Wrong differs on 2 ranks from one process.")


def test_random_numbers_of_a_forward_are_the_same_for_the_same_samples() -> None:
    config = {"wrap": {"kind": "module_class", "classes": "Drawing"}, "activation_checkpointing": "full"}
    proof = mmfsdp.prove(drawing, torch.empty(2, 4), config=config, steps=1)
    assert proof.proven, str(proof)


def critic_step(model: nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Step twice, with random numbers, the second time from what the first one has left."""
    for _ in range(2):
        loss = (model(batch) + 0.1 * torch.randn(2, 5, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def uneven_step(model: nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2 if batch.sum() > 0 else 1):
        model(batch).square().mean().backward()
        optimizer.step()


class Normed(nn.Module):
    """Batch norms see what is on their rank; the sharded run computes something else if told to."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.one, self.norm, self.two, self.wrong = nn.Linear(8, 6), nn.BatchNorm1d(5), nn.Linear(6, 4), wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.one(x)).relu()
        return self.two(y * (1.01 if self.wrong and dist.get_world_size() > 1 else 1.0))


@pytest.mark.sample("alone")
@pytest.mark.parametrize("against", ["alone", "ddp"])
def test_whole_steps_that_step_more_than_once(against: Literal["alone", "ddp"]) -> None:
    proof = mmfsdp.prove(Normed, torch.empty(2, 5, 8), step=critic_step, against=against, steps=2)
    assert proof.proven, str(proof)
    assert {item.key.step for item in proof.trained.compared} == {0, 1, 2, 3}
    assert {item.key.step for item in proof.resumed.compared} == {4, 5, 6, 7}
    kinds = {item.key.kind for item in proof.resumed.compared}
    assert {"input", "output", "gradient of output", "gradient before clipping", "norm", "update", "buffer"} <= kinds


class Nets(nn.Module):
    """A generator and a critic with batch norms, which are called in turns."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.maker, self.critic = Normed(), nn.Linear(4, 1)
        self.wrong = wrong

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        scores = self.critic(self.maker(noise))
        return scores * (1.01 if self.wrong and not self.training and dist.get_world_size() > 1 else 1.0)


def both(params: Iterable[torch.Tensor]) -> list[torch.optim.Optimizer]:
    *maker, weight, bias = params
    return [torch.optim.AdamW([weight, bias], lr=1e-2), torch.optim.SGD(maker, lr=0.1, momentum=0.9)]


def adversarial_step(model: nn.Module, batch: torch.Tensor, optimizers: list[torch.optim.Optimizer]) -> None:
    """Two updates of the critic, and one of the generator."""
    critic, maker = optimizers
    for optimizer in (critic, critic, maker):
        scores = model(batch + torch.randn_like(batch))
        (scores - float(optimizer is maker)).square().mean().backward()
        optimizer.step()
        for each in optimizers:
            each.zero_grad()


@pytest.mark.sample("False")
@pytest.mark.parametrize("wrong", [False, True])
def test_several_optimizers_and_evaluation(wrong: bool) -> None:
    proof = mmfsdp.prove(
        partial(Nets, wrong), torch.empty(2, 5, 8), step=adversarial_step, optimizer=both, max_norm=[0.1, None],
        evaluate=nn.Module.__call__, steps=2,
    )  # fmt: skip
    assert {item.key.step for item in proof.trained.compared} == {0, 1}  # each ends with the last one's
    assert {item.key.call for item in proof.resumed.compared if item.key.name == "critic"} == {0, 1, 2}
    assert {item.key.call for item in proof.resumed.compared if item.key.name == "critic.weight[exp_avg]"} == {0, 1}
    assert {item.key.step for item in proof.resumed.compared if item.key.kind == "evaluation"} == {2}
    if not wrong:
        assert proof.proven, str(proof)
        assert "over 2 steps with an evaluation, and over 2 more" in str(proof)
    else:
        [difference] = proof.trained.differences
        assert (difference.key.kind, difference.key.name, difference.key.step) == ("evaluation", "", 0)


def test_whole_steps_that_compute_something_else() -> None:
    proof = mmfsdp.prove(partial(Normed, wrong=True), torch.empty(2, 5, 8), step=critic_step, steps=1)
    assert proof.trained.first is not None
    assert (proof.trained.first.key.kind, proof.trained.first.key.name) == ("input", "two[0][0]")


def test_whole_steps_that_step_more_often_for_some_samples() -> None:
    with pytest.raises(RankError, match="steps the optimizer more often with some samples than with others"):
        mmfsdp.prove(summing, torch.empty(1, 8), step=uneven_step, steps=4)


@pytest.mark.sample("lstm-fp32-accumulation")
@pytest.mark.parametrize(
    ("family", "precision", "plan"), [("lstm", "fp32", "accumulation"), ("dlrm", "fp32", "`HYBRID_SHARD`")]
)
def test_plans_that_are_right_are_proven(family: str, precision: str, plan: str) -> None:
    """A sample of `nox -s false_alarms`."""
    [(_, proof)] = proofs(family, precision, (plan,))
    assert proof.proven, str(proof)


def test_weights_in_another_dtype_are_not_those_of_the_plain_model() -> None:
    task = SimpleNamespace(config=ShardConfig.from_dict({"precision": {"storage_dtype": "bfloat16"}}))
    assert is_alone(task) == "weights in bfloat16"  # type: ignore[arg-type]


made: list[weakref.ref[nn.Module]] = []


class Remembered(nn.Linear):
    """Each that computes is remembered."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made.append(weakref.ref(self))
        return super().forward(x)


def alive(rank: int, task: Task, folder: str) -> list[bool]:
    run_reference(rank, task, folder, 2, None)
    return [model() is not None for model in made]


def test_a_run_frees_its_model(tmp_path: Path) -> None:
    """Fails without a collection: the process that computes the next one would hold both."""
    step = TrainingStep(torch.empty(2, 4), default_loss, evaluate=call_with, max_norm=1.0)
    task = Task(partial(Remembered, 4, 4), step, 2, 2, ShardConfig(), "cpu")
    [found] = run_ranks(alive, 1, task, str(tmp_path / "record"))
    assert found
    assert not any(found)


def test_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="ranks >= 2"):
        mmfsdp.prove(Tied, BATCH, ranks=1)
    with pytest.raises(ConfigError, match="cannot be divided among 3"):
        mmfsdp.prove(Tied, BATCH, resume_on=3)
    with pytest.raises(ConfigError, match="a loss or a whole step, not both"):
        mmfsdp.prove(Tied, BATCH, loss=critic_step, step=critic_step)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_norm is an empty list"):
        mmfsdp.prove(Tied, BATCH, step=critic_step, max_norm=[])


def launch(count: int, *words: str) -> list[tuple[int, str, str]]:
    """Run ``mmfsdp-cli prove`` on several ranks, as torchrun starts them; return exit codes, output and errors."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {**environ_with_commands(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    shared |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    started = [
        subprocess.Popen(
            ["mmfsdp-cli", "prove", *words],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    ended = [process.communicate(timeout=100) for process in started]
    return [(process.returncode, *texts) for process, texts in zip(started, ended, strict=True)]


@pytest.mark.exhaustive
def test_on_the_ranks_of_a_launcher() -> None:
    both = launch(2, f"{__name__}:Wrong", "--batch", "4:int64", "--steps", "1", "--json")
    assert [code for code, _, _ in both] == [1, 1], both
    found = json.loads("\n".join(without_gloo(both[0][1])))
    assert (found["proven"], found["ranks"], found["resumed_on"]) == (False, 2, 1)
    assert found["trained"]["differences"][0]["name"] == "blocks.1[0][0]"
    assert not without_gloo(both[1][1])  # one rank prints


@pytest.mark.sample("engine0", "sharding-activation_checkpointing-cpu_offload")
@pytest.mark.parametrize(
    "settings",
    [
        {"engine": "fsdp1"},
        {"engine": "replicate"},
        {"sharding": "SHARD_GRAD_OP", "activation_checkpointing": "full", "cpu_offload": True},
        {"compile": {"backend": "eager"}},
        {"engine": "fsdp1", "precision": "fp16"},  # which scales the loss
        {"optimizer": {"muon": "auto", "lr": 1e-2, "adamw": {"lr": 1e-3}}},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_other_plans(settings: dict[str, object]) -> None:
    proof = mmfsdp.prove(Tied, BATCH, config={**BLOCKS, **settings}, steps=1)
    assert proof.proven, str(proof)
    assert ("for its optimizer, the one process runs the plan too" in proof.assumed) == ("optimizer" in settings)
