"""Checkpoints of ranks whose files say by which rule tensors are spread: every rank finds its own part by itself."""

from __future__ import annotations

import functools
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from benchmarks.simulated import Work, run_threads

from mmfsdp.basics.boxes import EvenBoxes, sharded_box
from mmfsdp.checkpoint import convert, open_layout
from mmfsdp.checkpoint.formats.dcp import index as dcp_index
from mmfsdp.checkpoint.formats.dcp.rules import rule_of
from mmfsdp.checkpoint.manifest import FileEntry, read_manifest, write_manifest
from mmfsdp.checkpoint.manifest_search import find_entry
from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import on_all_ranks
from mmfsdp.errors import CheckpointError
from mmfsdp.runtime.dtensors import Box
from mmfsdp.saving.reading.contents import open_shared
from mmfsdp.state.lazy_tensors import locate, whole_box

RANKS = 5
CONTENT = {
    "state_dict": {
        "wide": torch.arange(24_000.0).reshape(300, 80),
        "narrow": torch.arange(6.0).reshape(3, 2),
        "none": torch.zeros(0, 4),
        "scale": torch.tensor(7.0),
        "layers.0.bias": torch.arange(23, dtype=torch.bfloat16),
    },
    "step": 12,
    "notes": {"names": ["a", "b"]},
}


@pytest.fixture(params=["local", "dcp"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint of five ranks with checksums of blocks, as `mmfsdp.save_checkpoint` writes it."""
    return written(tmp_path, request.param)


def written(folder: Path, kind: str, name: str = "saved") -> Path:
    whole = folder / "whole.pth"
    torch.save(CONTENT, whole)
    path = folder / name
    convert(whole, path, to=kind, ranks=RANKS, fsync=False)
    sum_blocks(path)
    return path


def sum_blocks(path: Path) -> None:
    manifest = read_manifest(path)
    write_manifest(path, save_id=manifest.save_id, world_size=manifest.world_size)


def without_blocks(path: Path) -> None:
    found = json.loads((path / "manifest.json").read_text())
    for entry in found["files"].values():
        del entry["crc32_blocks"]
    (path / "manifest.json").write_text(json.dumps(found))


def load(scope: Scope, path: Path) -> str:
    """Read this rank's rows of everything as `mmfsdp.load_checkpoint` does; return an error's text."""
    try:
        source, content = open_shared(path, scope)
        assert (content["step"], content["notes"]) == (CONTENT["step"], CONTENT["notes"])
        wanted = []
        for name, value in content["state_dict"].items():
            box = Box(*sharded_box(value.shape, [scope.size], [0], [scope.rank])) if value.shape else whole_box(value)
            wanted.append((name, value, box))
        locate([(value, box) for _, value, box in wanted], scope)
        found = on_all_ranks(lambda: [(name, value.read(box), box) for name, value, box in wanted], scope)
        on_all_ranks(source.check_unchanged, scope)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    for name, value, box in found:
        want = CONTENT["state_dict"][name]  # type: ignore[index]
        for dim, (begin, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            want = want.narrow(dim, begin, size)
        assert torch.equal(value, want), name
    return ""


def loaded(path: Path, size: int) -> list[Work]:
    works = run_threads(functools.partial(load, path=path), size)
    assert [work.result for work in works] == [""] * size
    return works


@pytest.mark.parametrize("size", [1, RANKS, 3, 8])
def test_any_number_of_ranks_loads_without_asking_the_first(path: Path, size: int) -> None:
    if path.joinpath(".metadata").exists():
        path.joinpath(".metadata").write_bytes(b"nobody reads it")
        sum_blocks(path)
    works = loaded(path, size)
    assert max(work.sent_bytes for work in works[1:] or works) < (9000 if size == 1 else 200)


@pytest.mark.parametrize("size", [RANKS, 3, 8])
def test_without_checksums_of_blocks_ranks_ask_only_if_one_reads_a_part(path: Path, size: int) -> None:
    without_blocks(path)
    assert (loaded(path, size)[1].sent_bytes > 200) == (size != RANKS)


def test_checkpoints_from_before_there_were_indexes_load(path: Path) -> None:
    for file in path.glob("*.distcp"):
        data = file.read_bytes()
        length, _, _ = dcp_index._END.unpack(data[-dcp_index._END.size :])
        file.write_bytes(data[: -dcp_index._END.size - length])
    for file in path.glob("rank*.pth"):  # the rules are in the first file; without them, all are read
        content = torch.load(file)
        for box in content["mmfsdp"]["tensors"].values():
            del box["placements"]
        torch.save(content, file)
    sum_blocks(path)
    for size in (RANKS, 3):
        loaded(path, size)


def file_of(path: Path, rank: int) -> Path:
    [file] = [*path.glob(f"rank{rank}.pth"), *path.glob(f"__{rank}_0.distcp")]
    return file


def errors(path: Path, size: int = RANKS) -> list[str]:
    found = [work.result for work in run_threads(functools.partial(load, path=path), size)]
    assert all(found)
    assert len({text.partition(":")[0] for text in found}) == 1
    return found


@pytest.mark.parametrize("size", [RANKS, 8])
def test_a_flipped_bit_is_named_on_every_rank(path: Path, size: int) -> None:
    chunk = next(chunk for chunk in open_layout(path).tensors["state_dict/wide"].chunks() if "3" in chunk.file.name)
    data = bytearray(chunk.file.read_bytes())
    data[chunk.offset + 20] ^= 4
    chunk.file.write_bytes(data)
    for text in errors(path, size):
        assert f"{chunk.file.name} is damaged: the CRC-32 of bytes" in text


def test_a_file_that_is_missing_short_or_of_another_save_is_named_on_every_rank(path: Path, tmp_path: Path) -> None:
    kind = "dcp" if path.joinpath(".metadata").exists() else "local"
    other, file = written(tmp_path, kind, "other"), file_of(path, 3)
    kept = file.read_bytes()
    file.unlink()
    assert all(f"{file.name} is missing" in text or file.name in text for text in errors(path))
    file.write_bytes(kept[:-1])
    assert all(f"{file.name} has {len(kept) - 1} bytes (expected {len(kept)}" in text for text in errors(path))
    shutil.copy(file_of(other, 3), file)
    assert file.stat().st_size == len(kept)
    assert all(f"{file.name} is of another save" in text for text in errors(path))
    file.write_bytes(kept)
    loaded(path, RANKS)


def test_a_damaged_index_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, "dcp")
    for rank in (0, 2):
        file = file_of(path, rank)
        data = bytearray(file.read_bytes())
        data[-40] ^= 1
        file.write_bytes(data)
        assert all(f"The index of {file.name} is damaged" in text for text in errors(path))
        data[-40] ^= 1
        file.write_bytes(data)


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": 4},
        {"ranks": 0},
        {"names": [["step", []]]},
        {"names": [["x", ["x"], ["float32", [4], [5], [3], 0]]]},
        {"names": [["x", ["x"], ["float32", [4], [5], [0], 1]]]},
        {"names": [["x", ["x"], ["float33", [4], [5], [0], 0]]]},
        {"items": [["x", [0], -1, 4]]},
        {"items": 3},
    ],
)
def test_crafted_indexes_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    rules = dcp_index.Rules(5, {"x": dcp_index.Named(("x",), "float32", EvenBoxes((4,), (5,), (0,), 0))})
    data = dcp_index.index_bytes("id", [(("x", (0,)), 0, 10)], rules)
    content = {**json.loads(data[: -dcp_index._END.size]), **change}
    text = json.dumps(content).encode()
    file = tmp_path / "__0_0.distcp"
    file.write_bytes(text + dcp_index._END.pack(len(text), dcp_index.crc32(text), b"mmfsdp-1"))
    with file.open("rb") as opened, pytest.raises(CheckpointError, match=r"The index of __0_0\.distcp is damaged"):
        dcp_index.read_index(file, opened.fileno())


def test_what_is_sent_does_not_grow_with_the_ranks_that_saved() -> None:
    rules = [pickle.dumps(EvenBoxes((4096, 4), (ranks,), (0,), 0)) for ranks in (8, 2048)]
    assert abs(len(rules[0]) - len(rules[1])) < 4


@pytest.mark.parametrize(
    ("rule", "ranks"),
    [
        (EvenBoxes((10, 4), (5,), (0,), 0), 5),
        (EvenBoxes((3, 4), (5,), (0,), 0), 5),
        (EvenBoxes((10, 7), (4,), (1,), 0), 4),
        (EvenBoxes((10, 4), (2, 4), (None, 0), 1), 8),
        (EvenBoxes((10, 4), (6,), (None,), 5), 6),
        (EvenBoxes((), (6,), (None,), 2), 6),
    ],
)
def test_a_rule_is_found_from_the_boxes(rule: EvenBoxes, ranks: int) -> None:
    found = rule_of(rule.shape, rule.meeting(None).items(), ranks)
    assert found is not None
    assert found.meeting(None) == rule.meeting(None)


def test_boxes_that_follow_no_rule_have_none() -> None:
    boxes = dict(EvenBoxes((10, 4), (5,), (0,), 0).meeting(None))
    [first, second, *_] = boxes
    assert rule_of((10, 4), (boxes | {first: 1, second: 0}).items(), 5) is None
    assert rule_of((10, 4), [(box, rank) for box, rank in boxes.items() if rank != 3], 5) is None
    assert rule_of((10, 4), [(((0, 0), (10, 3)), 0), (((0, 3), (10, 1)), 1)], 2) is None
    assert rule_of((10, 4), [], 2) is None


def test_a_few_reads_find_a_file_among_thousands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"rank{rank}.pth": FileEntry(rank * 1000, rank, [rank] * -(-rank * 1000 >> 18)) for rank in range(1500)}
    files = {**files, "large.pth": FileEntry(1 << 36, 5, [9] * (1 << 18)), "ü.pth": FileEntry(3, 4, [4])}
    write_manifest(tmp_path, save_id="id", world_size=1500, files=files)
    known, reads = read_manifest(tmp_path).files, 0

    def pread(*args: int) -> bytes:
        nonlocal reads
        reads += 1
        return plain(*args)

    plain = os.pread
    monkeypatch.setattr(os, "pread", pread)
    for name in ("rank0.pth", "rank1499.pth", "rank7.pth", "rank800.pth"):
        reads = 0
        assert find_entry(tmp_path, name) == known[name]
        assert 0 < reads < 120
    assert find_entry(tmp_path, "large.pth") == known["large.pth"]
    assert find_entry(tmp_path, "ü.pth") == known["ü.pth"]
    assert find_entry(tmp_path, "rank.pth") is find_entry(tmp_path, "zzz") is None
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text())))  # as another program would format it
    assert find_entry(tmp_path, "rank7.pth") == known["rank7.pth"]
