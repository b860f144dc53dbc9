"""`mmfsdp.FullyShardedDataParallel`: what code written for torch's class finds."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from tests.distributed.models import BLOCKS, Block, adamw, build, difference, train
from torch import nn
from torch.distributed.fsdp import wrap

import mmfsdp
from mmfsdp.errors import ConfigError
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.testing import run_ranks
from mmfsdp.torch_style.arguments import translate_arguments

X = torch.arange(8)
ENGINES = ("fsdp2", "fsdp1", "replicate")


def old_policy(module: nn.Module, recurse: bool, unwrapped_params: int, min_num_params: int = 60) -> bool:
    """As torch 1.11 called them."""
    return unwrapped_params >= min_num_params and (recurse or isinstance(module, Block))


def arguments(name: str, model: Any) -> dict[str, Any]:
    mixed = torch_fsdp.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    table: dict[str, dict[str, Any]] = {
        "nothing": {},
        "torch 1.11": {"fsdp_auto_wrap_policy": old_policy, "cpu_offload": torch_fsdp.CPUOffload(False)},
        "size": {"auto_wrap_policy": functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=60)},
        "policy object": {"auto_wrap_policy": wrap.ModuleWrapPolicy({Block})},
        "dict": {"auto_wrap_policy": dict(BLOCKS), "backward_prefetch": "post", "forward_prefetch": True},
        "enums": {
            "sharding_strategy": torch_fsdp.ShardingStrategy.SHARD_GRAD_OP,
            "backward_prefetch": torch_fsdp.BackwardPrefetch.BACKWARD_POST,
        },
        "strings": {"sharding_strategy": "shard_grad_op", "backward_prefetch": "BACKWARD_PRE"},
        "devices": {"device_id": torch.device("cpu"), "sync_module_states": True, "limit_all_gathers": True},
        "no prefetch": {"backward_prefetch": None, "use_orig_params": True},
        "group": {"process_group": dist.group.WORLD},
        "ignored": {"ignored_parameters": [model.embed.weight], "ignored_modules": [model.blocks[0].up]},
        "states": {"ignored_states": [model.embed.weight], "engine": "fsdp1"},
        "names": {"ignored_parameters": ["blocks.*.norm.*"], "ignored_modules": ["blocks.1.up"]},
        "flat": {"use_orig_params": False, "auto_wrap_policy": wrap.ModuleWrapPolicy({Block})},
        "mixed": {"mixed_precision": mixed, "engine": "fsdp1"},
        "mixed2": {"mixed_precision": torch_fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        "preset": {"mixed_precision": "bf16", "cpu_offload": True},
        "checkpointing": {"auto_wrap_policy": wrap.ModuleWrapPolicy({Block}), "activation_checkpointing": "full"},
        "config": {"config": mmfsdp.ShardConfig(wrap=BLOCKS), "sharding_strategy": "NO_SHARD"},
    }
    return table[name]


NAMES = (
    "nothing", "torch 1.11", "size", "policy object", "dict", "enums", "strings", "devices", "no prefetch", "group",
    "ignored", "states", "names", "flat", "mixed", "mixed2", "preset", "checkpointing", "config",
)  # fmt: skip


def train_with(rank: int, name: str) -> tuple[Any, int]:
    model = build(seed=1 + rank)
    wrapped = mmfsdp.FullyShardedDataParallel(model, **arguments(name, model))
    return train(wrapped, adamw(wrapped), steps=3), len(wrapped.plan.units)


@pytest.mark.parametrize("name", NAMES)
def test_arguments_of_any_age(name: str) -> None:
    single = build()
    reference = train(single, adamw(single), steps=3, sharded=False)
    tolerance = 1e-5 if name not in {"mixed", "mixed2", "preset"} else 0.05
    for curve, units in run_ranks(train_with, 2, name):
        assert difference(curve, reference) <= tolerance
        assert units == (3 if name in {"torch 1.11", "policy object", "dict", "config", "flat"} else units)


def behaves(rank: int, engine: str) -> None:
    model: Any = build()
    model.answer = 42
    config = {"engine": engine, "wrap": BLOCKS, "init": {"seed": 3}}
    given = copy.deepcopy(config)
    wrapped: Any = mmfsdp.FullyShardedDataParallel(model, config=config)
    assert config == given
    single = build()
    assert [name for name, _ in wrapped.named_parameters()] == [name for name, _ in single.named_parameters()]
    assert list(wrapped.state_dict()) == list(single.state_dict())
    assert (wrapped.answer, wrapped.head.out_features) == (42, 10)
    with pytest.raises(AttributeError, match="question"):
        _ = wrapped.question
    assert wrapped.plan is find_sharded_model(wrapped).plan
    assert wrapped.train().training
    assert not wrapped.eval().module.training
    assert not any(module.training for module in wrapped.modules())
    wrapped.train()
    units = [m for m in wrapped.modules() if isinstance(m, torch_fsdp.FullyShardedDataParallel)]
    assert len(units) == (3 if engine == "fsdp1" else 0)
    assert isinstance(wrapped, mmfsdp.FullyShardedDataParallel)
    assert isinstance(wrapped, torch_fsdp.FullyShardedDataParallel) == (engine == "fsdp1")

    optimizer = adamw(wrapped)
    with wrapped.no_sync():
        wrapped(X).sum().backward()
    wrapped(X).sum().backward()
    plain = single(X).sum() + single(X).sum()
    plain.backward()
    want = nn.utils.clip_grad_norm_(single.parameters(), 0.5)
    torch.testing.assert_close(wrapped.clip_grad_norm_(0.5).cpu(), want, rtol=1e-5, atol=0)
    optimizer.step()
    with wrapped.summon_full_params(wrapped):
        shapes = [tuple(param.shape) for param in wrapped.parameters()]
    assert shapes == [tuple(param.shape) for param in single.parameters()]

    report = wrapped.load_state_dict(single.state_dict())
    assert (report.missing_keys, report.unexpected_keys) == ([], [])
    weights = mmfsdp.model_state_dict(wrapped, rank0_only=False)
    assert all(torch.equal(weights[name], value) for name, value in single.state_dict().items())
    torch.testing.assert_close(wrapped(X), single(X))


@pytest.mark.parametrize("engine", ENGINES)
def test_it_stands_for_the_module(engine: str) -> None:
    run_ranks(behaves, 2, engine)


def items(rank: int) -> int:
    wrapped = mmfsdp.FullyShardedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert isinstance(wrapped[1], nn.ReLU)
    return len(wrapped.module)


def test_items_are_the_modules() -> None:
    assert run_ranks(items, 2) == [2, 2]


def test_arguments_are_not_changed() -> None:
    config = {"sharding": {"ignored_parameters": ["a"]}, "wrap": {"kind": "none"}}
    mixed = {"param_dtype": "bfloat16", "_module_classes_to_ignore": (nn.LayerNorm,), "cast_root_forward_inputs": False}
    policy, offload = {"kind": "size", "min_num_params": 5}, {"offload_params": True}
    given = [config, mixed, policy, offload]
    before = copy.deepcopy(given)
    for _ in range(2):
        means = translate_arguments(
            config=config, mixed_precision=mixed, auto_wrap_policy=policy, cpu_offload=offload, ignored_parameters=["b"]
        )
        assert means.config.sharding.ignored_parameters == ("a", "b")
        assert means.config.precision.cast_forward_inputs is False
        assert means.config.cpu_offload.enabled
    assert given == before


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"fsdp_auto_wrap_policy": old_policy, "auto_wrap_policy": old_policy}, "give only one of them"),
        ({"process_group": object(), "device_mesh": object()}, "give only one of them"),
        ({"sharding_strategy": "FULL_SHRAD"}, "Did you mean 'FULL_SHARD'"),
        (
            {"backward_prefetch": 3},
            "a BackwardPrefetch, or None for no prefetching, got 3 (type int).",
        ),
        ({"cpu_offload": "yes"}, "cpu_offload must be a bool, a CPUOffload or a dict, got 'yes' (type str)."),
        (
            {"mixed_precision": 16},
            "mixed_precision must be a MixedPrecision, a dict of its fields or a preset name, got 16",
        ),
        ({"ignored_states": [3]}, "ignored_states holds 3 (type int); give modules, parameters or names."),
        ({"config": 3}, "config must be a ShardConfig or a mapping, got 3 (type int)."),
    ],
)
def test_arguments_that_mean_nothing(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate_arguments(**kwargs)
    assert message in str(caught.value)
