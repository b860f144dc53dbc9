"""Ranks that are not given the same, or do not see the same files: a named error on every one, and no wait."""

from __future__ import annotations

import functools
import http.server
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.registry import DATASETS, MODELS
from mmengine.runner import Runner
from tests.mmengine_adapter.toy import POLICY, ToyData, config, loader, runner_of, strategy

from mmfsdp.collective.scopes import scope_of
from mmfsdp.testing import run_ranks
from mmfsdp_mmengine import FSDPStrategy
from mmfsdp_mmengine.checkpoints.latest import find_latest_checkpoint
from mmfsdp_mmengine.processes.turns import firsts_of_machines, in_turns


@DATASETS.register_module(force=True)
class ShorterData(ToyData):
    """A dataset of which a rank has found fewer files."""

    def __init__(self) -> None:
        super().__init__(24 if os.environ["RANK"] == "1" else 32)


class FailingHook(Hook):
    """Fails on one rank before a checkpoint is saved."""

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        if runner.rank == 1:
            raise ValueError("rank one cannot add to the checkpoint")


def outcome(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def differing(rank: int, folder: Path) -> dict[str, str]:
    """Errors by what differs."""

    def train(hook: Hook | None = None, **changes: Any) -> str:
        settings = config(changes.pop("work_dir", folder), 2, strategy=strategy("local"))
        settings |= changes

        def run() -> None:
            runner = runner_of(settings)
            if hook is not None:
                runner.register_hook(hook)
            runner.train()

        return outcome(run)

    mine = folder / f"at-{rank}"
    data = config(folder, 2)["train_dataloader"] | {"dataset": {"type": "ShorterData"}}
    optimizer = {"optimizer": {"type": "AdamW", "lr": 0.01 * (1 + rank)}}
    return {
        "work_dir": train(work_dir=mine),
        "load_from": train(load_from=str(folder / f"weights-{rank}.pth")),
        "resume": train(resume=rank == 0),
        "epochs": train(train_cfg={"by_epoch": True, "max_epochs": 1 + rank}),
        "learning rate": train(optim_wrapper=optimizer),
        "data": train(train_dataloader=data),
        "hook": train(FailingHook(), default_hooks={"checkpoint": {"type": "CheckpointHook", "interval": 1}}),
    }


@pytest.mark.exhaustive
def test_what_is_given(tmp_path: Path) -> None:
    first, second = run_ranks(differing, 2, tmp_path)
    expected = {
        "work_dir": ("work_dir is", "/at-1'", "/at-0'"),
        "load_from": ("load_from is", "weights-1.pth' on rank 1", "weights-0.pth' on rank 0"),
        "resume": ("resume is False on rank 1", "True on rank 0"),
        "epochs": ("max_epochs is 2 on rank 1", "1 on rank 0"),
        "learning rate": ("optim_wrapper is", "'lr': 0.02", "'lr': 0.01"),
        "data": ("epoch_length is 3 on rank 1", "4 on rank 0"),
    }
    for name, parts in expected.items():
        for said in (first[name], second[name]):
            assert said.startswith("RankMismatchError: "), (name, said)
            assert all(part in said for part in parts), (name, said)
    assert second["hook"] == "ValueError: rank one cannot add to the checkpoint"
    assert first["hook"].startswith("MmfsdpError: Rank 1 failed: ValueError: rank one cannot add to the checkpoint")
    assert not [*tmp_path.rglob("*.pth")], "nothing half done is left"


def uneven(rank: int, folder: Path) -> dict[str, str]:
    """Errors of validations and tests with 7 samples, by how they are run."""
    sampler = {"type": "DefaultSampler", "shuffle": False, "round_up": False}

    def data(length: int = 7, batch_size: int = 1, **sampler_changes: Any) -> dict[str, Any]:
        dataset = {"type": "ToyData", "length": length}
        return {**loader(batch_size, False), "dataset": dataset, "sampler": {**sampler, **sampler_changes}}

    def run(what: str, given: dict[str, Any], made: dict[str, Any] | None = None, **changes: Any) -> str:
        settings = config(folder, 2, strategy=made or strategy(), val_dataloader=given, default_hooks={}, **changes)
        if what == "test":
            settings |= {"test_dataloader": given, "test_evaluator": {"type": "Accuracy"}, "test_cfg": {}}
        return outcome(getattr(runner_of(settings), what))

    def plain_runner(**wrapper: Any) -> str:
        settings = config(folder, 2, val_dataloader=data(), default_hooks={})
        del settings["strategy"]
        wrapper = {"type": "MMFullyShardedDataParallel", "auto_wrap_policy": POLICY, **wrapper}
        return outcome(Runner.from_cfg({**settings, "model_wrapper_cfg": wrapper, "launcher": "pytorch"}).val)

    zero2 = strategy(sharding_strategy="SHARD_GRAD_OP")
    flat = strategy(use_orig_params=False)
    never = {"by_epoch": True, "max_epochs": 1, "val_begin": 2}
    return {
        "val": run("val", data()),
        "test": run("test", data()),
        "train": run("train", data(), train_cfg={"by_epoch": True, "max_epochs": 2, "val_interval": 2}),
        "train by iterations": run("train", data(), train_cfg={"by_epoch": False, "max_iters": 2}),
        "fsdp1": run("val", data(), flat),
        "Runner": plain_runner(),
        "drop_last": run("val", {**data(7, 2), "drop_last": True}, flat),
        "no batch at all": run("val", data(1), zero2),
        "is fine: as many batches": run("val", data(7, 4)),
        "is fine: rounded up": run("val", data(round_up=True)),
        "is fine: even": run("val", data(8)),
        "is fine: stays gathered": run("val", data(), zero2),
        "is fine: one unit": run("val", data(), {"type": "FSDPStrategy"}),
        "is fine: not sharded": run("val", data(), strategy(sharding_strategy="NO_SHARD")),
        "is fine: DDPStrategy": run("val", data(), {"type": "DDPStrategy"}),
        "is fine: no validation": run("train", data(), train_cfg=never),
    }


@pytest.mark.exhaustive
def test_uneven_validations_are_refused_before_a_rank_waits(tmp_path: Path) -> None:
    first, second = run_ranks(uneven, 2, tmp_path, timeout=120)
    assert first == second
    for name, said in first.items():
        if name.startswith("is fine"):
            assert said == "no error", (name, said)
            continue
        data = "test_dataloader" if name == "test" else "val_dataloader"
        count = {"drop_last": "2 batches, and rank 1 1:", "no batch at all": "1 batch, and rank 1 none:"}
        assert said.startswith("RankMismatchError: With round_up=False the "), (name, said)
        assert count.get(name, "4 batches, and rank 1 3:") in said, (name, said)
        assert f"Write round_up=True in {data}.sampler:" in said, (name, said)


def own_files(rank: int, folder: Path) -> dict[str, str]:
    """What is said if ``folder`` is on a disk of each rank's own."""
    mine, last = folder / f"disk-{rank}", folder / f"only-{1 - rank}"
    made = FSDPStrategy(work_dir=str(folder), state_dict_cfg="local")
    made.prepare({"type": "ToyModel"})
    path = Path("disk/epoch_1.pth")
    mine.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(mine)
        Path("disk").mkdir()
        if rank == 0:
            torch.save({"state_dict": {}, "meta": {}}, path)
        seen_by_one = outcome(made.load_checkpoint, str(path))
        last.mkdir()
        patch.chdir(last)
        if rank == 1:
            torch.save({"state_dict": {}, "meta": {}, "optimizer": {}}, "epoch_1.pth")
            Path("last_checkpoint").write_text("epoch_1.pth")
        # Ranks of one host ask once: let them be of two.
        patch.setattr(socket, "gethostname", lambda: f"node-{rank}")
        return {"load": seen_by_one, "resume": outcome(find_latest_checkpoint, ".")}


def test_files_that_one_rank_does_not_see(tmp_path: Path) -> None:
    first, second = run_ranks(own_files, 2, tmp_path)
    # A relative path in different working directories.
    for said in (first["load"], second["load"]):
        assert said.startswith("RankMismatchError: Ranks gave different paths of a checkpoint: rank 0 '")
        assert "disk-0/disk/epoch_1.pth" in said
        assert "disk-1/disk/epoch_1.pth" in said
    assert second["resume"].startswith("CheckpointNotFoundError: Host 'node-1' can resume from epoch_1.pth, but")
    assert first["resume"].startswith("CheckpointNotFoundError: Rank 1 failed: Host 'node-1' can resume from")


class Counting(http.server.SimpleHTTPRequestHandler):
    """Notes what is asked for."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        super().do_GET()

    def log_message(self, *args: object) -> None:
        pass


def download(rank: int, folder: Path, url: str, shared: bool) -> tuple[list[int], list[int], str]:
    """Load from the web on ranks of two machines; their firsts, the order in which they took turns, the error."""
    machine = rank // 2
    socket.gethostname = lambda: f"node-{machine}"
    os.environ["TORCH_HOME"] = str(folder / ("hub" if shared else f"hub-{machine}"))
    made = FSDPStrategy(work_dir=str(folder), state_dict_cfg="full")
    made.prepare({"type": "ToyModel"})
    scope, log = scope_of(None), folder / "turns"

    def note() -> None:
        with log.open("a") as file:
            file.write(f"{rank}\n")

    in_turns(note, scope)
    error = outcome(functools.partial(made.load_checkpoint, strict=True), url)
    return firsts_of_machines(scope), [int(line) for line in log.read_text().split()], error


@pytest.mark.parametrize(("shared", "times"), [(True, 1), (False, 2)], ids=["shared", "node-local"])
def test_downloads_once_per_file_system(tmp_path: Path, shared: bool, times: int) -> None:
    torch.save({"state_dict": dict(MODELS.build({"type": "ToyModel"}).state_dict())}, tmp_path / "weights.pth")
    Counting.asked = []
    handler = functools.partial(Counting, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        found = run_ranks(download, 4, tmp_path, f"{url}/weights.pth", shared)
        server.shutdown()
    assert Counting.asked == ["/weights.pth"] * times
    for firsts, turns, error in found:
        assert (firsts, turns[:2], sorted(turns[2:]), error) == ([0, 2], [0, 2], [1, 3], "no error")
