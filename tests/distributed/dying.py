"""The ranks of one of two hosts, in one scenario after the other: the hosts of a run that loses one of them.

Run as ``python dying.py FOLDER NODE_RANK SCENARIOS`` on both hosts. Ranks are forked off this process, which has
imported everything, and write to FOLDER what became of them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.nn as nn

import mmfsdp
import mmfsdp.runtime.training
import mmfsdp.saving.reading.load
import mmfsdp.saving.writing.save
import mmfsdp.sharding.apply

PER_NODE = 2
TIMEOUT = 20  # seconds, of the group and of waiting
CORE = str(Path(mmfsdp.__file__).parent)


class Calls:
    """Counts the calls of core's functions, and ends this host's ranks, at once, at one of them."""

    def __init__(self, last: int | None = None) -> None:
        self.count, self._last = 0, last

    def __enter__(self) -> Calls:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(CORE):
            self.count += 1
            if self.count == self._last:
                os.killpg(0, signal.SIGKILL)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, dies: bool = False) -> None:
    inputs = torch.randn(2, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    loss = model(inputs).square().mean()
    if dies:
        os.killpg(0, signal.SIGKILL)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def outcome(function: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What a call came to: the names of its error's classes, its message, and the seconds that it took."""
    began, kinds, message = time.monotonic(), [], ""
    try:
        function(*args, **kwargs)
    except Exception as error:
        kinds, message = [cls.__name__ for cls in type(error).__mro__], str(error)
    return {"kinds": kinds, "message": message, "seconds": time.monotonic() - began}


def meet(store: dist.Store, place: str) -> None:
    """Wait for all ranks. Nothing is sent from rank to rank, so whoever leaves may die without harm to the others."""
    store.set(f"{place} {os.environ['RANK']}", "")
    store.wait([f"{place} {rank}" for rank in range(2 * PER_NODE)], timedelta(seconds=120))


def play(store: dist.Store, folder: Path, what: str, kind: str, victim: int, share: float) -> dict[str, Any]:
    """Go through a scenario on this rank, and return its outcome."""
    model = mmfsdp.shard(
        nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)),
        {"sharding": {"strategy": "HYBRID_SHARD", "shard_size": PER_NODE}},
    )
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    dies = int(os.environ["GROUP_RANK"]) == victim
    meet(store, "trained")
    if what == "train":
        return outcome(train, model, optimizer, dies=dies)
    name = f"{kind}.pth" if kind == "full" else kind
    if what == "own disk":
        path = folder.parents[1] / "disk" / name
        said = outcome(mmfsdp.save_checkpoint, path, model, optimizer, kind=kind)
        dist.barrier()  # the first rank cleans up
        left = sorted(entry.name for entry in path.parent.iterdir())
        return {**said, "left": left, "loaded": outcome(mmfsdp.load_checkpoint, path, model)}
    good = folder / name
    mmfsdp.save_checkpoint(good, model, optimizer, kind=kind)  # the first one also makes what is kept for all others
    with Calls() as calls:
        mmfsdp.save_checkpoint(good, model, optimizer, kind=kind, overwrite=True)
    if what == "load":
        with Calls() as calls:
            mmfsdp.load_checkpoint(good, model, optimizer)
    train(model, optimizer)
    meet(store, "ready")
    with Calls(max(1, int(share * calls.count)) if dies else None):
        if what == "load":
            return outcome(mmfsdp.load_checkpoint, good, model, optimizer)
        return outcome(mmfsdp.save_checkpoint, good, model, optimizer, kind=kind, overwrite=True)


def main() -> None:
    folder, node, scenarios = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    for number, scenario in enumerate(scenarios):
        pids: list[int] = []
        for local in range(PER_NODE):
            pid = os.fork()
            if not pid:
                rank = node * PER_NODE + local
                world = {"RANK": rank, "WORLD_SIZE": 2 * PER_NODE, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": PER_NODE}
                world |= {"GROUP_RANK": node, "MMFSDP_TIMEOUT": TIMEOUT}
                os.environ |= {name: str(value) for name, value in world.items()}
                torch.set_num_threads(1)
                place = os.environ["MASTER_ADDR"], 29600 + number, 2 * PER_NODE, rank == 0
                store = dist.TCPStore(*place, timeout=timedelta(seconds=120))
                meet(store, "started")  # survivors of the scenario before may come late
                dist.init_process_group(
                    "gloo", store=store, rank=rank, world_size=2 * PER_NODE, timeout=timedelta(seconds=TIMEOUT)
                )
                mine = folder / str(number)
                mine.mkdir(exist_ok=True)
                found = play(store, mine, *scenario)
                (folder / f"{number}-{rank}.json").write_text(json.dumps(found))
                os._exit(0)
            pids.append(pid)
            os.setpgid(pid, pids[0])  # before the next one is forked; until the ranks have met, none is to die
        for pid in pids:
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
