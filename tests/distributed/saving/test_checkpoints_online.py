"""Checkpoints of running models: whole or not at all, and readable by any other world size and engine."""

from __future__ import annotations

import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.models import BLOCKS, Tied, build, train
from tests.distributed.state.test_state_dicts import equal, optimizer_of

import mmfsdp
from mmfsdp import errors
from mmfsdp.checkpoint import TargetExistsError, convert
from mmfsdp.state.lazy_tensors import LazyTensor
from mmfsdp.testing import run_ranks

CONFIGS: dict[str, dict[str, Any]] = {
    "fsdp2": {"wrap": BLOCKS},
    "replicate": {"sharding": "NO_SHARD"},
    "fsdp1": {"engine": "fsdp1", "wrap": BLOCKS},
    "fsdp1-flat": {"sharding": {"use_orig_params": False}, "wrap": BLOCKS},
}
EXTRA = {"meta": {"iter": 2, "names": ["a", "b"]}, "schedulers": [{"last": torch.tensor(3.0)}]}
State = tuple[dict[str, Any], dict[str, Any]]


def whole_state(model: Any, optimizer: torch.optim.Optimizer) -> State:
    weights = mmfsdp.model_state_dict(model, rank0_only=False)
    return weights, mmfsdp.optim_state_dict(model, optimizer, rank0_only=False)["state"]


def save(rank: int, case: str, folder: str) -> State:
    model = mmfsdp.FullyShardedDataParallel(build(), config=CONFIGS[case])
    optimizer = optimizer_of(model, "adamw")
    train(model, optimizer, steps=2)
    mmfsdp.save_checkpoint(f"{folder}/full.pth", model, optimizer, kind="full", extra=EXTRA)
    mmfsdp.save_checkpoint(f"{folder}/local", model, optimizer, kind="local", extra=EXTRA)
    return whole_state(model, optimizer)


def load(rank: int, case: str, path: str) -> State:
    model = mmfsdp.FullyShardedDataParallel(build(seed=7), config=CONFIGS[case])
    optimizer = optimizer_of(model, "adamw")
    rest, report = mmfsdp.load_checkpoint(path, model, optimizer)
    assert report.clean
    assert equal(rest, EXTRA)
    state = whole_state(model, optimizer)
    train(model, optimizer, steps=1, first=2)
    return state


@pytest.mark.sample("replicate")
@pytest.mark.parametrize("writer", CONFIGS)
def test_every_writer_and_reader(writer: str, tmp_path: Path) -> None:
    want = run_ranks(save, 2, writer, str(tmp_path))[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full.pth", "local"]
    # The writer reads both, and each other engine what another one wrote; readers see files, and no writers.
    place = [*CONFIGS].index(writer)
    other, either = [*CONFIGS][(place + 1) % len(CONFIGS)], ("full.pth", "local")[place % 2]
    for reader, name in ((writer, "full.pth"), (writer, "local"), (other, either)):
        assert equal(run_ranks(load, 2, reader, str(tmp_path / name))[1], want)
    for world_size, reader in {"fsdp2": ((1, "fsdp2"), (3, "fsdp2")), "fsdp1-flat": ((4, "fsdp1"),)}.get(writer, ()):
        assert equal(run_ranks(load, world_size, reader, str(tmp_path / "local"))[0], want)

    # Plain PyTorch reads the full one; what conversion makes of the local one is the same.
    full = torch.load(tmp_path / "full.pth", weights_only=True)
    single = Tied()
    single.load_state_dict(full["state_dict"])
    plain = torch.optim.AdamW(single.parameters())
    plain.load_state_dict(full["optimizer"])
    assert equal((dict(single.state_dict()), plain.state_dict()["state"]), want)
    convert(tmp_path / "local", tmp_path / "converted.pth", keep="all")
    converted = torch.load(tmp_path / "converted.pth", weights_only=True)
    assert equal((converted["state_dict"], converted["optimizer"]["state"]), want)
    assert equal({name: converted[name] for name in EXTRA}, EXTRA)


def load_weights(rank: int, path: str) -> dict[str, Any]:
    model = mmfsdp.shard(build(seed=7), CONFIGS["fsdp2"])
    _, report = mmfsdp.load_checkpoint(path, model)
    assert report.clean
    return mmfsdp.model_state_dict(model, rank0_only=False)


def load_optimizer_later(rank: int, path: str) -> State:
    model = mmfsdp.shard(build(seed=7), CONFIGS["fsdp2"])
    optimizer = optimizer_of(model, "adamw")
    rest, _ = mmfsdp.load_checkpoint(path, model)
    stored = [value for state in rest["optimizer"]["state"].values() for value in state.values()]
    assert {type(value) for value in stored} == {LazyTensor}  # no rank has read all of it
    mmfsdp.load_optim_state_dict(model, optimizer, rest["optimizer"])
    return whole_state(model, optimizer)


@pytest.mark.exhaustive
def test_an_optimizers_state_that_is_not_asked_for_stays_on_disk(tmp_path: Path) -> None:
    want = run_ranks(save, 2, "fsdp2", str(tmp_path))[0]
    for name in ("full.pth", "local"):
        for found in run_ranks(load_optimizer_later, 3, str(tmp_path / name)):
            assert equal(found, want)


def test_weights_alone_from_anywhere(tmp_path: Path) -> None:
    single = build()
    torch.save(single.state_dict(), tmp_path / "bare.pth")
    torch.save({"state_dict": single.state_dict(), "epoch": 3}, tmp_path / "dict.pth")
    convert(tmp_path / "bare.pth", tmp_path / "weights.safetensors")
    for name in ("bare.pth", "dict.pth", "weights.safetensors"):
        for weights in run_ranks(load_weights, 2, str(tmp_path / name)):
            assert equal(weights, dict(single.state_dict()))


def told(action: Any, *args: Any, **kwargs: Any) -> tuple[type, str]:
    with pytest.raises(errors.MmfsdpError) as caught:
        action(*args, **kwargs)
    return type(caught.value), str(caught.value)


def failing_saves(rank: int, folder: str) -> list[tuple[type, str]]:
    model = mmfsdp.shard(build(), CONFIGS["fsdp2"])
    found = []
    for kind, name in (("full", "full.pth"), ("local", "local"), ("sharded", "sharded")):
        path = f"{folder}/{name}"
        mmfsdp.save_checkpoint(path, model, kind=kind, extra={"iter": 1})
        found.append(told(mmfsdp.save_checkpoint, path, model, kind=kind))
        # What cannot be pickled, on one rank only: the first of a full save, the last of a local one.
        odd = rank == (1 if kind == "local" else 0)
        extra = {"iter": 2, "odd": threading.Lock() if odd else None}
        found.append(told(mmfsdp.save_checkpoint, path, model, kind=kind, extra=extra, overwrite=True))
        rest, _ = mmfsdp.load_checkpoint(path, model)
        assert rest == {"iter": 1}
        mmfsdp.save_checkpoint(path, model, kind=kind, extra={"iter": 3}, overwrite=True)
        assert mmfsdp.load_checkpoint(path, model)[0] == {"iter": 3}
    found.append(told(mmfsdp.save_checkpoint, f"{folder}/x", model, kind="fulll"))
    found.append(told(mmfsdp.save_checkpoint, f"{folder}/x", model, extra={"state_dict": 1}))
    found.append(told(mmfsdp.save_checkpoint, f"{folder}/x.pth", model))
    return found


def test_a_failed_save_leaves_what_was_there(tmp_path: Path) -> None:
    for found in run_ranks(failing_saves, 2, str(tmp_path)):
        kinds, texts = zip(*found, strict=True)
        failed = (TargetExistsError, errors.CheckpointError)
        assert kinds == (*failed, *failed, *failed, *[errors.ConfigError] * 3)
        assert "overwrite=True" in texts[0]
        assert "cannot pickle" in texts[1]
        assert "cannot pickle" in texts[3]
        assert "cannot pickle" in texts[5]
        assert "'hf', 'safetensors_index' or 'gguf', got 'fulll'" in texts[6]
        assert texts[7].startswith("extra holds 'state_dict', which save_checkpoint() writes itself.")
        assert "Leave out '.pth', or pass kind='full'" in texts[8]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full.pth", "local", "sharded"]


def mistaken_saves(rank: int, folder: str) -> list[int]:
    model = mmfsdp.shard(build(), CONFIGS["fsdp2"])
    mmfsdp.save_checkpoint(f"{folder}/taken", model)
    gathered = 0

    def gather(*args: Any) -> None:
        nonlocal gathered
        gathered += 1

    model.register_state_dict_pre_hook(gather)
    for kind in ("full", "local", "sharded"):
        assert told(mmfsdp.save_checkpoint, f"{folder}/taken", model, kind=kind)[0] is TargetExistsError
        other = f"{folder}/rank{rank}"
        assert told(mmfsdp.save_checkpoint, other, model, kind=kind)[0] is errors.RankMismatchError
    before = gathered
    mmfsdp.save_checkpoint(f"{folder}/free", model)
    return [before, gathered]


def test_a_mistaken_path_costs_no_gathering(tmp_path: Path) -> None:
    for before, after in run_ranks(mistaken_saves, 2, str(tmp_path)):
        assert before == 0
        assert after > 0


def unwritable(rank: int, folder: str) -> list[tuple[type, str]]:
    model = mmfsdp.shard(build(), CONFIGS["fsdp2"])
    path = f"{folder}/file/inside"
    return [told(mmfsdp.save_checkpoint, path, model, kind=kind) for kind in ("full", "local", "sharded")]


def test_a_target_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    for found in run_ranks(unwritable, 2, str(tmp_path)):
        assert all(issubclass(kind, errors.CheckpointError) for kind, _ in found)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def failing_loads(rank: int, path: str, optimizer: bool) -> tuple[type, str]:
    model = mmfsdp.shard(build(), CONFIGS["fsdp2"])
    before = mmfsdp.model_state_dict(model, rank0_only=False)
    fresh = optimizer_of(model, "adamw") if optimizer else None
    found = told(mmfsdp.load_checkpoint, path, model, fresh)
    assert equal(mmfsdp.model_state_dict(model, rank0_only=False), before)
    return found


@pytest.mark.exhaustive
def test_loads_that_fail_fail_on_every_rank(tmp_path: Path) -> None:
    run_ranks(save, 2, "fsdp2", str(tmp_path))
    torch.save({"weights": [1, 2]}, tmp_path / "other.pth")
    torch.save(build().state_dict(), tmp_path / "bare.pth")
    (tmp_path / "noise.pth").write_bytes(bytes(range(256)) * 8)
    torch.save({"state_dict": build().state_dict(), "path": Path("x")}, tmp_path / "object.pth")
    whole = (tmp_path / "full.pth").read_bytes()
    (tmp_path / "cut.pth").write_bytes(whole[: len(whole) // 2])

    def fails(name: str, kind: type, *parts: str, optimizer: bool = False) -> None:
        for found, text in run_ranks(failing_loads, 2, str(tmp_path / name), optimizer):
            assert issubclass(found, kind), (found, text)
            assert all(part in text for part in parts), text

    fails("full.ptj", errors.CheckpointNotFoundError, "full.ptj")
    fails("other.pth", errors.FormatError, "The checkpoint holds no weights under 'state_dict'; it has 'weights'.")
    fails("bare.pth", errors.FormatError, "no optimizer state under 'optimizer'; it has 'state_dict'.", optimizer=True)
    fails("noise.pth", errors.CheckpointError, "noise.pth")
    fails("cut.pth", errors.CheckpointError, "cut.pth")
    fails("object.pth", errors.UnsafePickleError, "pathlib", "safe_globals")
    (tmp_path / "local" / "rank1.pth").write_bytes((tmp_path / "local" / "rank1.pth").read_bytes()[:-600])
    fails("local", errors.CheckpointError, "rank1.pth")
    (tmp_path / "local" / "rank1.pth").unlink()
    fails("local", errors.IncompleteCheckpointError, "rank1.pth")


def saves_on_full_disks(rank: int, folder: str) -> list[str]:
    model = mmfsdp.shard(build(), CONFIGS["fsdp2"])
    none, found = resource.RLIM_INFINITY, []
    for kind, blocking in (("full", True), ("local", True), ("sharded", True), ("sharded", False)):
        path = Path(folder, kind)
        mmfsdp.save_checkpoint(path, model, kind=kind, extra={"iter": 1}, overwrite=True)
        largest = max(file.stat().st_size for file in (path, *path.glob("*")))
        for size in (largest - 1, largest // 2):  # the last byte too: torch.save() loses it without a word
            try:
                if rank == 0:  # its files are the largest
                    resource.setrlimit(resource.RLIMIT_FSIZE, (size, none))
                extra = {"iter": 2}
                with pytest.raises(errors.CheckpointError) as caught:
                    mmfsdp.save_checkpoint(
                        path, model, kind=kind, extra=extra, overwrite=True, blocking=blocking
                    ).result()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (none, none))
            found.append(str(caught.value))
        assert mmfsdp.load_checkpoint(path, model)[0] == {"iter": 1}
    return found


@pytest.mark.exhaustive
def test_full_disk(tmp_path: Path) -> None:
    for found in run_ranks(saves_on_full_disks, 2, str(tmp_path)):
        names = [
            message.removeprefix("Rank 0 failed: ").removeprefix("Rank 1 failed: ").split()[0] for message in found
        ]
        assert names == ["full"] * 2 + ["rank0.pth"] * 2 + ["sharded"] * 4
        for message in found:
            assert " cannot be written: File too large. Its file system, or the limit that `ulimit -f`" in message
            assert "partial" not in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "local", "sharded"]
