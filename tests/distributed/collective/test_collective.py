"""How ranks talk: a step that fails on one rank, ends one or loses one, and what each rank receives."""

from __future__ import annotations

import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import mmfsdp
from mmfsdp.collective.channels import wait_timeout
from mmfsdp.collective.scopes import new_scope, scope_of
from mmfsdp.collective.steps import (
    all_equal,
    any_of,
    broadcast_object,
    gather_objects,
    gather_to_first,
    on_all_ranks,
    scatter_objects,
    shared,
)
from mmfsdp.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    LostRankError,
    MmfsdpError,
    ShardStateError,
)
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.saving.writing.background import saver_of
from mmfsdp.testing import RankError, run_ranks, single_rank


def everything(rank: int) -> dict[str, Any]:
    scope = scope_of(None)
    return {
        "gathered": gather_to_first(scope, rank * 10),
        "scattered": scatter_objects(scope, [f"for {place}" for place in range(3)] if rank == 0 else None),
        "broadcast": broadcast_object(scope, f"of {rank}", origin=1),
        "all": gather_objects(scope, rank),
        "shared": shared(lambda: "found" if rank == 0 else None, scope),
        "equal": all_equal(scope, "same"),
        "different": all_equal(scope, f"{rank == 2}"),
        "any": any_of(scope, rank == 2),
        "none": any_of(scope, False),
        "again": scope_of(None) is scope,
    }


def test_groups_end_with_the_world(tmp_path: Path) -> None:
    """Or their threads would go on until the interpreter ends, which can abort the process."""
    for number in range(2):  # in the second world the groups are new
        with single_rank():
            model = mmfsdp.shard(torch.nn.Linear(4, 4), {})
            for name, blocking in (("whole", True), ("parts", False)):
                save = mmfsdp.save_checkpoint(tmp_path / f"{name}{number}", model, kind="sharded", blocking=blocking)
                if save is not None:
                    save.result()
            mesh = find_sharded_model(model).mesh
            channels = [scope_of(mesh).channel, saver_of(mesh).scope.channel]
            groups = [weakref.ref(channel.group) for channel in channels]  # type: ignore[attr-defined]
            assert None not in [group() for group in groups]
        assert [group() for group in groups] == [None, None]
        with pytest.raises(ShardStateError, match="The process group has ended"):
            channels[0].lowest([1])


def test_messages() -> None:
    for rank, found in enumerate(run_ranks(everything, 3)):
        assert found == {
            "gathered": [0, 10, 20] if rank == 0 else None,
            "scattered": f"for {rank}",
            "broadcast": "of 1",
            "all": [0, 1, 2],
            "shared": "found",
            "equal": True,
            "different": False,
            "any": True,
            "none": False,
            "again": True,
        }


def in_another_order(rank: int) -> tuple[list[int], int]:
    scope = scope_of(DeviceMesh("cpu", torch.tensor([[3, 1], [2, 0]]), mesh_dim_names=("a", "b")))
    return gather_objects(scope, rank), broadcast_object(scope, rank)


def test_the_order_is_that_of_the_mesh() -> None:
    assert run_ranks(in_another_order, 4) == [([3, 1, 2, 0], 3)] * 4


def within_sub_meshes(rank: int) -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    return gather_objects(scope_of(mesh["dp"]), rank)


def test_a_sub_mesh_talks_among_itself() -> None:
    assert run_ranks(within_sub_meshes, 4) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def apart_before(rank: int) -> tuple[list[int], list[int], list[int]]:
    """Ranks are in different numbers of groups before they meet: over the world, and within parts of it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    dist.new_group([0])
    if rank == 1:
        dist.new_group([1], use_local_synchronization=True)
    scope_of(None)
    if rank > 1:
        scope_of(mesh["dp"])
        dist.new_group([rank], use_local_synchronization=True)
    first = gather_objects(scope_of(mesh["dp"]), rank)
    second = gather_objects(scope_of(mesh["pp"]), rank)
    return first, second, gather_objects(scope_of(None), rank)


def test_ranks_in_different_numbers_of_groups_meet() -> None:
    found = run_ranks(apart_before, 4)
    assert [first for first, _, _ in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [second for _, second, _ in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [both for _, _, both in found] == [[0, 1, 2, 3]] * 4


def failing(rank: int, kind: str) -> str:
    def step() -> str:
        if rank == 1:
            raise {
                "ours": CheckpointError("No room.", file="x.pth"),
                "foreign": ValueError("foreign"),
                "exit": SystemExit(3),
                "interrupt": KeyboardInterrupt(),
            }[kind]
        return "fine"

    scope = scope_of(None)
    try:
        on_all_ranks(step, scope)
    except BaseException as error:
        assert on_all_ranks(lambda: "fine", scope) == "fine"  # nobody is left behind
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("kind", "own", "others"),
    [
        ("ours", "CheckpointError: No room.", "CheckpointError: Rank 1 failed: No room. [file='x.pth', rank=1]"),
        ("foreign", "ValueError: foreign", "MmfsdpError: Rank 1 failed: ValueError: foreign"),
        ("exit", "SystemExit: 3", "LostRankError: Rank 1 failed: It was ended by SystemExit (3) and left the others."),
        ("interrupt", "KeyboardInterrupt", "LostRankError: Rank 1 failed: It was ended by KeyboardInterrupt"),
    ],
)
def test_what_ends_a_step_on_one_rank_ends_it_on_all(kind: str, own: str, others: str) -> None:
    first, second, third = run_ranks(failing, 3, kind)
    assert second.startswith(own)
    assert first.startswith(others)
    assert first == third


def failing_apart(rank: int) -> tuple[str, str]:
    kinds: list[type[Exception]] = [IncompleteCheckpointError, CorruptCheckpointError, ValueError, CheckpointError]

    def step() -> None:
        if rank:
            raise kinds[rank - 1](f"Seen by rank {rank}.")

    try:
        on_all_ranks(step, scope_of(None))
    except Exception as error:
        return type(error).__name__, f"{error} <- {error.__cause__}"
    return "", ""


def test_ranks_that_fail_in_different_ways_raise_one_type() -> None:
    kinds, texts = zip(*run_ranks(failing_apart, 4), strict=True)
    assert kinds == (
        "IncompleteCheckpointError",
        "IncompleteCheckpointError",
        "IncompleteCheckpointError",
        "ValueError",
    )
    assert texts[1] == "Seen by rank 1. <- None"
    assert texts[2] == "Rank 1 failed: Seen by rank 1. [rank=1] <- Seen by rank 2."


def alone(rank: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMFSDP_TIMEOUT", "2")
        scope = new_scope(None)
        if rank == 1:
            time.sleep(4)
            return ""
        with pytest.raises(LostRankError) as caught:
            on_all_ranks(lambda: None, scope)
    assert isinstance(caught.value, RuntimeError)
    return str(caught.value)


def test_a_rank_that_calls_alone_is_told_so() -> None:
    message = run_ranks(alone, 2)[0]
    assert "did not make this call, which every rank must make" in message
    assert "longer than 2 s (MMFSDP_TIMEOUT" in message


def dying(rank: int) -> str:
    scope = scope_of(None)
    if rank == 2:
        os._exit(1)

    def go_on() -> None:
        for _ in range(100):
            on_all_ranks(lambda: time.sleep(0.05), scope)

    with pytest.raises(LostRankError) as caught:
        go_on()
    return str(caught.value)


def test_a_dead_rank_is_noticed_long_before_the_timeout() -> None:
    begin = time.monotonic()
    with pytest.raises(RankError, match="rank 2 died with exit code 1"):
        run_ranks(dying, 3)
    assert time.monotonic() - begin < 60


def stuck(rank: int) -> None:
    if rank == 1:
        time.sleep(60)


def test_a_rank_that_does_not_end_is_shown() -> None:
    with pytest.raises(
        RankError, match=r"did not end on rank 1 within 1 s(.|\n)*Rank 1 does not answer(.|\n)*in stuck"
    ):
        run_ranks(stuck, 2, timeout=1.0)


def test_the_timeout_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MMFSDP_TIMEOUT", raising=False)
    assert wait_timeout().total_seconds() == 3600
    monkeypatch.setenv("MMFSDP_TIMEOUT", "90")
    assert wait_timeout().total_seconds() == 90
    for wrong in ("soon", "0", "-3", "nan"):
        monkeypatch.setenv("MMFSDP_TIMEOUT", wrong)
        with pytest.raises(ConfigError, match="MMFSDP_TIMEOUT is"):
            wait_timeout()


class UnsendableError(MmfsdpError):
    def __init__(self, message: str, **context: object) -> None:
        super().__init__(message, lock=threading.Lock(), **context)


def raising_unsendable(rank: int) -> str:
    def step() -> None:
        if rank == 0:
            raise UnsendableError("It holds a lock.")

    with pytest.raises(MmfsdpError) as caught:
        on_all_ranks(step, scope_of(None))
    return caught.value.message


def test_an_error_that_cannot_be_sent_is_told_all_the_same() -> None:
    first, second = run_ranks(raising_unsendable, 2)
    assert first == "It holds a lock."
    assert "It holds a lock." in second
    assert "Rank 0 failed" in second
