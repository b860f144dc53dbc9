"""The parts that checkpoints are made with: byte runs, copying, checksums, atomic output, manifests, no torch."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmfsdp.checkpoint import integrity
from mmfsdp.checkpoint.chunks import Chunk, Record, row_major_strides
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.files import planned_files
from mmfsdp.checkpoint.files.atomic import TargetExistsError, atomic_output, commit, discard, temporary_sibling
from mmfsdp.checkpoint.files.copying import BlockWriter, Copier, RecordKey
from mmfsdp.checkpoint.files.planned_files import Tracker, write_files
from mmfsdp.checkpoint.geometry import ByteRun, byte_runs
from mmfsdp.checkpoint.integrity import crc32, crc32_combine
from mmfsdp.checkpoint.layout import Piece, PlannedFile
from mmfsdp.checkpoint.manifest import FileEntry, check_manifest, read_manifest, write_manifest
from mmfsdp.errors import CorruptCheckpointError, FormatError, IncompleteCheckpointError


def tiles(shape: tuple[int, ...], cuts: list[list[int]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a tensor at the given rows of each dimension into boxes."""
    edges = [sorted({0, size, *(cut % (size + 1) for cut in rows)}) for size, rows in zip(shape, cuts, strict=True)]
    spans = [list(itertools.pairwise(edge)) for edge in edges]
    return [(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in itertools.product(*spans)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[int]], list[tuple[int, int]]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    cuts = [draw(st.lists(st.integers(0, 5), max_size=2)) for _ in shape]
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    target = [(start, draw(st.integers(1, size - start))) for start, size in zip(starts, shape, strict=True)]
    return shape, cuts, target


@given(cases())
def test_any_boxes_fill_any_target_box(case: tuple[tuple[int, ...], list[list[int]], list[tuple[int, int]]]) -> None:
    shape, cuts, target = case
    strides = row_major_strides(shape)
    source, chunks = bytearray(), []
    for offsets, sizes in tiles(shape, cuts):
        start = len(source)
        for index in itertools.product(*(range(a, a + n) for a, n in zip(offsets, sizes, strict=True))):
            source.append(sum(i * s for i, s in zip(index, strides, strict=True)))
        chunks.append(Chunk(Path("f"), start, len(source) - start, offsets, sizes))
    entry = TensorEntry("w", "uint8", shape, tuple(chunks))
    offsets, sizes = tuple(a for a, _ in target), tuple(n for _, n in target)
    expected = [
        sum(i * s for i, s in zip(index, strides, strict=True))
        for index in itertools.product(*(range(a, a + n) for a, n in target))
    ]
    result: list[int | None] = [None] * len(expected)
    for run in byte_runs(entry, offsets, sizes):
        result[run.target : run.target + run.length] = source[run.source : run.source + run.length]
    assert result == expected


def test_adjacent_runs_are_merged() -> None:
    file = Path("f")
    rows = tuple(Chunk(file, 100 + 8 * row, 8, (row, 0), (1, 2)) for row in range(4))
    assert byte_runs(TensorEntry("w", "float32", (4, 2), rows)) == [ByteRun(file, 100, 0, 32)]
    columns = tuple(Chunk(file, 16 * column, 16, (0, column), (4, 1)) for column in range(2))
    assert len(byte_runs(TensorEntry("w", "float32", (4, 2), columns))) == 8


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_checksums_are_those_of_zlib(one: bytes, two: bytes) -> None:
    assert crc32(two, crc32(memoryview(one))) == zlib.crc32(one + two)


@pytest.mark.parametrize(("hidden", "used"), [("", "isal.isal_zlib"), ("sys.modules['isal'] = None", "zlib")])
def test_isal_where_it_is_and_zlib_where_not(hidden: str, used: str) -> None:
    code = f"""
import sys, zlib
{hidden}
from mmfsdp.checkpoint import convert, verify
from mmfsdp.checkpoint import integrity
assert "isal.isal_zlib" not in sys.modules
assert integrity.crc32(b"some data", 5) == zlib.crc32(b"some data", 5)
print(integrity._implementation().__module__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == used


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_checksums_of_two_stretches(one: bytes, two: bytes) -> None:
    for combine in (crc32_combine, integrity._combined):
        assert combine(zlib.crc32(one), zlib.crc32(two), len(two)) == zlib.crc32(one + two)


def _copier(tracker: Tracker, verified: set[RecordKey] | None = None) -> Copier:
    return Copier(tracker.advance, BlockWriter(durable=False), verified=verified)


@pytest.mark.parametrize("has_crc", [True, False])
@pytest.mark.parametrize("verify", [True, False])
def test_copying_between_any_places(tmp_path: Path, has_crc: bool, verify: bool) -> None:
    data = os.urandom(3_000_000)
    source = tmp_path / "source"
    source.write_bytes(b"junk" + data)
    record = Record(source, 4, len(data), zlib.crc32(data) if has_crc else None)
    entry = TensorEntry("w", "uint8", (len(data),), (Chunk(source, 4, len(data), (0,), (len(data),), record=record),))
    seen: list[int] = []
    (tmp_path / "target").touch()
    tracker = Tracker(len(data), lambda done, _: seen.append(done))
    with _copier(tracker, verified=set() if verify else None) as copier, copier.writer.to(tmp_path / "target"):
        assert copier.copy_tensor(entry, 10) == zlib.crc32(data)
    assert (tmp_path / "target").read_bytes() == b"\0" * 10 + data
    assert seen == sorted(seen)
    assert seen[-1] == len(data)


def test_each_record_is_compared_once_however_it_is_cut(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(range(200)))
    (tmp_path / "target").touch()
    record = Record(source, 0, 200, 7)  # wrong
    whole, part = (Chunk(source, 0, size, (0,), (size,), record=record) for size in (200, 50))
    for chunk in (whole, part):
        entry = TensorEntry("w", "uint8", chunk.box_sizes, (chunk,))
        with _copier(Tracker(), verified=set()) as copier, copier.writer.to(tmp_path / "target"):
            with pytest.raises(CorruptCheckpointError, match=r"its CRC-32 is [0-9a-f]{8} \(expected 00000007\)"):
                copier.copy_tensor(entry, 0)
            copier.copy_tensor(entry, 0)  # it was compared
        with _copier(Tracker()) as copier, copier.writer.to(tmp_path / "target"):
            expected = 7 if chunk is whole else zlib.crc32(bytes(range(50)))
            assert copier.copy_tensor(entry, 0) == expected


def test_a_file_that_shrinks_while_it_is_copied(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"1234")
    entry = TensorEntry("w", "uint8", (9,), (Chunk(tmp_path / "source", 0, 9, (0,), (9,)),))
    (tmp_path / "target").touch()
    with (
        _copier(Tracker()) as copier,
        pytest.raises(CorruptCheckpointError, match=r"source is truncated: it ends within tensor 'w'\."),
        copier.writer.to(tmp_path / "target"),
    ):
        copier.copy_tensor(entry, 0)


def tensors(file: Path, count: int, nbytes: int) -> list[TensorEntry]:
    """Make tensors of random bytes in one file, each a record with a checksum."""
    data = os.urandom(count * nbytes)
    file.write_bytes(data)
    entries = []
    for i in range(count):
        record = Record(file, i * nbytes, nbytes, zlib.crc32(data[i * nbytes : (i + 1) * nbytes]))
        chunk = Chunk(file, record.offset, nbytes, (0,), (nbytes,), record=record)
        entries.append(TensorEntry(f"t{i}", "uint8", (nbytes,), (chunk,)))
    return entries


def planned(entries: list[TensorEntry], files: int) -> list[PlannedFile]:
    """Plan files with the tensors one after the other, and their checksums at the end."""
    parts = [entries[i::files] for i in range(files)]
    plans = []
    for i, part in enumerate(parts):
        ends = list(itertools.accumulate(entry.nbytes for entry in part))
        pieces = tuple(Piece(entry, end - entry.nbytes) for entry, end in zip(part, ends, strict=True))

        def blocks(crcs: Sequence[int], end: int = ends[-1]) -> list[tuple[int, bytes]]:
            return [(end, json.dumps(crcs).encode().ljust(4000))]

        plans.append(PlannedFile(f"f{i}", ends[-1] + 4000, pieces, blocks))
    return plans


@pytest.mark.parametrize("fsync", [False, True])
def test_what_is_written_does_not_depend_on_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool) -> None:
    entries = tensors(tmp_path / "source", 60, 30_000)
    monkeypatch.setattr(planned_files, "_BATCH", 100_000)
    for jobs in (1, 2, 7):
        seen: list[tuple[int, int]] = []
        target = tmp_path / f"target{jobs}"
        threads = threading.active_count()
        found = write_files(
            target,
            planned(entries, 3),
            jobs=jobs,
            fsync=fsync,
            progress=lambda *count, seen=seen: seen.append(count),
        )
        assert threading.active_count() == threads
        assert seen == sorted(seen)
        assert seen[-1] == (1_800_000, 1_800_000)
        for name, entry in found.items():
            written = (target / name).read_bytes()
            assert written == (tmp_path / "target1" / name).read_bytes()
            assert (entry.size, entry.crc32) == (len(written), zlib.crc32(written))
    source = (tmp_path / "source").read_bytes()
    assert (tmp_path / "target7" / "f1").read_bytes()[30_000:60_000] == source[120_000:150_000]


class Cancelled(BaseException):
    """Such as KeyboardInterrupt."""


@pytest.mark.parametrize("jobs", [1, 3])
def test_what_fails_in_one_thread_stops_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int) -> None:
    entries = tensors(tmp_path / "source", 400, 30_000)
    monkeypatch.setattr(planned_files, "_BATCH", 60_000)
    threads = threading.active_count()
    seen: list[int] = []

    def cancel(done: int, _: int) -> None:
        seen.append(done)
        if len(seen) == 5:
            raise Cancelled

    with pytest.raises(Cancelled):
        write_files(tmp_path / "a", planned(entries, 2), jobs=jobs, fsync=True, progress=cancel)
    assert len(seen) == 5
    assert threading.active_count() == threads

    with (tmp_path / "source").open("r+b") as file:
        file.seek(20 * 30_000)
        byte = file.read(1)[0]
        file.seek(20 * 30_000)
        file.write(bytes([byte ^ 1]))
    seen.clear()

    def slowly(done: int, _: int) -> None:
        seen.append(done)
        time.sleep(0.001)

    with pytest.raises(CorruptCheckpointError, match=r"tensor 't20' in source is damaged"):
        write_files(tmp_path / "b", planned(entries, 2), jobs=jobs, progress=slowly)
    assert len(seen) < 100  # of 400
    assert threading.active_count() == threads
    write_files(tmp_path / "c", planned(entries, 2), jobs=jobs, verify=False)


def test_atomic_file(tmp_path: Path) -> None:
    with atomic_output(tmp_path / "a") as temporary:
        temporary.write_text("one")
        assert temporary.parent == tmp_path
        assert temporary.name.startswith(".a.")
        assert not (tmp_path / "a").exists()
    with pytest.raises(TargetExistsError), atomic_output(tmp_path / "a"):
        pass
    with atomic_output(tmp_path / "a", overwrite=True) as temporary:
        temporary.write_text("two")
    assert (tmp_path / "a").read_text() == "two"
    assert os.listdir(tmp_path) == ["a"]


def test_atomic_directory_is_replaced_whole(tmp_path: Path) -> None:
    for content in ("one", "two"):
        with atomic_output(tmp_path / "d", overwrite=True, fsync=content == "one") as temporary:
            (temporary / "sub").mkdir(parents=True)
            (temporary / "sub" / content).touch()
        assert os.listdir(tmp_path) == ["d"]
        assert os.listdir(tmp_path / "d" / "sub") == [content]

    def fail() -> None:
        with atomic_output(tmp_path / "d", overwrite=True) as temporary:
            temporary.mkdir()
            raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="disk on fire"):
        fail()
    assert os.listdir(tmp_path / "d" / "sub") == ["two"]
    assert os.listdir(tmp_path) == ["d"]


def test_commit_checks_again_and_leaves_the_temporary(tmp_path: Path) -> None:
    temporary = temporary_sibling(tmp_path / "a")
    temporary.touch()
    (tmp_path / "a").write_text("someone was faster")
    with pytest.raises(TargetExistsError, match="exists already"):
        commit(temporary, tmp_path / "a")
    assert temporary.exists()
    discard(temporary)
    discard(temporary)
    assert os.listdir(tmp_path) == ["a"]


def test_a_failed_replacement_puts_the_old_directory_back(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "precious").touch()
    with pytest.raises(FileNotFoundError):
        commit(tmp_path / "never written", tmp_path / "d", overwrite=True, fsync=False)
    assert os.listdir(tmp_path / "d") == ["precious"]


@pytest.mark.parametrize("replaced", [False, True])
def test_what_a_killed_run_left_is_cleaned_up(tmp_path: Path, replaced: bool) -> None:
    program = (
        "import os, sys; from pathlib import Path; from mmfsdp.checkpoint.files.atomic import temporary_sibling\n"
        "path = temporary_sibling(Path(sys.argv[1])); path.mkdir(); print(path, flush=True); os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "d"], capture_output=True, text=True, check=False)
    stale = Path(done.stdout.strip())
    assert stale.is_dir()
    if replaced:  # killed between moving the old directory aside and moving the new one in
        stale = stale.rename(stale.with_suffix(".mmfsdp-replaced"))
    mine = tmp_path / stale.name.replace(".d.", ".d.e.")
    mine.mkdir()
    (stale / "file").touch()
    foreign = [tmp_path / ".d.tmp", tmp_path / stale.name.replace(".d.", ".other.")]
    for path in foreign:
        path.touch()
    temporary_sibling(tmp_path / "d")
    assert not stale.exists()
    assert (tmp_path / "d" / "file").exists() == replaced
    assert mine.exists()
    assert all(path.exists() for path in foreign)


def test_manifest(tmp_path: Path) -> None:
    (tmp_path / "rank0.pth").write_bytes(b"zero")
    (tmp_path / "rank1.pth").write_bytes(b"one")
    written = write_manifest(tmp_path, save_id="abc", world_size=2)
    assert read_manifest(tmp_path) == check_manifest(tmp_path) == written
    content = json.loads((tmp_path / "manifest.json").read_text())
    assert content == {
        "format": "mmfsdp.manifest",
        "version": 1,
        "save_id": "abc",
        "world_size": 2,
        "block_size": 1 << 18,
        "files": {
            f"rank{rank}.pth": {"size": len(data), "crc32": crc, "crc32_blocks": crc}  # of one block
            for rank, data in enumerate((b"zero", b"one"))
            for crc in (f"{zlib.crc32(data):08x}",)
        },
    }
    (tmp_path / "rank1.pth").write_bytes(b"four")
    with pytest.raises(CorruptCheckpointError, match=r"rank1\.pth has 4 bytes \(expected 3 by manifest\.json\)"):
        check_manifest(tmp_path)
    (tmp_path / "rank1.pth").unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"rank1\.pth is missing, which manifest\.json lists\."):
        check_manifest(tmp_path)


def test_manifests_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(IncompleteCheckpointError, match=r"has no manifest\.json"):
        read_manifest(tmp_path)
    good = {"format": "mmfsdp.manifest", "version": 1, "save_id": "s", "world_size": 1, "files": {}}
    for change, error, message in [
        ({"format": "other"}, FormatError, "is not a manifest of mmfsdp"),
        ({"version": 2}, FormatError, "has version 2; this mmfsdp reads version 1"),
        ({"files": {"../x": {"size": 1}}}, CorruptCheckpointError, "the entry of '../x' is malformed"),
        ({"save_id": None}, CorruptCheckpointError, "'save_id' or 'world_size' is malformed"),
    ]:
        (tmp_path / "manifest.json").write_text(json.dumps({**good, **change}))
        with pytest.raises(error, match=message):
            read_manifest(tmp_path)
    write_manifest(tmp_path, save_id="s", world_size=1, files={"rank0.pth": FileEntry(3, None)})
    assert read_manifest(tmp_path).files == {"rank0.pth": FileEntry(3, None)}


def test_nothing_imports_torch(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from mmfsdp.checkpoint import Chunk, Layout, TensorEntry, convert, open_layout
from mmfsdp.checkpoint import manifest
from mmfsdp.checkpoint.files import atomic
from mmfsdp.checkpoint.formats.torch_files.torch_zip_writer import plan_file
from mmfsdp.checkpoint.files.planned_files import write_files
write_files(Path({str(tmp_path / "a.pth")!r}), [plan_file("", {{"state_dict": {{}}}}, {{}})])
convert({str(tmp_path / "a.pth")!r}, {str(tmp_path / "b.safetensors")!r})
print(sorted({{'torch', 'numpy', 'pydantic', 'mmengine', 'safetensors'}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
