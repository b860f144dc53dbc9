"""What is loaded is what was saved: flipped bits, replaced directories and ranks that differ are named on all ranks."""

from __future__ import annotations

import os
import shutil
import threading
import tracemalloc
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.distributed.saving.test_checkpoints_online import told
from tests.distributed.state.test_state_dicts import equal
from torch import nn
from torch.distributed.tensor import DTensor

import mmfsdp
from mmfsdp.checkpoint import open_layout
from mmfsdp.checkpoint.manifest import BLOCK, FileEntry
from mmfsdp.collective.scopes import scope_of
from mmfsdp.collective.steps import on_all_ranks
from mmfsdp.errors import CorruptCheckpointError, MmfsdpError, RankMismatchError
from mmfsdp.saving.reading import locations as places
from mmfsdp.saving.reading.contents import check_shared, open_shared
from mmfsdp.saving.reading.file_sums import FileSums
from mmfsdp.saving.reading.verified_files import VerifiedFiles, block_sum
from mmfsdp.state.lazy_tensors import LazyTensor
from mmfsdp.testing import run_ranks

KINDS = ("full", "local", "sharded")


def wide(seed: int = 0) -> nn.Module:
    """With weights of 1.9 MB, which are read in parts, beside small ones."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(701, 701), nn.LayerNorm(701), nn.Linear(701, 701), nn.BatchNorm1d(701))


def save(rank: int, folder: str, kind: str, seed: int = 0) -> None:
    model = mmfsdp.shard(wide(seed), {"sharding": "FULL_SHARD"})
    mmfsdp.save_checkpoint(f"{folder}/{kind}", model, kind=kind, overwrite=True)  # type: ignore[arg-type]


def plainly(rank: int, folder: str) -> None:
    """As torch itself writes a model's DCP."""
    model = mmfsdp.shard(wide(), {"sharding": "FULL_SHARD"})
    dcp.save({"state_dict": mmfsdp.model_state_dict(model, "sharded")}, checkpoint_id=f"{folder}/dcp")


def load(rank: int, path: str, verify: bool = True, asks: bool = False) -> str | dict[str, Any]:
    """With ``asks``, ranks ask the first one where their parts lie, as they do for checkpoints of many pieces."""
    model = mmfsdp.shard(wide(7), {"sharding": "FULL_SHARD"})
    most, places._MOST_PIECES = places._MOST_PIECES, 0 if asks else places._MOST_PIECES
    try:
        mmfsdp.load_checkpoint(path, model, verify=verify)
    except CorruptCheckpointError as error:
        return str(error)
    finally:
        places._MOST_PIECES = most
    return mmfsdp.model_state_dict(model, rank0_only=False)


def flip(path: Path, name: str, at: float) -> None:
    """Flip one bit within the data of a tensor: of its first chunk, at a fraction of it."""
    chunk = open_layout(path).tensors[name].chunks()[0]
    with chunk.file.open("r+b") as file:
        file.seek(chunk.offset + int(at * (chunk.nbytes - 1)))
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x40]))


@pytest.mark.sample("local", "plain.pth")
@pytest.mark.parametrize("kind", [*KINDS, "plain.pth", "dcp"])
def test_a_flipped_bit_is_found_on_every_rank(kind: str, tmp_path: Path) -> None:
    path = tmp_path / kind
    if kind == "plain.pth":
        torch.save({"state_dict": wide().state_dict()}, path)
    else:
        run_ranks(plainly if kind == "dcp" else save, 2, str(tmp_path), *([] if kind == "dcp" else [kind]))
    kept = tmp_path / "kept"
    (shutil.copytree if path.is_dir() else shutil.copy)(path, kept)
    want = dict(wide().state_dict())
    for world_size in (1, 2, 3):
        assert equal(run_ranks(load, world_size, str(path))[0], want)
    damages = (("0.weight", 0.0), ("0.weight", 0.7), ("2.weight", 1.0), ("1.bias", 0.5), ("3.running_mean", 0.2))
    for world_size, (name, at) in zip((2, 3, 2, 3, 2), damages, strict=True):
        (shutil.rmtree if path.is_dir() else Path.unlink)(path)  # type: ignore[operator]
        (shutil.copytree if kept.is_dir() else shutil.copy)(kept, path)
        flip(path, f"state_dict/{name}", at)
        for text in run_ranks(load, world_size, str(path), True, at > 0.5):
            assert isinstance(text, str), (name, at, world_size)
            assert "is damaged: the CRC-32 of bytes" in text
            assert "offset=" in text
    for found in run_ranks(load, 2, str(path), False):
        assert not equal(found, want)  # without verification it loads, and is wrong


def checked(rank: int, path: str) -> str:
    try:
        check_shared(path, scope_of(None))
    except CorruptCheckpointError as error:
        return str(error)
    return ""


def test_all_of_a_file_is_checked_by_all_ranks_together(tmp_path: Path) -> None:
    path = tmp_path / "plain.pth"
    torch.save({"state_dict": wide().state_dict()}, path)
    assert run_ranks(checked, 3, str(path)) == ["", "", ""]
    flip(path, "state_dict/2.weight", 0.4)
    assert all("2.weight" in text for text in run_ranks(checked, 3, str(path)))


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def reading(rank: int, path: str, verify: bool) -> int:
    model = mmfsdp.shard(wide(7), {"sharding": "FULL_SHARD"})
    mmfsdp.load_checkpoint(path, model, verify=verify)  # imports what loading needs: files as well
    before = bytes_read()
    mmfsdp.load_checkpoint(path, model, verify=verify)
    return bytes_read() - before


@pytest.mark.parametrize("kind", KINDS)
def test_verification_reads_little_more_than_a_rank_needs(kind: str, tmp_path: Path) -> None:
    run_ranks(save, 2, str(tmp_path), kind)
    shard = sum(value.nbytes for value in wide().state_dict().values()) // 2
    for verified in run_ranks(reading, 2, str(tmp_path / kind), True):
        assert verified < shard + (4 << 20) * (kind == "full") + 200_000


def test_the_checksums_of_a_terabyte_are_not_copied() -> None:
    """A file of 1 TB has four million, which one entry holds."""
    entry = FileEntry(1 << 40, None, array("I", [7]) * ((1 << 40) // BLOCK))
    tracemalloc.start()
    try:
        VerifiedFiles(verify=True, own_records=False, sums=FileSums({Path("large"): entry}))
        found = [block_sum(entry, number) for number in (0, 4_194_303, 4_194_304)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == [(BLOCK, 7), (BLOCK, 7), None]
    assert peak < 10_000


def stays_correct(rank: int, folder: str) -> list[str]:
    """Rank 1 replaces the directory again and again, while both load it."""
    scope, path, found = scope_of(None), Path(folder, "here"), []
    wants = [dict(wide(seed).state_dict()) for seed in (1, 2)]
    stop = threading.Event()

    def exchange() -> None:
        for turn in range(10_000):
            if stop.wait(0.003):
                return
            shutil.copytree(f"{folder}/{turn % 2}", f"{folder}/new", dirs_exist_ok=True)
            path.rename(f"{folder}/old{turn}")
            Path(folder, "new").rename(path)
            shutil.rmtree(f"{folder}/old{turn}")

    thread = threading.Thread(target=exchange)
    if rank == 1:
        thread.start()
    try:
        for _ in range(12):
            model = mmfsdp.shard(wide(7), {"sharding": "FULL_SHARD"})
            try:
                mmfsdp.load_checkpoint(path, model)
            except MmfsdpError as error:
                found.append(f"{type(error).__name__}: {error}")
                continue
            loaded = mmfsdp.model_state_dict(model, rank0_only=False)
            assert any(equal(loaded, want) for want in wants), "a mixture"
            found.append("one of the two")
    finally:
        stop.set()
        if rank == 1:
            thread.join()
    on_all_ranks(lambda: None, scope)
    return found


def test_a_directory_that_is_replaced_is_never_mixed(tmp_path: Path) -> None:
    for seed in (0, 1):
        run_ranks(save, 2, str(tmp_path), "local", seed + 1)
        (tmp_path / "local").rename(tmp_path / str(seed))
    shutil.copytree(tmp_path / "0", tmp_path / "here")
    first, second = run_ranks(stays_correct, 2, str(tmp_path))
    assert [text.split(":")[0] for text in first] == [text.split(":")[0] for text in second]


def replaced(rank: int, folder: str, kind: str) -> list[tuple[type, str]]:
    """The directory is replaced after it was opened, before and after tensors were read."""
    model, found = mmfsdp.shard(wide(7), {"sharding": "FULL_SHARD"}), []
    scope, path = scope_of(None), Path(folder, kind)
    source, content = open_shared(path, scope)
    mmfsdp.load_model_state_dict(model, content["state_dict"])
    save(rank, folder, kind, 3)
    found.append(told(on_all_ranks, source.check_unchanged, scope))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_replacement_is_named(kind: str, tmp_path: Path) -> None:
    run_ranks(save, 2, str(tmp_path), kind)
    for [(kind_of_error, text)] in run_ranks(replaced, 2, str(tmp_path), kind):
        assert kind_of_error is CorruptCheckpointError
        assert "was replaced while it was loaded" in text


def other_paths(rank: int, folder: str) -> list[tuple[type, str]]:
    model = mmfsdp.shard(wide(), {"sharding": "FULL_SHARD"})
    path = f"{folder}/step_{rank}"
    return [
        *(told(mmfsdp.save_checkpoint, path, model, kind=kind) for kind in KINDS),
        told(mmfsdp.load_checkpoint, path, model),
    ]


def test_ranks_that_give_different_paths_are_told(tmp_path: Path) -> None:
    for found in run_ranks(other_paths, 2, str(tmp_path)):
        for kind, text in found:
            assert kind is RankMismatchError
            assert "step_0" in text
            assert "step_1" in text
    assert not [*tmp_path.iterdir()]


def from_a_broken_first(rank: int, folder: str) -> list[tuple[type, str]]:
    model, found = mmfsdp.shard(wide(7), {"sharding": "FULL_SHARD"}), []
    scope = scope_of(None)
    source, content = open_shared(Path(folder, "full"), scope)
    weights = content["state_dict"]
    if rank == 0:
        weights["2.weight"] = LazyTensor("state_dict/absent", "float32", (701, 701), source)
    found.append(told(mmfsdp.load_model_state_dict, model, weights, from_rank0=True))
    return found


def test_a_first_rank_that_cannot_read_is_not_waited_for(tmp_path: Path) -> None:
    run_ranks(save, 2, str(tmp_path), "full")
    with pytest.raises(mmfsdp.testing.RankError) as caught:
        run_ranks(from_a_broken_first, 2, str(tmp_path))
    assert "absent" in str(caught.value)


def broken_file(rank: int, folder: str) -> tuple[type, str]:
    model = mmfsdp.shard(wide(7), {"sharding": "FULL_SHARD"})
    _, content = open_shared(Path(folder, "full"), scope_of(None))
    if rank == 0:
        flip(Path(folder, "full"), "state_dict/2.weight", 0.5)
    return told(mmfsdp.load_model_state_dict, model, content["state_dict"], from_rank0=True)


def test_damage_found_by_the_first_rank_is_told_to_those_it_sends_to(tmp_path: Path) -> None:
    run_ranks(save, 2, str(tmp_path), "full")
    for kind, text in run_ranks(broken_file, 2, str(tmp_path), timeout=60):
        assert kind is CorruptCheckpointError
        assert "2.weight" in text


def with_averages(rank: int, folder: str, kind: str) -> None:
    model = mmfsdp.shard(wide(), {"sharding": "FULL_SHARD"})
    form = "full" if kind == "full" else "sharded"
    averages = {f"module.{name}": value * 2 for name, value in mmfsdp.model_state_dict(model, form).items()}
    extra = {"ema_state_dict": averages, "step": 3, "rng": torch.arange(5)}
    mmfsdp.save_checkpoint(f"{folder}/{kind}", model, kind=kind, extra=extra)  # type: ignore[arg-type]
    rest, _ = mmfsdp.load_checkpoint(f"{folder}/{kind}", model)
    assert rest["step"] == 3
    assert torch.equal(rest["rng"], torch.arange(5))
    assert {type(value) for value in rest["ema_state_dict"].values()} == {torch.Tensor}
    want = {f"module.{name}": value * 2 for name, value in wide().state_dict().items()}
    assert equal(rest["ema_state_dict"], want)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_holds_tensors_whatever_the_kind(kind: str, tmp_path: Path) -> None:
    run_ranks(with_averages, 2, str(tmp_path), kind)


def rank_dies(rank: int, path: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMFSDP_TIMEOUT", "20")
        model = mmfsdp.shard(wide(7), {"sharding": "FULL_SHARD"})
        assert isinstance(next(model.parameters()), DTensor)
        if rank == 1:
            os._exit(0)
        with pytest.raises(MmfsdpError) as caught:
            mmfsdp.load_checkpoint(path, model)
        # Renamed when it is whole: this rank may be ended between any two calls.
        written = Path(f"{path}-{rank}.part")
        written.write_text(f"{type(caught.value).__name__}: {caught.value}")
        written.rename(f"{path}-{rank}.txt")
        return ""


def test_survivors_of_a_load_are_told(tmp_path: Path) -> None:
    run_ranks(save, 2, str(tmp_path), "local")
    with pytest.raises(mmfsdp.testing.RankError, match="rank 1 died"):
        run_ranks(rank_dies, 3, str(tmp_path / "local"))
    # Ranks end with the first that died: what they have written by then is all there is to see.
    for file in tmp_path.glob("local-*.txt"):
        assert file.read_text().startswith("LostRankError: A rank did not answer")


def test_what_an_interrupted_save_left_beside_its_place_is_loaded(tmp_path: Path) -> None:
    run_ranks(save, 2, str(tmp_path), "local")
    # As where directories cannot be exchanged: the old one was moved aside, and the process died.
    (tmp_path / "local").rename(tmp_path / ".local.0123456789abcdef.mmfsdp-replaced")
    for weights in run_ranks(load, 2, str(tmp_path / "local")):
        assert equal(weights, dict(wide().state_dict()))
