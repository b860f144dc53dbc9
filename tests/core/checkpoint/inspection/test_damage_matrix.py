"""Damage of every kind to every format that is written: verify finds it, and convert makes no wrong weights of it."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.core.samples import write_samples

from mmfsdp.checkpoint import convert, diff, open_layout, verify
from mmfsdp.checkpoint.formats.torch_files.zip_archive import read_records
from mmfsdp.checkpoint.inspection.verification import VerifyReport
from mmfsdp.errors import CorruptCheckpointError, MmfsdpError

KINDS = ["zip.pth", "ours.pth", "ours.safetensors", "index", "dcp", "local"]
DIRECTORIES = ["index", "dcp", "local"]


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Path]]:
    """Samples of two steps: the same names and shapes, other values."""
    return [write_samples(tmp_path_factory.mktemp(f"step{step}"), step) for step in range(2)]


def copied(source: Path, target: Path) -> Path:
    if target.is_dir():
        shutil.rmtree(target)
    return Path(shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target))


def converted(good: Path, directory: Path) -> Path:
    convert(good, directory / "expected.pth", keep="all", fsync=False)
    return directory / "expected.pth"


def files_of(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else [path]


def boundaries(good: Path, file: Path) -> Iterator[tuple[str, int]]:
    """Yield where the parts of a file begin and end, with what they are."""
    size = file.stat().st_size
    layout = open_layout(good)
    yield from (("beginning", 0), ("beginning", 1), ("end", size - 1))
    for name, entry in layout.tensors.items():
        for chunk in entry.chunks():
            if chunk.file == file and chunk.nbytes:
                yield from ((f"data of {name}", at) for at in (chunk.offset, chunk.offset + chunk.nbytes - 1))
    if file.suffix == ".safetensors":
        length = struct.unpack("<Q", file.read_bytes()[:8])[0]
        yield from (("header", at) for at in (7, 8, 8 + length // 2, 8 + length - 1))
        yield "checksum", file.read_bytes().index(b"mmfsdp.crc32") + 18
    elif file.suffix == ".pth":
        for record in read_records(file).values():
            yield from (
                ("header", at) for at in (record.header, record.header + 30, record.central, record.central + 46)
            )
            yield "checksum", record.central + 16
            if record.name.endswith("data.pkl"):
                yield from (("pickle", record.offset + at) for at in range(0, record.nbytes, 31))
        yield from (("end record", size - 22), ("end record", size - 6))
    elif file.suffix in ("", ".json"):
        yield from (("metadata", at) for at in range(2, size, 29))


def check(path: Path, expected: Path, out: Path, what: str) -> tuple[VerifyReport | None, MmfsdpError | None]:
    """Return what verify and convert say; a conversion that goes through must give what the good one gives."""
    report = refused = None
    with contextlib.suppress(MmfsdpError):  # a name in a pickle has changed, or there is no checkpoint any more
        report = verify(path)
    try:
        convert(path, out, keep="all", fsync=False, jobs=1)
    except MmfsdpError as error:
        refused = error
        assert os.listdir(out.parent) == [], what
    else:
        assert diff(out, expected).same, what
        out.unlink()
    return report, refused


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "out.pth"


@pytest.mark.sample("ours.safetensors", "index", "ours.pth")
@pytest.mark.parametrize("kind", KINDS)
def test_flipped_bytes(saves: list[dict[str, Path]], tmp_path: Path, out: Path, kind: str) -> None:
    good = saves[0][kind]
    path, expected = copied(good, tmp_path / good.name), converted(good, tmp_path)
    for original in files_of(good):
        file = path / original.name if good.is_dir() else path
        data = original.read_bytes()
        for what, at in boundaries(good, original):
            file.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
            report, refused = check(path, expected, out, f"{original.name}: {what} at {at}")
            if what.startswith("data of "):
                assert isinstance(refused, CorruptCheckpointError)
                assert refused.context["file"] == str(file)
                assert report is not None
                messages = " ".join(problem.message for problem in report.problems if problem.file == str(file))
                assert what.removeprefix("data of ") in messages + str(refused)
            elif good.is_dir() or what in ("pickle", "checksum", "metadata"):
                found = report is None or not report.ok
                assert found or file.name == "manifest.json", (file.name, what, at)
        file.write_bytes(data)
    assert verify(path).ok


@pytest.mark.sample("ours.safetensors", "zip.pth", "index")
@pytest.mark.parametrize("kind", KINDS)
def test_truncated(saves: list[dict[str, Path]], tmp_path: Path, out: Path, kind: str) -> None:
    good = saves[0][kind]
    path, expected = copied(good, tmp_path / good.name), converted(good, tmp_path)
    for original in files_of(good):
        file = path / original.name if good.is_dir() else path
        for what, at in {*boundaries(good, original)}:
            file.write_bytes(original.read_bytes()[:at])
            report, refused = check(path, expected, out, f"{original.name}: {what} at {at}")
            harmless = file.name.endswith(".json") and at == original.stat().st_size - 1  # the last newline
            assert refused is not None or harmless, (file.name, what, at)
            assert report is None or not report.ok or file.name == "manifest.json"
            if report is not None and not report.ok:
                assert any(file.name in problem.message for problem in report.problems), report.problems
        file.write_bytes(original.read_bytes())


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_shards_deleted_swapped_doubled_and_stale(
    saves: list[dict[str, Path]], tmp_path: Path, out: Path, kind: str
) -> None:
    good, other = saves[0][kind], saves[1][kind]
    expected = converted(good, tmp_path)
    names = [file.name for file in files_of(good)]
    shards = [name for name in names if Path(name).suffix in (".safetensors", ".distcp", ".pth")]
    assert len(shards) > 1

    def damaged(what: str, files: set[str]) -> None:
        report, refused = check(path, expected, out, what)
        assert refused is not None, what
        assert any(name in str(refused) for name in files), (what, refused)
        assert report is not None
        assert not report.ok, what
        assert any(name in problem.message for problem in report.problems for name in files), (what, report.problems)

    for name in names:
        if name != "manifest.json":
            path = copied(good, tmp_path / kind)
            (path / name).unlink()
            report, refused = check(path, expected, out, f"{name} deleted")
            assert refused is not None
            assert report is None or not report.ok
        path = copied(good, tmp_path / kind)
        (path / name).write_bytes((other / name).read_bytes())
        if (good / name).read_bytes() != (other / name).read_bytes():
            damaged(f"{name} of another step", {name, "manifest.json", "__0_0.distcp", *shards})
    for one, two in itertools.pairwise(shards):
        path = copied(good, tmp_path / kind)
        (path / two).write_bytes((good / one).read_bytes())
        damaged(f"{one} doubled", {two})
        (path / one).write_bytes((good / two).read_bytes())
        damaged(f"{one} and {two} swapped", {one, two})


@pytest.mark.parametrize("kind", ["index", "dcp", "bins", "torch_dcp", "safetensors_ranks", "stock"])
def test_without_a_manifest_it_is_said_that_one_save_cannot_be_told(
    saves: list[dict[str, Path]], tmp_path: Path, kind: str
) -> None:
    path = copied(saves[0][kind], tmp_path / kind)
    (path / "manifest.json").unlink(missing_ok=True)
    report = verify(path)
    assert report.ok
    assert any("whether all files are of one save" in said for said in report.unchecked), report.unchecked


@pytest.mark.parametrize("kind", ["plain.safetensors", "legacy.pth", "safetensors_ranks"])
def test_without_checksums_it_is_said_that_data_cannot_be_checked(saves: list[dict[str, Path]], kind: str) -> None:
    report = verify(saves[0][kind])
    assert report.ok
    assert any("stores no checksum for it" in said for said in report.unchecked)


def test_a_tensor_whose_name_has_changed_in_the_metadata_is_not_left_out(
    saves: list[dict[str, Path]], tmp_path: Path
) -> None:
    path = copied(saves[0]["torch_dcp"], tmp_path / "in")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    described = metadata.state_dict_metadata
    described["state_dict.zncoder.weight"] = described.pop("state_dict.encoder.weight")
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    message = r"it locates 'state_dict\.encoder\.weight', but does not describe it"
    with pytest.raises(CorruptCheckpointError, match=message):
        convert(path, tmp_path / "out.pth")
    assert not verify(path).ok
