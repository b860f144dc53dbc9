"""What is wrong is refused before training, on every rank, by an error that says what and where; nothing hangs."""

from __future__ import annotations

import functools
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.models import BLOCKS, Block, Frozen, Tied, build
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import mmfsdp
from mmfsdp import errors
from mmfsdp.testing import RankError, run_ranks, single_rank

Told = tuple[type[BaseException], str]


def told(action: Callable[[], Any]) -> Told:
    """The type and text of the error that an action raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is what the tests compare
        action()
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy)) == (type(caught.value), str(caught.value))
    return type(caught.value), str(caught.value)


def different(rank: int, what: str) -> Told:
    """Rank 1 differs from all others."""
    odd = rank == 1
    model: nn.Module = nn.Sequential(nn.Linear(4, 4), Block(5))
    config: dict[str, Any] = {"wrap": BLOCKS}
    policy = None
    if what == "shape":
        model[0] = nn.Linear(4, 3 if odd else 4)
    elif what == "layer" and odd:
        model.append(nn.Linear(5, 5))
    elif what == "dtype" and odd:
        model.bfloat16()
    elif what == "frozen" and odd:
        model[0].requires_grad_(False)
    elif what == "policy":
        policy = functools.partial(choose, odd=odd)
    elif what == "config" and odd:
        config["sharding"] = "SHARD_GRAD_OP"
    elif what == "strategy" and odd:
        config["sharding"] = "NO_SHARD"
    return told(lambda: mmfsdp.shard(model, config, policy=policy))


def choose(module: nn.Module, recurse: bool, nonwrapped_numel: int, *, odd: bool) -> bool:
    return recurse or isinstance(module, nn.LayerNorm if odd else Block)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "shape",
            "Ranks 0 and 1 were given different models. Only rank 0 has: "
            "['param 0.weight (4, 4) torch.float32 trained', 'param 0.bias (4,) torch.float32 trained']; only rank 1 "
            "has: ['param 0.weight (3, 4) torch.float32 trained', 'param 0.bias (3,) torch.float32 trained']. Build "
            "the same model on every rank.",
        ),
        (
            "layer",
            "Ranks 0 and 1 were given different models. Only rank 0 has: nothing more; only rank 1 has: ['module 2 "
            "Linear', 'param 2.weight (5, 5) torch.float32 trained']. Build the same model on every rank.",
        ),
        ("dtype", "['param 0.weight (4, 4) torch.bfloat16 trained', 'param 0.bias (4,) torch.bfloat16 trained']"),
        ("frozen", "only rank 1 has: ['param 0.weight (4, 4) torch.float32 fixed'"),
        ("policy", "Ranks 0 and 1 were given different settings for the same model:\n"),
        ("config", "Use the same config and policy on every rank."),
        ("strategy", "Use the same config and policy on every rank."),
    ],
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_were_given_different_things(what: str, message: str, world_size: int) -> None:
    results = run_ranks(different, world_size, what)
    assert len(set(results)) == 1
    kind, text = results[0]
    assert kind is errors.RankMismatchError
    assert message in text


def failing_on_one(rank: int, how: str) -> Told:
    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> Any:
        if rank == 1 and how == "policy":
            return "yes"
        if rank == 1 and how == "foreign":
            raise ZeroDivisionError("one over nothing")
        return recurse

    config = {"sharding": "FULL_SHRAD"} if rank == 1 and how == "config" else {}
    return told(lambda: mmfsdp.shard(build(), config, policy=policy))


@pytest.mark.parametrize(
    ("how", "own", "others"),
    [
        ("policy", errors.PolicyError, errors.PolicyError),
        ("config", errors.ConfigError, errors.ConfigError),
        ("foreign", ZeroDivisionError, errors.MmfsdpError),
    ],
)
def test_a_plan_that_fails_on_one_rank_fails_on_all(how: str, own: type, others: type) -> None:
    (first, text), (second, own_text) = run_ranks(failing_on_one, 2, how)
    assert (first, second) == (others, own)
    assert text.startswith("Rank 1 failed: ")
    assert "rank=1" in text
    assert own_text.partition(" [")[0] in text


def wrong_mesh(rank: int, what: str) -> Told:
    world_size = dist.get_world_size()
    if what == "plan":
        plan = mmfsdp.plan(build(), {}, 8)
        return told(lambda: mmfsdp.apply_plan(build(), plan))
    if what == "shard_size":
        return told(lambda: mmfsdp.shard(build(), {"sharding": {"strategy": "HYBRID_SHARD", "shard_size": 3}}))
    mesh = init_device_mesh("cpu", (world_size // 2, 2))
    if what == "strategy":
        return told(lambda: mmfsdp.shard(build(), {}, mesh))
    plan = mmfsdp.plan(build(), {"sharding": "HYBRID_SHARD"}, (1, 4))
    return told(lambda: mmfsdp.apply_plan(build(), plan, mesh))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("plan", "The plan is for 8 ranks"),
        ("shard_size", "A world of 4 ranks cannot be divided into shard groups of 3. Divisors of 4: [2, 4]."),
        ("strategy", "Strategy 'FULL_SHARD' shards over one mesh dimension, but the mesh is 2 x 2."),
        ("shape", "The plan is for 4 ranks, but the given mesh is 2 x 2."),
    ],
)
def test_a_mesh_that_does_not_fit(what: str, message: str) -> None:
    results = run_ranks(wrong_mesh, 4, what)
    assert len(set(results)) == 1
    assert results[0][0] is errors.MeshError
    assert message in results[0][1]


def for_another_model(rank: int) -> Told:
    plan = mmfsdp.plan(Tied(7), {}, 2)
    return told(lambda: mmfsdp.apply_plan(Tied(8), plan))


def test_a_plan_for_another_model() -> None:
    kind, text = run_ranks(for_another_model, 2)[0]
    assert kind is errors.PlanMismatchError
    assert re.fullmatch(
        r"This plan was made for another model: its fingerprint is [0-9a-f]{16}, the model's is [0-9a-f]{16}. Names, "
        r"shapes, dtypes, requires_grad and module classes must be the same. Make a new plan.",
        text,
    )


def test_without_a_process_group() -> None:
    assert told(lambda: mmfsdp.shard(build())) == (
        errors.ShardStateError,
        "torch.distributed is not initialised. Start the program with torchrun and call "
        "torch.distributed.init_process_group() before sharding a model.",
    )


def test_a_model_that_is_not_sharded() -> None:
    kind, text = told(lambda: mmfsdp.model_state_dict(nn.Linear(2, 2)))
    assert kind is errors.ShardStateError
    assert text.startswith("This Linear was not sharded by mmfsdp.")


def refused(rank: int, config: dict[str, Any], name: str) -> Told:
    return told(lambda: mmfsdp.shard(Frozen() if name == "Frozen" else build(name), config))


@pytest.mark.parametrize(
    ("config", "kind", "message"),
    [
        (
            {"sharding": {"use_orig_params": False}, "wrap": BLOCKS},
            errors.FrozenParametersError,
            "use_orig_params=False puts all parameters of a shard unit into one flat parameter, but unit 'blocks.1' "
            "has frozen parameters",
        ),
        ({"engine": "fsdp1", "cpu_offload": True}, errors.ConfigError, "cpu_offload on a CPU device needs engine"),
        (
            {"engine": "fsdp1", "sharding": {"reshard_after_forward": 2}},
            errors.ConfigError,
            "resharding to a smaller group after forward needs engine 'fsdp2'.",
        ),
        (
            {"engine": "fsdp1", "precision": {"param_dtype": "bfloat16", "output_dtype": "float32"}},
            errors.ConfigError,
            "precision.output_dtype needs engine 'fsdp2'.",
        ),
        (
            {"engine": "fsdp1", "prefetch": {"forward": 2}},
            errors.ConfigError,
            "forward prefetch of more than one unit needs engine 'fsdp2'.",
        ),
        ({"init": {"device": "cuda"}}, errors.MeshError, "torch sees no CUDA device"),
    ],
    ids=str,
)
def test_what_an_engine_cannot_do_is_said_before_anything_changes(
    config: dict[str, Any], kind: type, message: str
) -> None:
    if kind is errors.MeshError and torch.cuda.is_available():
        config, message = {"init": {"device": "gpu"}}, "'gpu' is not accepted"
        kind = errors.ConfigError
    results = run_ranks(refused, 2, config, "Frozen" if kind is errors.FrozenParametersError else "Tied")
    assert len(set(results)) == 1
    assert results[0][0] is kind
    assert message in results[0][1]


def failing(rank: int) -> None:
    if rank == 1:
        raise errors.ConfigError("Wrong.", config="a.b")


def hanging(rank: int) -> None:
    if rank == 0:
        dist.barrier()


@pytest.mark.exhaustive
def test_errors_of_ranks_come_home_with_their_context() -> None:
    with pytest.raises(RankError, match=r"failing failed on rank 1:\n") as caught:
        run_ranks(failing, 3)
    assert caught.value.errors[0] is None
    assert str(caught.value.errors[1]) == "Wrong. [config='a.b']"
    with pytest.raises(RankError, match="hanging did not end on rank 0 within 2 s"):
        run_ranks(hanging, 3, timeout=2)


class FrozenAndTied(nn.Module):
    """Words that are frozen, at either end, around a block that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.block = nn.Embedding(8, 5), Block(5)
        self.head = nn.Linear(5, 8, bias=False)
        self.head.weight = self.words.weight
        self.head.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.block(self.words(x)))
        return found


def frozen_and_tied(rank: int, engine: str) -> Told | None:
    config = {"wrap": BLOCKS, "engine": engine, "sharding": "NO_SHARD" if engine == "replicate" else "FULL_SHARD"}
    if engine == "fsdp1" and dist.get_world_size() == 1:
        return told(lambda: mmfsdp.shard(FrozenAndTied(), config))
    mmfsdp.shard(FrozenAndTied(), config)(torch.tensor([[1, 2]])).sum().backward()
    return None


def test_tied_weights_that_are_frozen_and_whole() -> None:
    """torch's FSDP1 says AssertionError in the first forward."""
    [(kind, text)] = run_ranks(frozen_and_tied, 1, "fsdp1")
    assert kind is errors.ConfigError
    assert "head.weight is tied to words.weight" in text or "words.weight is tied to head.weight" in text
    assert "use engine 'replicate' or 'fsdp2'" in text
    for engine, ranks in (("fsdp1", 2), ("fsdp2", 1), ("replicate", 1)):
        assert run_ranks(frozen_and_tied, ranks, engine) == [None] * ranks


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_a_model_that_cannot_be_called(engine: str) -> None:
    for model in (nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})):
        with single_rank(), pytest.raises(errors.PlanError, match=r"has no forward\(\).* whose forward\(\) calls what"):
            mmfsdp.shard(model, engine=engine)
