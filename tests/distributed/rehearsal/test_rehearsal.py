"""What a rehearsal predicts is what ranks do: peak memory, static bytes and collectives of real steps over gloo."""

from __future__ import annotations

from typing import Any

import pytest
from tests.distributed.measured import CASES as FAMILIES
from tests.distributed.measured import SETTINGS, measure, rehearsed

from mmfsdp.basics.torch_releases import SHARDS_INTEGERS, torch_has
from mmfsdp.testing import run_ranks

SAMPLES = 4
AVERAGED = ("vit", "resnet", "detr", "bert")  # families whose weights are averaged: with each engine, and with buffers

# Each family once, each setting several times.
CASES: list[tuple[str, str, str, int, int, str]] = [
    ("vit", "fp32", "none", 1, 2, "fsdp2"),
    ("swin", "bf16", "full", 1, 2, "fsdp2"),
    ("convnext", "fp32", "none", 2, 2, "fsdp2"),
    ("resnet", "bf16", "ops", 1, 2, "fsdp2"),
    ("mae", "bf16", "selective", 1, 2, "fsdp2"),
    ("segformer", "fp32", "full", 1, 2, "fsdp2"),
    ("detr", "fp32", "none", 1, 2, "replicate"),
    ("llama", "bf16", "ops", 1, 2, "fsdp2"),
    ("gpt2", "bf16", "none", 2, 2, "fsdp2"),
    ("bert", "fp32", "selective", 1, 2, "fsdp1"),
    ("qlora", "bf16", "full", 1, 2, "fsdp2"),
    ("llama", "fp32", "full", 1, 4, "hybrid"),
    ("lstm", "fp32", "none", 1, 2, "fsdp2"),
    ("speech", "bf16", "full", 1, 2, "fsdp2"),
    ("gan", "bf16", "full", 1, 2, "fsdp2"),
    ("experts", "bf16", "full", 1, 2, "fsdp2"),
    ("bags", "bf16", "none", 2, 2, "fsdp2"),
    ("graph", "fp32", "full", 1, 2, "fsdp2"),
    ("fourier", "fp32", "ops", 1, 2, "fsdp2"),
    ("video", "fp32", "none", 1, 2, "fsdp2"),
    ("unet", "bf16", "selective", 1, 2, "fsdp2"),
]


def settings_of(family: str, precision: str, activations: str, engine: str) -> dict[str, Any]:
    config: dict[str, Any] = {"precision": precision, **SETTINGS[activations]}
    config["wrap"] = {"kind": "module_class", "classes": list(FAMILIES[family].layer)}
    if engine == "hybrid":
        return {**config, "sharding": {"strategy": "HYBRID_SHARD", "shard_size": 2}}
    return {**config, "engine": engine}


def measured_by_the_first(rank: int, *given: Any) -> Any:
    return measure(rank, *given, only_first=True)


@pytest.mark.sample(
    "bert-fp32-selective-1-2-fsdp1",
    "lstm-fp32-none-1-2-fsdp2",
    "llama-fp32-full-1-4-hybrid",
    "gpt2-bf16-none-2-2-fsdp2",
)
@pytest.mark.parametrize(("family", "precision", "activations", "accumulate", "ranks", "engine"), CASES)
def test_a_step(family: str, precision: str, activations: str, accumulate: int, ranks: int, engine: str) -> None:
    if family == "qlora" and not torch_has(SHARDS_INTEGERS):
        pytest.skip("this torch shards no packed weights")
    config = settings_of(family, precision, activations, engine)
    averages = family in AVERAGED
    peak, static, issued = run_ranks(measured_by_the_first, ranks, family, config, SAMPLES, accumulate, averages)[0]
    found = rehearsed(family, config, SAMPLES, accumulate, ranks, averages)
    assert found.peak.nbytes == pytest.approx(peak, rel=0.05)
    assert {kind: found.static.get(kind) for kind in static} == static  # FSDP1 keeps gradients, too
    assert [(item.nbytes, item.ranks, item.stride) for item in found.collectives] == [
        (nbytes, len(group), group[1] - group[0] if group[1:] else 0) for _, nbytes, group in issued
    ]
    assert [item.name.replace("_", "") for item in found.collectives] == [
        name.removeprefix("c10d::").replace("_", "").removesuffix("base") for name, _, _ in issued
    ]
