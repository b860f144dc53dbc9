"""How ranks share the work of a save: balanced over replicas, synced by whoever wrote, summed on the way."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.loading.test_loading_verified import wide
from tests.distributed.models import BLOCKS, build
from tests.distributed.state.test_state_dicts import equal
from torch import nn

import mmfsdp
from mmfsdp.checkpoint import verify
from mmfsdp.checkpoint.manifest import BLOCK, BlockSums, FileEntry
from mmfsdp.errors import LostRankError
from mmfsdp.testing import RankError, run_ranks

DIRECTORIES = ("local", "sharded")
HYBRID = {"sharding": {"strategy": "HYBRID_SHARD", "shard_size": 2}, "wrap": BLOCKS}


def saved_by_replicas(rank: int, folder: str) -> None:
    model = mmfsdp.shard(stack(), {**HYBRID, "wrap": "none"})
    model[-1].running_mean.fill_(float(rank))  # type: ignore[union-attr, operator]
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 256)).sum().backward()
    optimizer.step()
    for kind in DIRECTORIES:
        mmfsdp.save_checkpoint(f"{folder}/{kind}", model, optimizer, kind=kind)  # type: ignore[arg-type]


def stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)], nn.BatchNorm1d(256))


def loaded(rank: int, path: str) -> tuple[dict[str, Any], dict[Any, Any]]:
    model = mmfsdp.shard(stack())
    optimizer = torch.optim.AdamW(model.parameters())
    mmfsdp.load_checkpoint(path, model, optimizer)
    weights = mmfsdp.model_state_dict(model, rank0_only=False)
    return weights, mmfsdp.optim_state_dict(model, optimizer, rank0_only=False)["state"]


@pytest.mark.sample("sharded")
@pytest.mark.parametrize("kind", DIRECTORIES)
def test_replicas_share_the_work(kind: str, tmp_path: Path) -> None:
    run_ranks(saved_by_replicas, 4, str(tmp_path))
    sizes = [file.stat().st_size for file in (tmp_path / kind).glob("rank*.pth" if kind == "local" else "*.distcp")]
    assert len(sizes) == 4
    whole = 3 * sum(param.nbytes for param in stack().parameters())
    assert sum(sizes) < 1.1 * whole  # each box once
    assert max(sizes) < 1.25 * whole / 4  # and no rank more than its share
    assert verify(tmp_path / kind).ok
    if kind == "sharded":  # whose files say where everything is: nobody needs to read .metadata, which lists all boxes
        (tmp_path / kind / ".metadata").write_bytes(b"")
    weights, state = run_ranks(loaded, 2, str(tmp_path / kind))[0]
    assert abs(float(weights["8.running_mean"][0])) < 0.1  # the first rank's, whoever had least to write
    other = "sharded" if kind == "local" else "local"
    assert equal((weights, state), run_ranks(loaded, 3, str(tmp_path / other))[0])


def watched(rank: int, folder: str, kind: str) -> tuple[set[str], int, int]:
    """The files that this rank synced, the bytes that it wrote to its own, and all that it read."""
    model = mmfsdp.shard(wide())
    synced: set[str] = set()
    sync = os.fsync

    def fsync(file: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        sync(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        before = int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])
        mmfsdp.save_checkpoint(f"{folder}/{kind}", model, kind=kind)  # type: ignore[arg-type]
        after = int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])
    own = Path(folder, kind, f"rank{rank}.pth" if kind == "local" else f"__{rank}_0.distcp")
    return synced, own.stat().st_size, after - before


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_each_rank_syncs_its_own_file_and_reads_nothing_back(kind: str, tmp_path: Path) -> None:
    for rank, (synced, written, read) in enumerate(run_ranks(watched, 2, str(tmp_path), kind)):
        assert (f"rank{rank}.pth" if kind == "local" else f"__{rank}_0.distcp") in synced
        assert written > 1_900_000
        assert read < 200_000
        other = f"rank{1 - rank}.pth" if kind == "local" else f"__{1 - rank}_0.distcp"
        assert other not in synced
        assert ("manifest.json" in synced) == (rank == 0)


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_the_manifest_holds_the_checksums_of_blocks(kind: str, tmp_path: Path) -> None:
    run_ranks(watched, 2, str(tmp_path), kind)
    files = json.loads((tmp_path / kind / "manifest.json").read_text())["files"]
    for name, said in files.items():
        entry = FileEntry.of(tmp_path / kind / name)
        assert entry.blocks is not None
        assert said["crc32"] == f"{entry.crc32:08x}"
        assert said["crc32_blocks"] == "".join(f"{crc:08x}" for crc in entry.blocks)


@pytest.mark.parametrize("pieces", [[0], [1], [BLOCK - 1, 2], [BLOCK], [3, BLOCK, 5], [2 * BLOCK + 7], [BLOCK, BLOCK]])
def test_sums_do_not_depend_on_how_bytes_arrive(pieces: list[int], tmp_path: Path) -> None:
    data = os.urandom(sum(pieces))
    (tmp_path / "file").write_bytes(data)
    sums, at = BlockSums(), 0
    for size in pieces:
        sums.add(data[at : at + size])
        at += size
    assert sums.entry() == FileEntry.of(tmp_path / "file")
    assert sums.entry().size == len(data)


def plain(rank: int, path: str) -> None:
    mmfsdp.save_checkpoint(path, mmfsdp.shard(build(), {"wrap": BLOCKS}), kind="full")


def test_a_full_checkpoint_with_checksums_is_an_ordinary_file_of_torch(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "still" / "full.pth"  # made on the way
    run_ranks(plain, 2, str(path))
    for mmap in (True, False):
        weights = torch.load(path, weights_only=True, mmap=mmap)["state_dict"]
        assert equal(dict(weights), dict(build().state_dict()))
    assert verify(path).ok
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def default(rank: int, path: str) -> None:
    mmfsdp.save_checkpoint(path, mmfsdp.shard(build(), {"wrap": BLOCKS}))


def test_the_default_kind_is_one_that_scales(tmp_path: Path) -> None:
    run_ranks(default, 2, str(tmp_path / "new" / "step_1"))
    assert (tmp_path / "new" / "step_1" / ".metadata").exists()


def dies_while_saving(rank: int, folder: str, kind: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMFSDP_TIMEOUT", "20")
        model = mmfsdp.shard(wide())
        mmfsdp.save_checkpoint(f"{folder}/{kind}", model, kind=kind)  # type: ignore[arg-type]
        if rank == 1:
            os._exit(1)
        with pytest.raises(LostRankError, match="A rank did not answer"):
            mmfsdp.save_checkpoint(f"{folder}/{kind}", model, kind=kind, overwrite=True)  # type: ignore[arg-type]
        Path(folder, f"told-{rank}").touch()


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_survivors_of_a_save_are_told_and_leave_nothing(kind: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1 died"):
        run_ranks(dies_while_saving, 2, str(tmp_path), kind)
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith("told")}
    assert left == {kind}
    assert verify(tmp_path / kind).ok
