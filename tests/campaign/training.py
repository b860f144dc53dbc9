"""The digits example in a plain loop, as a run that must survive anything.

``settings.json`` in the run's folder says how to train. The program shows its phase on a board, and writes into the
folder the samples of every step, and at the end all that a rank's run is made of.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import json
import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from tests.campaign.board import Board
from tests.distributed.shelf import Shelf, url_of
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import mmfsdp
from mmfsdp.testing import single_rank

sys.path.insert(0, str(Path(__file__).parents[2] / "examples/digits"))
VisionTransformer = importlib.import_module("vit").VisionTransformer
GLOBAL_BATCH, LARGEST = 24, 12
SAVE_EVERY, EVALUATE_EVERY = 6, 10
STALL = 10.0  # seconds for which a rank may hold up others
WAIT = timedelta(seconds=40)  # for ranks to come, and in a collective


def strike(folder: Path, name: str) -> bool:
    """Return whether a fault was ordered, once."""
    try:
        (folder / "ordered" / name).unlink()
    except OSError:
        return False
    return True


class Digits(Dataset[Any]):
    """Images, labels, and which samples they are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.images, self.labels = images_and_labels()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        if strike(self.folder, "loader raises"):
            raise OSError("a fault in a worker of the loader")
        return self.images[index], self.labels[index], index


@functools.cache
def images_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    """Read the data, once for all ranks that are forked from here."""
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)


def ignore_signals(_: int) -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def upload_halves(folder: Path) -> None:
    """Let a store, if that is ordered, take half of a file, after which the sender dies or gets an error."""
    send = Shelf.put_file

    def put_file(self: Any, source: str, target: str, **given: Any) -> None:
        dies, fails = strike(folder, "half an upload"), strike(folder, "upload fails")
        if not dies and not fails:
            send(self, source, target, **given)
            return
        data = Path(source).read_bytes()
        path = Path(self._strip_protocol(target))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data[: len(data) // 2])
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError("a fault of the store")

    Shelf.put_file = put_file  # type: ignore[method-assign]


def manager_of(
    folder: Path, settings: dict[str, Any], model: torch.nn.Module, optimizer: Any, **state: Any
) -> mmfsdp.CheckpointManager:
    if settings["kind"] == "store":
        upload_halves(folder)
    place: Any = url_of(folder / "run") if settings["kind"] == "store" else folder / "run"
    fast: dict[str, Any] = {}
    if settings["kind"] == "hosts":  # the disk is each host's own
        fast = {"fast_directory": folder / "disk" / "fast", "fast_every_steps": 2}
    return mmfsdp.CheckpointManager(
        place,
        model,
        optimizer,
        every_steps=SAVE_EVERY,
        max_to_keep=3,
        kind=settings["save"],
        background=settings["background"],
        **fast,
        **state,
    )


def build(settings: dict[str, Any]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = mmfsdp.shard(VisionTransformer(width=16, depth=1, heads=2), wrap="Block")
    if settings["kind"] == "elastic":  # Adam divides by small numbers, which enlarges what other sums round differently
        return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def warm_up() -> None:
    """Train and save in this process, so that what torch and mmfsdp do once is done before ranks are forked."""
    images_and_labels()
    for kind in ("same", "elastic"):
        with single_rank(), tempfile.TemporaryDirectory() as folder:
            model, optimizer = build({"kind": kind})
            with mmfsdp.CheckpointManager(folder, model, optimizer) as manager:
                manager.resume()
                model(torch.ones(2, 1, 8, 8)).sum().backward()
                optimizer.step()
                manager.save(1)
            mmfsdp.optim_state_dict(model, optimizer)
            _groups.extend(dist.distributed_c10d._world.pg_map)
    gc.collect()
    gc.freeze()


_groups: list[dist.ProcessGroup] = []
"""Process groups of `warm_up`. A rank that freed one would hang, because threads that it waits for were not forked."""


def main(folder: Path) -> None:
    """Be a rank: train to the end, from the newest checkpoint on."""
    settings = json.loads((folder / "settings.json").read_text())
    steps = settings["steps"]
    board = Board(folder, int(os.environ["RANK"]))
    faulthandler.register(signal.SIGUSR2)
    mmfsdp.init_process_group(timeout=WAIT, join_timeout=WAIT)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, optimizer = build(settings)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    digits = Digits(folder)
    parts = mmfsdp.accumulation_steps(GLOBAL_BATCH, LARGEST)
    sampler = DistributedSampler(digits, seed=1, drop_last=True)
    data = mmfsdp.DataPosition(
        DataLoader(
            digits,
            GLOBAL_BATCH // ranks,
            sampler=sampler,
            num_workers=1,
            worker_init_fn=ignore_signals,
            drop_last=True,
            multiprocessing_context="fork",
        )
    )
    torch.manual_seed(rank)
    with (
        mmfsdp.watch_ranks(model, STALL),
        manager_of(folder, settings, model, optimizer, schedulers=scheduler, state={"data": data}) as manager,
    ):
        board.enter("load")
        step = manager.resume()
        while step < steps:
            board.enter("data loading", step)
            for images, labels, indices in data:
                board.enter("step")
                begun = time.monotonic()
                if rank == step % ranks and strike(folder, "step raises"):
                    raise KeyError("a fault in a step")
                if ranks > 1 and rank == step % ranks and strike(folder, "rank exits"):  # an only rank would be done
                    os._exit(0)
                if settings["kind"] != "elastic":
                    images = images + 0.1 * torch.randn(images.shape)
                for part, (some, right) in enumerate(zip(images.chunk(parts), labels.chunk(parts), strict=True), 1):
                    loss = F.cross_entropy(model(some), right) / parts
                    with mmfsdp.no_sync(model) if part < parts else torch.enable_grad():
                        loss.backward()
                mmfsdp.clip_grad_norm_(model, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                step += 1
                with (folder / f"order-{rank}").open("a") as file:
                    file.write(f"{step} {ranks} {' '.join(map(str, indices.tolist()))}\n")
                time.sleep(max(0.0, settings["pace"] - (time.monotonic() - begun)))
                if step % EVALUATE_EVERY == 0:
                    board.enter("evaluation", step)
                    evaluate(model, digits, manager, step)
                if step % SAVE_EVERY == 0:
                    board.enter("save", step)
                manager.step(step)
                if step % SAVE_EVERY == 0 and settings["wait"]:
                    manager.wait()
                if step == steps:
                    break
                board.enter("data loading", step)
        board.enter("exit", step)
        manager.save(steps)
    weights = mmfsdp.model_state_dict(model, rank0_only=False)
    state = mmfsdp.optim_state_dict(model, optimizer, rank0_only=False)
    torch.save((weights, state, scheduler.state_dict(), torch.rand(4)), folder / f"end-{rank}")
    dist.destroy_process_group()


def evaluate(model: torch.nn.Module, digits: Digits, manager: mmfsdp.CheckpointManager, step: int) -> None:
    model.eval()
    with torch.no_grad():
        for images in digits.images.chunk(16)[:6]:
            model(images)
            manager.leave_if_asked(step)
    model.train()
