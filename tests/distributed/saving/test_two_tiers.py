"""Checkpoints on the nodes' own disks: a node that loses its disk gets its shards from the copies on the other one."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.hosts import ROOT, Host, hosts_or_skip
from tests.forked_scripts import python
from torch import nn

import mmfsdp
from mmfsdp import errors
from mmfsdp.saving.nodes.files import Newest, NodeFile, choose, holders, plan_transfers
from mmfsdp.testing import run_ranks

PROGRAM = ROOT / "tests" / "distributed" / "two_tiers_program.py"


@pytest.mark.parametrize(
    ("nodes", "kept_by"),
    [
        ("a", [None]),
        ("aa", [None, None]),
        ("ab", [1, 0]),
        ("aabb", [2, 3, 0, 1]),
        ("abab", [1, 0, 3, 2]),
        ("aabbcc", [2, 3, 4, 5, 0, 1]),
        ("aaab", [3, 3, 3, 0]),
    ],
)
def test_copies_lie_on_the_next_node(nodes: str, kept_by: list[int | None]) -> None:
    assert holders(nodes) == kept_by


def files(step: int, *owners: int, save: str = "x", ranks: int = 2) -> list[NodeFile]:
    return [NodeFile(step, owner, ranks, save, "model", None, 1, 1) for owner in owners]


@pytest.mark.parametrize(
    ("reports", "step", "ranks"),
    [
        ([files(4, 0, 1), files(4, 1, 0)], 4, 2),
        ([files(4, 0, 1), []], 4, 2),
        ([files(4, 0), []], None, 0),
        ([files(4, 0) + files(2, 0, 1), files(2, 0, 1)], 2, 2),
        ([files(4, 0, save="x"), files(4, 1, save="y")], None, 0),
        ([files(4, 0, 1, ranks=3), files(4, 0, 1, ranks=3)], None, 0),
        ([files(4, 0, 1, ranks=3), files(4, 2, ranks=3)], 4, 3),
        ([files(4, 0, 1) + files(6, 0, 1, 2, ranks=3)], 6, 3),
    ],
)
def test_the_newest_step_that_is_whole(reports: list[list[NodeFile]], step: int | None, ranks: int) -> None:
    found = choose(reports)
    assert (None if found is None else found.step, 0 if found is None else found.ranks) == (step, ranks)


@pytest.mark.parametrize(
    ("holders", "needs", "nodes", "transfers"),
    [
        ({0: [0], 1: [1]}, [{0}, {1}], "ab", []),
        ({0: [0], 1: [0]}, [{0}, {1}], "ab", [(0, 1, 1)]),
        ({0: [0], 1: [0]}, [{0}, {1}], "aa", []),
        ({0: [0], 1: [0]}, [{0}, {0}, {1}, {1}], "aabb", [(0, 2, 1)]),  # once to a node
        ({0: [0], 1: [1], 2: [1]}, [{0, 1}, {1, 2}], "ab", [(1, 0, 1)]),
        ({0: [0], 1: [0, 1], 2: [1]}, [set(), set(), {0, 1, 2}], "abc", [(0, 2, 0), (0, 2, 1), (1, 2, 2)]),
    ],
)
def test_each_node_gets_what_its_ranks_need(
    holders: dict[int, list[int]], needs: list[set[int]], nodes: str, transfers: list[tuple[int, int, int]]
) -> None:
    assert plan_transfers(Newest(4, len(holders), holders), needs, nodes) == transfers


def run(
    pair: tuple[Host, Host], folder: Path, stop: int, how: str, ranks: tuple[int, int] = (2, 2)
) -> list[tuple[str, str]]:
    """Run some ranks on each host."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    running = []
    for node, host in enumerate(pair):
        for local in range(ranks[node]):
            rank, size = node * ranks[0] + local, sum(ranks)
            environ = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": pair[0].address}
            command = [python(), str(PROGRAM), str(folder / "disk"), str(stop), how]
            running.append(host.start(command, {**environ, "MASTER_PORT": port, "MMFSDP_TIMEOUT": "60"}))
    said = []
    try:
        for process in running:
            said.append(process.communicate(timeout=100))
            assert process.returncode == 0, said[-1][1][-4000:]
    finally:
        for process in running:
            process.kill()
    return said


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_node_that_loses_its_disk(tmp_path: Path) -> None:
    with hosts_or_skip(tmp_path) as pair:
        run(pair, tmp_path, 5, "dies")  # step 4 is on the disks
        lost = "; ".join(f"rm -rf {tmp_path}/disk/{name}" for name in ("fast", "durable"))
        pair[1].start(["sh", "-c", lost]).communicate()
        resumed = run(pair, tmp_path, 8, "ends")
        pair[0].start(["sh", "-c", lost]).communicate()
        pair[1].start(["sh", "-c", lost]).communicate()
        whole = run(pair, tmp_path, 8, "ends")
    ends = [[out.splitlines()[-1].split() for out, _ in told] for told in (resumed, whole)]
    assert [begin for begin, *_ in ends[0]] == ["4"] * 4
    assert [weights for _, *weights in ends[0]] == [weights for _, *weights in ends[1]]
    assert "The files of ranks [2, 3] of step 4 came from other nodes." in resumed[0][1]


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_other_ranks_get_what_they_need_from_who_has_it(tmp_path: Path) -> None:
    with hosts_or_skip(tmp_path) as pair:
        saved = run(pair, tmp_path, 5, "dies")  # step 4 is on the disks
        lost = f"rm -rf {tmp_path}/disk/fast {tmp_path}/disk/durable"
        pair[1].start(["sh", "-c", lost]).communicate()
        fewer = run(pair, tmp_path, 4, "dies", (1, 1))  # node-b gets what its rank needs
        alone = run(pair, tmp_path, 7, "dies", (3, 0))  # node-b is gone; step 6 is on the disk
        more = run(pair, tmp_path, 6, "ends", (2, 2))
    at_four = {tuple(line.split()[1:]) for out, _ in saved for line in out.splitlines() if line.startswith("4 ")}
    assert len(at_four) == 1
    for out, _ in fewer:
        assert out.splitlines()[0].split()[0] == "4"
        assert tuple(out.splitlines()[0].split()[1:]) in at_four
    assert "The files of ranks [1, 2] of step 4 came from other nodes." in fewer[0][1]
    at_six = {tuple(line.split()[1:]) for out, _ in alone for line in out.splitlines() if line.startswith("6 ")}
    assert {tuple(out.splitlines()[0].split()[1:]) for out, _ in more} == at_six


def on_one_node(rank: int, folder: str, stop: int, width: int = 4) -> Any:
    """Train with saves to a fast directory at every step, and durable ones at every third."""
    torch.manual_seed(0)
    model = mmfsdp.shard(nn.Linear(6, width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fast = {"fast_directory": f"{folder}/fast", "fast_every_steps": 1}
    try:
        manager = mmfsdp.CheckpointManager(f"{folder}/{width}", model, optimizer, every_steps=3, **fast)
    except errors.RunDirectoryError as error:
        return str(error)
    with manager:
        begin = manager.resume()
        for step in range(begin, stop):
            model(torch.full((2, 6), float(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.step(step + 1)
    return begin, manager.failed_saves, mmfsdp.model_state_dict(model, rank0_only=False)


@pytest.mark.exhaustive
def test_the_newest_of_both_tiers_is_resumed(tmp_path: Path) -> None:
    whole = run_ranks(on_one_node, 2, str(tmp_path / "whole"), 8)[0][2]
    assert run_ranks(on_one_node, 2, str(tmp_path), 5)[0][:2] == (0, 0)
    assert sorted(path.name for path in (tmp_path / "fast" / "rank0").iterdir()) == ["step_5.json", "step_5.pth"]
    fewer, damaged = (tmp_path.with_name(f"{tmp_path.name}-{name}") for name in ("fewer", "damaged"))
    for copy in (fewer, damaged):
        shutil.copytree(tmp_path, copy)
    begin, _, weights = run_ranks(on_one_node, 2, str(tmp_path), 8)[1]
    assert begin == 5
    torch.testing.assert_close(weights, whole, rtol=0, atol=0)
    begin, _, weights = run_ranks(on_one_node, 1, str(fewer), 8)[0]
    assert begin == 5
    torch.testing.assert_close(weights, whole, rtol=1e-6, atol=1e-7)
    # Where a rank's file is damaged and has no copy, the durable one counts.
    path = damaged / "fast" / "rank1" / "step_5.pth"
    path.write_bytes(b"\0" * path.stat().st_size)
    assert run_ranks(on_one_node, 2, str(damaged), 4)[0][0] == 3
    for text in run_ranks(on_one_node, 2, str(tmp_path), 4, 5):
        assert "holds checkpoints of run None or of another model" in text


@pytest.mark.exhaustive
def test_a_run_goes_on_from_the_nodes_on_other_ranks(tmp_path: Path) -> None:
    whole = run_ranks(on_one_node, 1, str(tmp_path / "whole"), 8, 5)[0][2]
    for ranks, stop in ((4, 2), (2, 4), (4, 5), (3, 7), (4, 8)):  # step 8 is durable in none, step 6 before the last
        begin, failed, weights = run_ranks(on_one_node, ranks, str(tmp_path), stop, 5)[0]
        assert (begin, failed) == ({2: 0, 4: 2, 5: 4, 7: 5, 8: 7}[stop], 0)
    torch.testing.assert_close(weights, whole, rtol=1e-6, atol=1e-7)
