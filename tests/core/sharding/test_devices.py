"""Which device is taken, by the accelerator that a machine has and the backends of its process group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mmfsdp
from mmfsdp.errors import ConfigError, MeshError
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.sharding.devices import backends_of, check_offload, device_index, pick_device_type
from mmfsdp.testing import run_ranks, single_rank

GLOO = {"cpu": "gloo", "cuda": "gloo"}
NCCL = {"cuda": "nccl"}
BOTH = {"cpu": "gloo", "cuda": "nccl"}


@pytest.mark.parametrize(
    ("wanted", "accelerator", "backends", "device"),
    [
        ("auto", None, GLOO, "cpu"),
        ("auto", "cuda", NCCL, "cuda"),
        ("auto", "cuda", BOTH, "cuda"),
        ("auto", "xpu", {"cpu": "gloo", "xpu": "xccl"}, "xpu"),
        ("auto", "cuda", {"cpu": "ucc", "cuda": "ucc"}, "cuda"),
        ("cpu", "cuda", BOTH, "cpu"),
        ("cuda", "cuda", GLOO, "cuda"),
        ("cpu", None, {}, "cpu"),
    ],
)
def test_the_accelerator_is_taken_where_the_process_group_reaches_it(
    wanted: str, accelerator: str | None, backends: dict[str, str], device: str
) -> None:
    assert pick_device_type(wanted, accelerator, backends) == (device, None)


@pytest.mark.parametrize(
    ("accelerator", "backends", "lacks", "remedy"),
    [
        ("cuda", GLOO, "only gloo", "Call init_process_group('cpu:gloo,cuda:nccl') to use both."),
        ("xpu", GLOO, "no backend", "Call init_process_group('cpu:gloo,xpu:xccl') to use both."),
    ],
)
def test_why_it_is_the_cpu_is_said(accelerator: str, backends: dict[str, str], lacks: str, remedy: str) -> None:
    """Fails if an accelerator lies idle and nothing says so."""
    device, why = pick_device_type("auto", accelerator, backends)
    assert device == "cpu"
    assert why is not None
    assert f"has an accelerator ({accelerator}), but the process group has {lacks} for it" in why
    assert remedy in why


@pytest.mark.parametrize(
    ("wanted", "accelerator", "backends", "message"),
    [
        ("cuda", None, GLOO, "init.device is 'cuda', but torch sees no CUDA device. Use 'auto' or 'cpu'."),
        ("xpu", "cuda", BOTH, "torch sees no XPU device, only cuda."),
        ("cpu", "cuda", NCCL, "no backend for it (it has cuda: nccl). Call init_process_group('cpu:gloo,cuda:nccl')"),
        ("npu", None, GLOO, "init.device is 'npu', which this torch does not know. Import the extension"),
    ],
)
def test_a_device_that_cannot_be_had(
    wanted: str, accelerator: str | None, backends: dict[str, str], message: str
) -> None:
    with pytest.raises(MeshError) as caught:
        pick_device_type(wanted, accelerator, backends)
    assert message in str(caught.value)


def test_offloading_needs_a_backend_for_the_cpu() -> None:
    check_offload("cuda", BOTH)
    check_offload("cpu", GLOO)
    with pytest.raises(ConfigError) as caught:
        check_offload("cuda", NCCL)
    assert str(caught.value).endswith(
        "no backend for the CPU (it has cuda: nccl). Call init_process_group('cpu:gloo,cuda:nccl') to use both. "
        "[config='cpu_offload']"
    )


def test_each_process_of_a_machine_has_a_device() -> None:
    assert [device_index(rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert device_index(3, 1) == 0  # the launcher shows each process its own
    with pytest.raises(MeshError) as caught:
        device_index(4, 4)
    assert "LOCAL_RANK is 4, but this process sees 4 devices. Start at most 4 processes" in str(caught.value)


def test_backends_are_those_of_the_group() -> None:
    with single_rank():
        assert backends_of()["cpu"] == "gloo"
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo", store=store, rank=0, world_size=1)
    try:
        assert backends_of() == {"cpu": "gloo"}
    finally:
        dist.destroy_process_group()


def test_a_plan_prints_its_device() -> None:
    model = nn.Linear(2, 2)
    assert "2 ranks, device auto" in mmfsdp.plan(model, {}, 2).table()
    assert "2 ranks, device xpu" in mmfsdp.plan(model, {"init": {"device": "xpu"}}, 2).table()


def applied(rank: int) -> str:
    return find_sharded_model(mmfsdp.shard(nn.Linear(2, 2))).plan.table()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without an accelerator")
def test_an_applied_plan_prints_the_device_it_runs_on() -> None:
    for table in run_ranks(applied, 2):
        assert "2 ranks, device cpu" in table


def test_a_device_type_is_a_word() -> None:
    with pytest.raises(ConfigError, match=r"init\.device"):
        mmfsdp.ShardConfig(init={"device": "cuda:0"})
