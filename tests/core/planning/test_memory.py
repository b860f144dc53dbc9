"""Bytes of a step, worked out by hand for plans without ranks. What ranks really hold: tests/distributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mmfsdp import plan
from mmfsdp.basics.torch_releases import frees_received_first
from mmfsdp.errors import ConfigError, MeshError
from mmfsdp.planning import MemoryEstimate, estimate_memory, optimizer_named


def model() -> nn.Sequential:
    with torch.device("meta"):
        made = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4, bias=False), nn.BatchNorm1d(4))
    return made


def estimate(optimizer: str | int | None = None, rank: int = 0, **config: Any) -> MemoryEstimate:
    wrap = {"kind": "module_class", "classes": "Linear"}
    return estimate_memory(plan(model(), {"wrap": wrap, **config}, 4), optimizer, rank)


def test_parts_of_uneven_shards() -> None:
    # Rows of the shards: 6 = 2 + 2 + 2 + 0, 4 = 1 + 1 + 1 + 1.
    first = 4 * (2 * 8 + 2 + 6 + 1 + 1)
    last = 4 * (6 + 1 + 1)
    for rank, held in ((0, first), (3, last)):
        step = estimate("adam", rank)
        assert (step.parameters, step.gradients, step.optimizer_state) == (held, held, 2 * held + 4 * 5)
    assert step.buffers == 4 * (4 + 4) + 8
    # The root stays, before torch 2.15 also what it received. The largest unit has 8 rows of 8 weights and 1 bias
    # when it is padded.
    root, unit = 4 * (4 + 4), 4 * 8 * (8 + 1)
    assert step.gathered == root + 2 * unit + (0 if frees_received_first() else root)
    assert step.reducing == root + 4 * 6 * (8 + 1) + unit
    assert step.total == sum((last, step.buffers, last, 2 * last + 20, step.gathered, step.reducing))


def test_dtypes() -> None:
    wide, mixed, pure = (estimate("adam", precision=name) for name in ("fp32", "bf16", "bf16-pure"))
    assert (mixed.parameters, mixed.gradients, mixed.optimizer_state) == (wide.parameters, wide.gradients, 228)
    assert mixed.gathered < wide.gathered
    assert 2 * (pure.optimizer_state or 0) - 4 * 5 == wide.optimizer_state


def test_what_is_not_trained_has_no_state() -> None:
    frozen = model().requires_grad_(False)
    step = estimate_memory(plan(frozen, None, 4), "adamw")
    assert (step.gradients, step.optimizer_state, step.reducing) == (0, 0, 0)
    assert step.parameters > 0
    assert step.gathered > 0


def test_offloaded_is_all_that_is_kept_and_sharded() -> None:
    step = estimate("adam", cpu_offload={"enabled": True}, sharding={"ignored_parameters": ["1.weight"]})
    whole = 4 * 6 * 4
    assert step.on_cpu == step.parameters + step.gradients + (step.optimizer_state or 0) - 4 * whole - 4
    assert "of it in CPU memory" in str(step)


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("AdamW", {"lr": 1.0, "amsgrad": False}, "adamw"),
        ("AdamW", {"amsgrad": True}, "adamw-amsgrad"),
        ("SGD", {"momentum": 0}, "sgd"),
        ("SGD", {"momentum": 0.9, "nesterov": True}, "sgd-momentum"),
        ("RMSprop", {"momentum": 0.9, "centered": True}, "rmsprop-momentum-centered"),
        ("Lamb", {}, None),
        ("Adam", {"momentum": 0.9}, None),
    ],
)
def test_names_of_optimizers(name: str, settings: dict[str, Any], expected: str | None) -> None:
    assert optimizer_named(name, settings) == expected


def test_wrong_arguments() -> None:
    assert estimate().optimizer_state is None
    assert estimate(1).optimizer_state == estimate().parameters
    for wrong in ("adamv", -1, True):
        with pytest.raises(ConfigError, match=r"is not a known optimizer.* give the number of tensors"):
            estimate(wrong)
    with pytest.raises(MeshError, match="Rank 4 is not in 4 ranks"):
        estimate(rank=4)
