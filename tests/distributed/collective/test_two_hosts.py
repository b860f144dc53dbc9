"""Two hosts: started as docs/howto/multi_node.md says, training as one process; own disks; a host dies."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.hosts import ROOT, Host, hosts_or_skip
from tests.forked_scripts import environ_alone, python, run_script

from mmfsdp.checkpoint import verify

PAGE = ROOT / "docs" / "howto" / "multi_node.md"
LOSS = re.compile(r"step (\d+): loss ([\d.]+)")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Host, Host]]:
    """A folder that both hosts see, and the hosts."""
    folder = tmp_path_factory.mktemp("hosts")
    with hosts_or_skip(folder) as pair:
        yield folder, *pair


def documented() -> list[list[str]]:
    """The arguments of all torchrun commands of the page."""
    text = re.sub(r"\\\n\s*", " ", PAGE.read_text())
    return [shlex.split(line) for line in re.findall(r"^\$ torchrun (.*)$", text, flags=re.MULTILINE)]


def here(arguments: list[str], folder: Path, *, per_node: int, kind: str, steps: int) -> list[str]:
    """A documented command on this machine: with a folder that there is, and fewer ranks per node."""
    words = [str(folder) if word == "/shared/run" else word for word in arguments]
    words[words.index("--nproc-per-node") + 1] = str(per_node)
    return [python(), "-m", "torch.distributed.run", *words, "--kind", kind, "--steps", str(steps)]


def losses_of(output: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in LOSS.findall(output)}


def ended(running: list[subprocess.Popen[str]], seconds: float = 200) -> list[tuple[str, str]]:
    """What processes printed, once all have ended well."""
    said = []
    try:
        for process in running:
            said.append(process.communicate(timeout=seconds))
            assert process.returncode == 0, said[-1][1][-4000:]
    finally:
        for process in running:
            process.kill()
    return said


def alone(arguments: list[str]) -> dict[int, float]:
    """Run a command on this machine, and return the losses that it printed."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        arguments,
        cwd=ROOT,
        env={
            **inherited,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return losses_of(done.stdout)


def unsharded(folder: Path, steps: int) -> dict[int, float]:
    """Run steps in one process, and return the losses that it printed."""
    script = ROOT / "examples" / "multi_node" / "train.py"
    words = ["--dir", str(folder), "--kind", "full", "--steps", str(steps)]
    done = run_script(script, ROOT, environ_alone(), 200, words)
    assert done.returncode == 0, done.stderr[-4000:]
    return losses_of(done.stdout)


@pytest.mark.timeout(300)
def test_two_commands_of_the_page_train_as_one_process(hosts: tuple[Path, Host, Host]) -> None:
    folder, first, second = hosts
    run = folder / "short"
    static = [words for words in documented() if "--node-rank" in words]
    words = [here(command, run, per_node=2, kind="local", steps=2) for command in static]
    said = ended([host.start(command) for host, command in zip((first, second), words, strict=True)])
    assert losses_of(said[0][0] + said[1][0]) == pytest.approx(unsharded(folder / "short_reference", 2), abs=2e-5)
    assert verify(run / "step_2").ok


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_commands_of_the_page_train_as_one_process(hosts: tuple[Path, Host, Host]) -> None:
    folder, first, second = hosts
    run = folder / "run"
    standalone, *several = documented()
    static = [words for words in several if "--node-rank" in words]
    dynamic = [words for words in several if "--rdzv-backend" in words]
    assert (len(static), len(dynamic), len(several)) == (2, 1, 3), "every command of the page is run here"
    expected = unsharded(folder / "reference", 9)
    # Each run goes on from the checkpoint of the one before, which is of another kind, and the last on one host.
    found: dict[int, float] = {}
    for commands, kind, steps in ((static, "sharded", 3), (dynamic * 2, "local", 6)):
        words = [here(command, run, per_node=2, kind=kind, steps=steps) for command in commands]
        said = ended([host.start(command) for host, command in zip((first, second), words, strict=True)])
        found |= losses_of(said[0][0] + said[1][0])
    found |= alone(here(standalone, run, per_node=1, kind="full", steps=9))
    assert sorted(found) == sorted(expected) == list(range(9))
    assert found == pytest.approx(expected, abs=2e-5)
    last, reference = (torch.load(place / "step_9.pth", weights_only=True) for place in (run, folder / "reference"))
    for name, weight in reference["state_dict"].items():
        torch.testing.assert_close(last["state_dict"][name], weight, rtol=1e-4, atol=1e-5)
    assert sorted(path.name for path in run.iterdir()) == ["run.json", "step_3", "step_6", "step_9.pth"]
    assert all(verify(path).ok for path in run.glob("step_*"))


SCENARIOS: dict[str, tuple[str, str, int, float]] = {
    "in training": ("train", "", 1, 0),
    "early in a save of shards": ("save", "sharded", 1, 0.2),
    "late in a save of shards": ("save", "sharded", 1, 0.8),
    "in a save of local files": ("save", "local", 1, 0.6),
    "in a save of one file": ("save", "full", 1, 0.5),
    "in a save of shards, with the first rank": ("save", "sharded", 0, 0.6),
    "in a load": ("load", "sharded", 1, 0.5),
    "own disks, full": ("own disk", "full", -1, 0),
    "own disks, local": ("own disk", "local", -1, 0),
    "own disks, sharded": ("own disk", "sharded", -1, 0),
}


@pytest.fixture(scope="module")
def outcomes(hosts: tuple[Path, Host, Host]) -> tuple[Path, dict[str, dict[int, Any]]]:
    """What became of each rank in each scenario; nothing of those that were killed."""
    folder, first, second = hosts
    folder = folder / "dying"
    folder.mkdir()
    script = [python(), str(ROOT / "tests" / "distributed" / "dying.py"), str(folder)]
    scenarios = json.dumps([*SCENARIOS.values()])
    environ = {"MASTER_ADDR": first.address}
    running = [host.start([*script, str(node), scenarios], environ) for node, host in enumerate((first, second))]
    for _, errors in ended(running, 280):
        print(errors)  # shown where a test fails
    found: dict[str, dict[int, Any]] = {}
    for number, name in enumerate(SCENARIOS):
        files = {rank: folder / f"{number}-{rank}.json" for rank in range(4)}
        found[name] = {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}
    return folder, found


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name, scenario in SCENARIOS.items() if scenario[2] >= 0])
def test_a_host_that_dies(name: str, outcomes: tuple[Path, dict[str, dict[int, Any]]]) -> None:
    what, kind, victim, _ = SCENARIOS[name]
    folder, found = outcomes
    survivors = found[name]
    assert sorted(survivors) == ([2, 3] if victim == 0 else [0, 1])
    for rank, said in survivors.items():
        # In training the collectives are torch's, and so is the error. LostRankError is one of ours, as is the error of
        # a save whose collectives are those of torch's DCP.
        assert ("RuntimeError" if what == "train" else "MmfsdpError") in said["kinds"], (rank, said)
        assert re.search("[Cc]onnection|[Tt]imed out", said["message"]), (rank, said)
        assert said["seconds"] < 2 * 20 + 5, (rank, said)
    if what == "train":
        return
    place = folder / str([*SCENARIOS].index(name)) / ("full.pth" if kind == "full" else kind)
    assert verify(place).ok
    if victim != 0:  # the first rank cleans up, if it is left
        assert [*place.parent.iterdir()] == [place]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["local", "sharded", "full"])
def test_disks_that_hosts_do_not_share(kind: str, outcomes: tuple[Path, dict[str, dict[int, Any]]]) -> None:
    said = outcomes[1][f"own disks, {kind}"]
    assert sorted(said) == [0, 1, 2, 3]
    if kind == "full":  # the first rank writes it alone
        assert [said[rank]["kinds"] for rank in range(4)] == [[]] * 4
        assert [said[rank]["left"] for rank in range(4)] == [["full.pth"]] * 2 + [[]] * 2
        for rank in range(4):  # the other host cannot load it, which no rank is left to find out alone
            loaded = said[rank]["loaded"]
            assert "CheckpointNotFoundError" in loaded["kinds"], loaded
            assert all(host in loaded["message"] for host in ("node-a", "node-b")), loaded
        return
    for rank in range(4):
        assert "CheckpointError" in said[rank]["kinds"], said[rank]
        assert all(host in said[rank]["message"] for host in ("node-a", "node-b")), said[rank]
        assert not [name for name in said[rank]["left"] if kind in name], said[rank]
