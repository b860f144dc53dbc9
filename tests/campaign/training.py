"""The digits example in a plain loop, as a run that must survive anything: torchrun training.py FOLDER STEPS NOISE.

It writes to FOLDER who its ranks are, the samples of every step, and at the end all that a rank's run is made of.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import mmfsdp

sys.path.insert(0, str(Path(__file__).parents[2] / "examples/digits"))
VisionTransformer = importlib.import_module("vit").VisionTransformer
FOLDER, STEPS, NOISE = Path(sys.argv[1]), int(sys.argv[2]), bool(int(sys.argv[3]))
GLOBAL_BATCH, LARGEST = 24, 12
PACE = 0.02  # seconds that a step takes at least
SAVE_EVERY, EVALUATE_EVERY, STALL = 10, 40, 8.0


def strike(name: str) -> bool:
    """Return whether a fault was ordered, once."""
    try:
        (FOLDER / "ordered" / name).unlink()
    except OSError:
        return False
    return True


class Digits(Dataset[Any]):
    """Images, labels, and which samples they are."""

    def __init__(self) -> None:
        data = load_digits()
        self.images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
        self.labels = torch.tensor(data.target)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        if strike("loader raises"):
            raise OSError("a fault in a worker of the loader")
        return self.images[index], self.labels[index], index


def ignore_signals(_: int) -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def introduce() -> None:
    """Write down which process this is, and when it began."""
    began = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    file = FOLDER / "ranks" / os.environ["RANK"]
    file.parent.mkdir(exist_ok=True)
    file.with_suffix(".new").write_text(f"{os.getpid()} {began}")
    file.with_suffix(".new").rename(file)


def main() -> None:
    introduce()
    faulthandler.register(signal.SIGUSR2)
    mmfsdp.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = mmfsdp.shard(VisionTransformer(width=32, depth=2, heads=2), wrap="Block")
    # With a small eps, biases of keys, whose gradients are zero but for rounding, would move by as much as all others.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    digits = Digits()
    parts = mmfsdp.accumulation_steps(GLOBAL_BATCH, LARGEST)
    sampler = DistributedSampler(digits, seed=1, drop_last=True)
    loader = DataLoader(
        digits,
        GLOBAL_BATCH // ranks,
        sampler=sampler,
        num_workers=1,
        worker_init_fn=ignore_signals,
        drop_last=True,
        multiprocessing_context="fork",
    )
    data = mmfsdp.DataPosition(loader)
    torch.manual_seed(rank)
    with (
        mmfsdp.watch_ranks(model, STALL),
        mmfsdp.CheckpointManager(
            FOLDER / "run",
            model,
            optimizer,
            every_steps=SAVE_EVERY,
            max_to_keep=3,
            schedulers=scheduler,
            state={"data": data},
        ) as manager,
    ):
        step = manager.resume()
        while step < STEPS:
            for images, labels, indices in data:
                begun = time.monotonic()
                if rank == step % ranks and strike("step raises"):
                    raise KeyError("a fault in a step")
                if rank == step % ranks and strike("rank exits"):
                    os._exit(0)
                if NOISE:
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
                with (FOLDER / f"order-{rank}").open("a") as file:
                    file.write(f"{step} {ranks} {' '.join(map(str, indices.tolist()))}\n")
                if step % EVALUATE_EVERY == 0:
                    evaluate(model, digits, manager, step)
                time.sleep(max(0.0, PACE - (time.monotonic() - begun)))
                manager.step(step)
                if step == STEPS:
                    break
        manager.save(STEPS)
    weights = mmfsdp.model_state_dict(model, rank0_only=False)
    state = mmfsdp.optim_state_dict(model, optimizer, rank0_only=False)
    torch.save((weights, state, scheduler.state_dict(), torch.rand(4)), FOLDER / f"end-{rank}")
    dist.destroy_process_group()


def evaluate(model: torch.nn.Module, digits: Digits, manager: mmfsdp.CheckpointManager, step: int) -> None:
    model.eval()
    with torch.no_grad():
        for images in digits.images.chunk(16)[:8]:
            model(images)
            manager.leave_if_asked(step)
    model.train()


if __name__ == "__main__":
    main()
