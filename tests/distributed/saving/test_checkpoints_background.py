"""Saving in the background: what was when it was asked for is saved, and no failure passes unnoticed."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.models import BLOCKS, build, train
from tests.distributed.saving.test_checkpoints_online import State, told, whole_state
from tests.distributed.state.test_state_dicts import HYBRID, equal, optimizer_of
from torch.distributed.tensor import DTensor

import mmfsdp
from mmfsdp import errors
from mmfsdp.checkpoint.tree import leaves
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.saving.writing.background import PendingSave, saver_of
from mmfsdp.testing import run_ranks

CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {"wrap": BLOCKS}),
    "hybrid": (4, {"sharding": HYBRID, "wrap": BLOCKS}),
    "fsdp1-flat": (2, {"sharding": {"use_orig_params": False}, "wrap": BLOCKS}),
}

STEPS = 2


def name_of(step: int, kind: str) -> str:
    return f"{step}.pth" if kind == "full" else str(step)


def save_and_train_on(rank: int, config: dict[str, Any], folder: str, kind: str, optim: str) -> list[State]:
    model = mmfsdp.shard(build(), config)
    optimizer = optimizer_of(model, optim)
    wanted, saves = [], []
    extra = {"losses": [0.0]}
    for step in range(STEPS):
        train(model, optimizer, steps=1, first=step)
        wanted.append(whole_state(model, optimizer))
        path = f"{folder}/{name_of(step, kind)}"
        saves.append(mmfsdp.save_checkpoint(path, model, optimizer, kind=kind, extra=extra, blocking=False))
        if step == STEPS - 1:
            mmfsdp.save_checkpoint(f"{folder}/now/{path[-5:]}", model, optimizer, kind=kind, extra=extra)
        extra["losses"].append(1.0)
    train(model, optimizer, steps=1, first=STEPS)
    for save in reversed(saves):
        save.result()
        assert save.done()
    assert kind == "full" or all(Path(folder, str(step), "manifest.json").exists() for step in range(STEPS))
    return wanted


def load(rank: int, path: str, optim: str) -> tuple[State, Any]:
    model = mmfsdp.shard(build(seed=7), {"wrap": BLOCKS})
    optimizer = optimizer_of(model, optim)
    rest, report = mmfsdp.load_checkpoint(path, model, optimizer)
    assert report.clean
    return whole_state(model, optimizer), rest


CASES = [("fsdp2", "sharded", "adamw"), ("hybrid", "sharded", "adamw"), ("fsdp1-flat", "sharded", "adamw")]
CASES += [("fsdp2", "local", "adamw"), ("hybrid", "full", "groups"), ("fsdp1-flat", "full", "sgd")]


@pytest.mark.sample("fsdp2-local-adamw", "fsdp1-flat-full-sgd")
@pytest.mark.parametrize(("case", "kind", "optim"), CASES)
def test_training_goes_on_meanwhile(case: str, kind: str, optim: str, tmp_path: Path) -> None:
    world_size, config = CONFIGS[case]
    wanted = run_ranks(save_and_train_on, world_size, config, str(tmp_path), kind, optim)[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*(name_of(step, kind) for step in range(STEPS)), "now"]
    assert not equal(wanted[0], wanted[1])
    for step, want in enumerate(wanted):
        found, rest = run_ranks(load, 2, str(tmp_path / name_of(step, kind)), optim)[0]
        assert equal(found, want)
        assert rest == {"losses": [0.0, *[1.0] * step]}
    if kind == "full":  # the file is the one that a blocking save writes
        later, now = (folder / name_of(STEPS - 1, kind) for folder in (tmp_path, tmp_path / "now"))
        assert equal(torch.load(later, weights_only=True), torch.load(now, weights_only=True))


def memory_of_copies(rank: int, folder: str) -> list[set[int]]:
    """Save three times, and return where the copies of sharded tensors were."""
    model = mmfsdp.shard(build(), {"wrap": BLOCKS})
    optimizer = optimizer_of(model, "adamw")
    saver, places = saver_of(find_sharded_model(model).mesh), []
    stage = saver.stage

    def look(content: dict[str, Any]) -> dict[str, Any]:
        copy = stage(content)
        places.append({leaf.to_local().data_ptr() for _, leaf in leaves(copy) if isinstance(leaf, DTensor)})
        return copy

    saver.stage = look  # type: ignore[method-assign]
    for step in range(3):
        train(model, optimizer, steps=1, first=step)
        mmfsdp.save_checkpoint(f"{folder}/{step}", model, optimizer, kind="local", blocking=False).result()
    return places


def test_the_memory_of_copies_is_used_again(tmp_path: Path) -> None:
    for first, *others in run_ranks(memory_of_copies, 2, str(tmp_path)):
        assert len(first) > 10
        assert all(other == first for other in others)


class Odd:
    """Is copied, and refuses to be written where it is told to."""

    def __init__(self, refuses: bool) -> None:
        self.refuses = refuses

    def __reduce__(self) -> Any:
        if self.refuses and threading.current_thread() is not threading.main_thread():
            raise OSError("the disk is full")
        return Odd, (self.refuses,)


def failing(rank: int, folder: str) -> list[tuple[type, str]]:
    model = mmfsdp.shard(build(), {"wrap": BLOCKS})

    def save(name: str, extra: Any = None, **options: Any) -> Any:
        return mmfsdp.save_checkpoint(
            f"{folder}/{name}", model, kind="sharded", extra={"odd": extra}, blocking=False, **options
        )

    save("there").result()
    found = [told(save, "there"), told(save, "file/there")]
    # What cannot even be copied fails at once, on both ranks.
    found.append(told(save, "x", threading.Lock() if rank == 1 else None))
    # Told by result(), and then no more.
    pending = save("there", Odd(rank == 0), overwrite=True)
    found += [told(pending.result), told(pending.result)]
    assert pending.done()
    # Told by the next save, of whatever kind, if nobody asked.
    save("there", Odd(rank == 0), overwrite=True)
    found.append(told(mmfsdp.save_checkpoint, f"{folder}/full", model, kind="full"))
    # By one of the two alone: the other hears of it at the next save.
    pending = save("there", Odd(rank == 0), overwrite=True)
    if rank == 1:
        told(pending.result)
    found.append(told(save, "y"))
    assert mmfsdp.load_checkpoint(f"{folder}/there", model)[0] == {"odd": None}
    save("there", overwrite=True).result()
    return found


def test_an_interrupt_ends_the_wait_and_not_the_save() -> None:
    future: Future[None] = Future()
    save = PendingSave(future)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background
    try:
        threading.Timer(0.2, signal.pthread_kill, [threading.get_ident(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            save.result()
    finally:
        signal.signal(signal.SIGINT, before)
    threading.Timer(0.2, future.set_exception, [errors.CheckpointError("the disk is full")]).start()
    for ends in (save.settle, save.result):  # the next save of these ranks waits for it
        with pytest.raises(errors.CheckpointError, match="the disk is full"):
            ends()
    save.settle()  # which has been told


def test_failures_are_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    for rank, found in enumerate(run_ranks(failing, 2, str(tmp_path))):
        kinds, texts = zip(*found, strict=True)
        assert all(issubclass(kind, errors.CheckpointError) for kind in kinds), kinds
        assert "exists already" in texts[0]
        assert "is a file, and not a directory" in texts[1]
        assert "cannot pickle" in texts[2]
        assert all("the disk is full" in text for text in texts[3:]), texts[3:]
        assert texts[3] == texts[4], rank
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "there"]
