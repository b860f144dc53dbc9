"""Ranks that differ, fail or die while they shard: every other rank is told, by name, what and where."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.models import BLOCKS, Block, build
from torch import nn

import mmfsdp
from mmfsdp.errors import LostRankError, MmfsdpError, RankMismatchError, ShardStateError
from mmfsdp.sharding import agreement
from mmfsdp.testing import close_ranks, run_ranks


def differing(rank: int, what: str) -> tuple[str, bool]:
    """The message, and whether the model is as it was; rank 2 differs."""
    odd = rank == 2
    model: nn.Module = build("Tied")
    before = {name: (type(param), param.device) for name, param in model.named_parameters()}
    config: dict[str, Any] = {"wrap": BLOCKS}
    with pytest.MonkeyPatch.context() as patch:
        if what == "torch" and odd:
            patch.setattr(torch, "__version__", "2.9.0")
        if what == "mmfsdp" and odd:
            patch.setattr(agreement, "__version__", "0.0.9")
        if what == "devices":
            patch.setattr(agreement, "current_accelerator", lambda: "cuda")
            patch.setattr(torch.accelerator, "device_count", lambda: 3 if odd else 4)
        if what == "no device":
            patch.setattr(agreement, "current_accelerator", lambda: None if odd else "cuda")
            patch.setattr(torch.accelerator, "device_count", lambda: 4)
        if what == "config" and odd:
            config["prefetch"] = {"forward": 1}
        if what == "model" and odd:
            model.blocks[0].norm = nn.Identity()  # type: ignore[union-attr, index]
        with pytest.raises(RankMismatchError) as caught:
            mmfsdp.shard(model, config)
    after = {name: (type(param), param.device) for name, param in model.named_parameters()}
    return str(caught.value), what == "model" or before == after


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "torch",
            f"Ranks differ: ranks 0, 1, 3 have torch {torch.__version__}, mmfsdp {mmfsdp.__version__}; rank 2 has "
            f"torch 2.9.0, mmfsdp {mmfsdp.__version__}. Install the same versions on every host.",
        ),
        ("mmfsdp", f"rank 2 has torch {torch.__version__}, mmfsdp 0.0.9."),
        ("devices", "Ranks differ: ranks 0, 1, 3 have 4 cuda devices; rank 2 has 3 cuda devices. Give every process"),
        ("no device", "Ranks differ: ranks 0, 1, 3 have 4 cuda devices; rank 2 has no accelerator. Give every process"),
        (
            "config",
            "Ranks 0 and 2 were given different settings for the same model:\n~ forward_prefetch: 0 -> 1\n"
            "Use the same config and policy on every rank. Ranks that are alike: 0, 1, 3; 2.",
        ),
        ("model", "Ranks 0 and 2 were given different models. Only rank 0 has: ['module blocks.0.norm LayerNorm'"),
    ],
)
def test_a_rank_that_differs_is_named_on_all_before_anything_changes(what: str, message: str) -> None:
    results = run_ranks(differing, 4, what)
    assert len(set(results)) == 1
    text, unchanged = results[0]
    assert message in text
    assert unchanged


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_an_optimizer_of_before_sharding_on_one_rank_is_an_error_on_all(strategy: str, kind: str) -> None:
    own, other = run_ranks(old_optimizer, 2, strategy, kind, timeout=60)
    assert own.startswith("AdamW holds 2 of the parameters that the model had before it was sharded.")
    assert other.startswith("Rank 0 failed: AdamW holds 2 of the parameters")


def old_optimizer(rank: int, strategy: str, kind: Any) -> str:
    model = nn.Linear(4, 4)
    old = torch.optim.AdamW(model.parameters())
    mmfsdp.shard(model, {"wrap": {"kind": "size", "min_num_params": 1}, "sharding": strategy})
    optimizer = old if rank == 0 else torch.optim.AdamW(model.parameters())
    with pytest.raises(ShardStateError) as caught:
        mmfsdp.optim_state_dict(model, optimizer, kind)
    return str(caught.value)


def on_two_hosts(rank: int, kinds: list[str], counts: list[int]) -> str:
    """Shard on two hosts of two ranks each; return the error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "current_accelerator", lambda: kinds[rank])
        patch.setattr(agreement, "kernel_of", lambda: f"node-{rank // 2}")
        patch.setattr(torch.accelerator, "device_count", lambda: counts[rank])
        try:
            mmfsdp.shard(build("Tied"), {})
        except RankMismatchError as error:
            return str(error)
    return ""


def test_hosts_may_have_different_numbers_of_devices_of_one_type() -> None:
    assert run_ranks(on_two_hosts, 4, ["cuda"] * 4, [8, 8, 4, 4]) == [""] * 4
    advice = (
        " Give every process of a host equally many devices, of the same type on all hosts (look at "
        "CUDA_VISIBLE_DEVICES), or set init.device: cpu."
    )
    found = "Ranks differ: ranks 0, 1 have 8 cuda devices; rank 2 has 4 cuda devices; rank 3 has 1 cuda device."
    assert run_ranks(on_two_hosts, 4, ["cuda"] * 4, [8, 8, 4, 1]) == [found + advice] * 4
    found = "Ranks differ: ranks 0, 1 have 8 cuda devices; ranks 2, 3 have 8 xpu devices."
    assert run_ranks(on_two_hosts, 4, ["cuda", "cuda", "xpu", "xpu"], [8] * 4) == [found + advice] * 4


def test_devices_do_not_count_where_the_cpu_is_asked_for() -> None:
    run_ranks(on_the_cpu, 2)


def on_the_cpu(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "current_accelerator", lambda: "cuda" if rank else None)
        patch.setattr(torch.accelerator, "device_count", lambda: 4)
        mmfsdp.shard(build("Tied"), {"init": {"device": "cpu"}})


class Breaking(Block):
    """Cannot be sharded on the last rank, as if memory were short."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__" and dist.get_rank() == dist.get_world_size() - 1:
            raise MemoryError("no room")
        super().__setattr__(name, value)


def short_of_memory(rank: int, where: str) -> str:
    kind = Breaking if where == "shard" else Block
    with torch.device("meta"):
        model = nn.Sequential(kind(4), Block(4), Block(4))

    def init(module: nn.Module) -> None:
        if where == "init" and rank == 2 and isinstance(module, nn.LayerNorm):
            raise MemoryError("no room")
        module.reset_parameters()

    with pytest.raises((MmfsdpError, MemoryError)) as caught:
        mmfsdp.shard(model, {"wrap": BLOCKS}, param_init_fn=init)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("where", ["init", "shard"])
def test_a_rank_that_fails_in_the_middle_does_not_leave_the_others_waiting(where: str) -> None:
    told = run_ranks(short_of_memory, 3, where, timeout=60)
    assert told[2] == "MemoryError: no room"
    assert told[0] == told[1]
    assert told[0].startswith("MmfsdpError: Rank 2 failed: MemoryError: no room")


def in_a_short_lived_world(rank: int, folder: str, how: str) -> None:
    """Shard from meta on three ranks; the last one is lost in the middle. Others write down what they were told."""
    os.environ["MMFSDP_TIMEOUT"] = "8"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 3)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=8))
    calls = 0

    def init(module: nn.Module) -> None:
        nonlocal calls
        calls += 1
        if rank == 2 and calls == 5:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        module.reset_parameters()

    with torch.device("meta"):
        model = build("Tied")
    begin = time.monotonic()
    try:
        mmfsdp.shard(model, {"wrap": BLOCKS}, param_init_fn=init)
    except Exception as error:
        told = f"{type(error).__name__} after {time.monotonic() - begin:.0f} s: {error}"
    else:
        told = "nothing"
    Path(folder, f"told-{rank}").write_text(told)
    os._exit(0)


@pytest.mark.sample("killed")
@pytest.mark.parametrize("how", ["killed", "stuck"])
def test_survivors_of_a_lost_rank_get_a_named_error_within_the_timeout(how: str, tmp_path: Path) -> None:
    """Fails if a torch error, or nothing for half an hour, is all that they get."""
    close_ranks()
    context = multiprocessing.get_context("forkserver")  # that of run_ranks, with what it has imported
    processes = [context.Process(target=in_a_short_lived_world, args=(rank, str(tmp_path), how)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes[:2]:
        process.join(90)
    processes[2].kill()
    for process in processes:
        process.join()
    for rank in (0, 1):
        told = (tmp_path / f"told-{rank}").read_text()
        assert told.startswith(LostRankError.__name__)
        assert int(told.split()[2]) < 30
