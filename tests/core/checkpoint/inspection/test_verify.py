"""``verify`` finds every kind of damage, names it, and says what no checksum speaks for."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mmfsdp.checkpoint import open_layout, verify
from mmfsdp.checkpoint.formats.torch_files.zip_archive import read_records
from mmfsdp.checkpoint.integrity import scan_file
from mmfsdp.checkpoint.manifest import write_manifest
from mmfsdp.errors import CheckpointNotFoundError, ConfigError, UnsafePickleError


def save_local(directory: Path, world_size: int = 3, save_id: str = "a", starts: Any = None) -> Path:
    directory.mkdir()
    for rank in range(world_size):
        start = 2 * rank if starts is None else starts[rank]
        rows = 2 * world_size if starts is None else max(starts) + 2
        boxes = {"state_dict/w": {"shape": [rows, 4], "offsets": [start, 0]}}
        header = {"format": "rank_local", "version": 1, "world_size": world_size, "rank": rank}
        content = {
            "state_dict": {"w": torch.full((2, 4), float(start + 1)), "b": torch.ones(3)},
            "mmfsdp": {**header, "save_id": save_id, "tensors": boxes},
        }
        torch.save(content, directory / f"rank{rank}.pth")
    return directory


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("jobs", [1, 3])
def test_good_checkpoints(tmp_path: Path, jobs: int) -> None:
    tree = {"state_dict": {"w": torch.ones(7, 5), "empty": torch.zeros(0)}, "meta": {"epoch": 1}}
    torch.save(tree, tmp_path / "full.pth")
    report = verify(tmp_path / "full.pth", jobs=jobs)
    assert report.ok
    assert (report.format, report.tensors, report.manifest, report.unchecked) == ("torch_zip", 2, False, ())
    assert report.bytes >= 7 * 5 * 4

    source = save_local(tmp_path / "local")
    assert verify(source, jobs=jobs).ok
    write_manifest(source, save_id="a", world_size=3)
    report = verify(source, jobs=jobs)
    assert report.ok
    assert (report.format, report.manifest, report.unchecked) == ("rank_local", True, ())
    assert report.bytes == sum((source / f"rank{rank}.pth").stat().st_size for rank in range(3))
    assert verify(open_layout(source)).ok


def test_what_cannot_be_checked_is_said(tmp_path: Path) -> None:
    save_file({"w": torch.ones(8), "b": torch.ones(2)}, tmp_path / "in.safetensors")
    report = verify(tmp_path / "in.safetensors")
    assert report.ok
    assert report.unchecked == (
        "the data of 2 of 2 tensors (40 B): safetensors stores no checksum for it, and no manifest.json has one",
    )
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(9)}, tmp_path / "in.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    assert "the data of 1 of 1 tensors (36 B)" in verify(tmp_path / "in.pth").unchecked[0]


def test_all_damage_is_listed_and_not_only_the_first(tmp_path: Path) -> None:
    source = save_local(tmp_path / "in")
    for rank in (0, 2):
        flip(source / f"rank{rank}.pth", read_records(source / f"rank{rank}.pth")[f"rank{rank}/data/0"].offset + 5)
    report = verify(source)
    assert not report.ok
    assert [Path(problem.file or "").name for problem in report.problems] == ["rank0.pth", "rank2.pth"]
    assert report.problems[1].message.startswith("The data of tensor 'state_dict/w' in rank2.pth is damaged: its CRC-")
    assert report.problems[1].offset == read_records(source / "rank2.pth")["rank2/data/0"].offset


def test_copies_that_no_tensor_uses_are_checked_too(tmp_path: Path) -> None:
    source = save_local(tmp_path / "in", 4, starts=[0, 2, 0, 2])  # hybrid: ranks 2 and 3 hold what 0 and 1 hold
    assert verify(source).ok
    flip(source / "rank3.pth", read_records(source / "rank3.pth")["rank3/data/0"].offset)
    [problem] = verify(source).problems
    assert problem.message.startswith("Entry 'rank3/data/0' in rank3.pth is damaged")


def test_every_byte_of_a_directory_with_a_manifest(tmp_path: Path) -> None:
    source = save_local(tmp_path / "in", 1)
    write_manifest(source, save_id="a", world_size=1)
    size = (source / "rank0.pth").stat().st_size
    good = (source / "rank0.pth").read_bytes()
    for offset in range(0, size, 37):
        flip(source / "rank0.pth", offset)
        with contextlib.suppress(UnsafePickleError):  # a name in the pickle has changed
            assert not verify(source).ok, offset
        (source / "rank0.pth").write_bytes(good)
    assert verify(source).ok


def test_manifest_against_files(tmp_path: Path) -> None:
    source = save_local(tmp_path / "in")
    write_manifest(source, save_id="a", world_size=3)
    shutil.copytree(source, tmp_path / "other")
    with (source / "rank1.pth").open("ab") as file:
        file.write(b"\0")
    (source / "rank2.pth").unlink()
    messages = " ".join(problem.message for problem in verify(source).problems)
    assert "rank2.pth is missing" in messages
    assert "(expected" in messages
    (tmp_path / "other" / "manifest.json").write_text("{")
    assert "manifest.json is damaged" in verify(tmp_path / "other").problems[0].message


def test_gaps_overlaps_and_mixed_saves(tmp_path: Path) -> None:
    [gap] = verify(save_local(tmp_path / "gap", 2, starts=[0, 4])).problems
    assert "'state_dict/w' of shape [6, 4] is incomplete: 16 of its 24 elements" in gap.message
    [overlap] = verify(save_local(tmp_path / "overlap", 3, starts=[0, 1, 4])).problems
    assert "overlap" in overlap.message
    one, two = save_local(tmp_path / "one"), save_local(tmp_path / "two", save_id="b")
    shutil.copy(two / "rank1.pth", one)
    report = verify(one)
    assert "rank1.pth is of another save" in report.problems[0].message
    assert report.unchecked == ("the tensors, since the checkpoint cannot be opened",)


def test_truncated_at_every_length(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(20)}, tmp_path / "in.pth")
    size = (tmp_path / "in.pth").stat().st_size
    for length in range(1, size, 61):
        shutil.copy(tmp_path / "in.pth", tmp_path / "cut.pth")
        os.truncate(tmp_path / "cut.pth", length)
        assert not verify(tmp_path / "cut.pth").ok, length


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        verify(tmp_path / "nothing.pth")
    torch.save({"w": torch.ones(2), "run": shutil.rmtree}, tmp_path / "in.pth")
    with pytest.raises(UnsafePickleError):
        verify(tmp_path / "in.pth")
    assert verify(tmp_path / "in.pth", trust=True).ok
    with pytest.raises(ConfigError, match="jobs=0"):
        verify(tmp_path / "in.pth", jobs=0)


@pytest.mark.parametrize("jobs", [1, 2])
def test_progress_and_stopping(tmp_path: Path, jobs: int) -> None:
    source = save_local(tmp_path / "in")
    seen: list[tuple[int, int]] = []
    report = verify(source, jobs=jobs, progress=lambda *numbers: seen.append(numbers))
    assert seen[-1] == (report.bytes, report.bytes)

    def stop(done: int, total: int) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        verify(source, jobs=jobs, progress=stop)


def test_scanning_in_one_pass(tmp_path: Path) -> None:
    import zlib

    data = os.urandom(3_000_000)
    (tmp_path / "data").write_bytes(data)
    extents = [(2_000_000, 900_000), (5, 10), (5, 1_500_000), (2_999_990, 20), (7, 0)]
    for whole in (False, True):
        read = []
        scanned = scan_file(tmp_path / "data", extents, whole=whole, advance=read.append)
        expected = [zlib.crc32(data[begin : begin + length]) for begin, length in extents]
        assert scanned.crcs == (*expected[:3], None, expected[4])
        assert scanned.whole == (zlib.crc32(data) if whole else None)
