"""What is wrong with a checkpoint is found before or while copying, named, and leaves no output behind."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mmfsdp.checkpoint import Chunk, TargetExistsError, TensorEntry, convert, open_layout
from mmfsdp.checkpoint.formats.torch_files.zip_archive import read_records
from mmfsdp.checkpoint.geometry import check_coverage
from mmfsdp.checkpoint.layout import Layout, TensorRef
from mmfsdp.checkpoint.manifest import write_manifest
from mmfsdp.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    FormatError,
    IncompleteCheckpointError,
    UnsafePickleError,
)


def save_local(directory: Path, world_size: int = 3, save_id: str = "a", rows: int = 2) -> Path:
    directory.mkdir()
    for rank in range(world_size):
        boxes = {"state_dict/w": {"shape": [rows * world_size, 4], "offsets": [rows * rank, 0]}}
        header = {"format": "rank_local", "version": 1, "world_size": world_size, "rank": rank}
        content = {
            "state_dict": {"w": torch.full((rows, 4), float(rank + 1)), "b": torch.ones(3)},
            "meta": {"epoch": 1},
            "mmfsdp": {**header, "save_id": save_id, "tensors": boxes},
        }
        torch.save(content, directory / f"rank{rank}.pth")
    return directory


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def assert_only(directory: Path, *names: str) -> None:
    assert sorted(os.listdir(directory)) == sorted(names)


def test_missing_rank_files_are_named(tmp_path: Path) -> None:
    source = save_local(tmp_path / "epoch_1", 4)
    (source / "rank1.pth").unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"epoch_1 was saved by 4 ranks, but rank1\.pth is missing\."):
        open_layout(source)
    (source / "rank0.pth").unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"but rank0\.pth, rank1\.pth are missing\."):
        open_layout(source)


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_a_flipped_byte_is_found_and_leaves_nothing(tmp_path: Path, suffix: str) -> None:
    source = save_local(tmp_path / "in")
    record = read_records(source / "rank1.pth")["rank1/data/0"]
    flip(source / "rank1.pth", record.offset + 5)
    message = r"The data of tensor 'state_dict/w' in rank1\.pth is damaged: its CRC-32 is [0-9a-f]{8} \(expected "
    with pytest.raises(CorruptCheckpointError, match=message) as caught:
        convert(source, tmp_path / f"out.{suffix}")
    assert caught.value.context == {"file": str(source / "rank1.pth"), "offset": record.offset}
    assert_only(tmp_path, "in")


def test_without_verify_the_damage_still_shows_in_the_target(tmp_path: Path) -> None:
    source = save_local(tmp_path / "in", 1)
    flip(source / "rank0.pth", read_records(source / "rank0.pth")["rank0/data/0"].offset)
    convert(source, tmp_path / "out.pth", verify=False)
    # The stored checksum goes along with the data, so nobody takes damaged data for good later.
    assert zipfile.ZipFile(tmp_path / "out.pth").testzip() == "archive/data/0"


@pytest.mark.exhaustive
def test_every_flipped_byte_of_the_metadata_is_an_error_of_ours_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "in.pth"
    torch.save({"state_dict": {"w": torch.ones(2)}}, path)
    good = path.read_bytes()
    start = good.index(b"PK\x01\x02")
    record = read_records(path)["in/data.pkl"]
    for offset in [*range(0, 30), *range(record.offset, record.offset + record.nbytes, 3), *range(start, len(good), 2)]:
        path.write_bytes(good)
        flip(path, offset)
        try:
            convert(path, tmp_path / "out.pth", overwrite=True)
        except (CorruptCheckpointError, FormatError, UnsafePickleError):
            continue
        assert torch.equal(torch.load(tmp_path / "out.pth", weights_only=True)["state_dict"]["w"], torch.ones(2))


def test_truncated_files(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(5000)}, tmp_path / "in.pth")
    save_file({"w": torch.ones(5000)}, tmp_path / "in.safetensors")
    for name, message in {
        "in.pth": r"in\.pth is truncated or damaged: its zip directory cannot be read",
        "in.safetensors": r"in\.safetensors has 9000 bytes \(expected 20\d{3}\): it is truncated\.",
    }.items():
        os.truncate(tmp_path / name, 9000)
        with pytest.raises(CorruptCheckpointError, match=message):
            open_layout(tmp_path / name)
    os.truncate(tmp_path / "in.safetensors", 20)
    with pytest.raises(CorruptCheckpointError, match=r"The header of in\.safetensors is truncated or damaged\."):
        open_layout(tmp_path / "in.safetensors")
    os.truncate(tmp_path / "in.safetensors", 0)
    with pytest.raises(CorruptCheckpointError, match=r"in\.safetensors is empty\."):
        open_layout(tmp_path / "in.safetensors")


def test_a_rank_file_of_another_save(tmp_path: Path) -> None:
    source, other = save_local(tmp_path / "in"), save_local(tmp_path / "other", save_id="b")
    shutil.copy(other / "rank2.pth", source / "rank2.pth")
    message = r"rank2\.pth is of another save \('b'\) than rank0\.pth \('a'\)\."
    with pytest.raises(CorruptCheckpointError, match=message):
        open_layout(source)
    shutil.copy(other / "rank1.pth", other / "rank2.pth")
    with pytest.raises(CorruptCheckpointError, match=r"rank2\.pth holds rank 1 of 3 \(expected rank 2 of 3\)\."):
        open_layout(other)


def test_files_left_over_from_a_larger_save(tmp_path: Path) -> None:
    source, other = save_local(tmp_path / "in", 2), save_local(tmp_path / "other", 4)
    shutil.copy(other / "rank3.pth", source)
    with pytest.raises(CorruptCheckpointError, match=r"saved by 2 ranks, but also holds rank3\.pth, left over"):
        open_layout(source)


def test_sizes_against_the_manifest(tmp_path: Path) -> None:
    source = save_local(tmp_path / "in")
    write_manifest(source, save_id="a", world_size=3)
    open_layout(source)
    size = (source / "rank1.pth").stat().st_size
    with (source / "rank1.pth").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(
        CorruptCheckpointError, match=rf"rank1\.pth has {size + 1} bytes \(expected {size} by manifest\.json\)"
    ):
        open_layout(source)
    os.truncate(source / "rank1.pth", size)
    write_manifest(source, save_id="z", world_size=3)
    with pytest.raises(CorruptCheckpointError, match=r"rank0\.pth is of another save \('a'\) than manifest\.json"):
        open_layout(source)


def test_boxes_with_a_gap_or_an_overlap(tmp_path: Path) -> None:
    def with_boxes(*starts: int) -> Layout:
        chunks = tuple(Chunk(data, 0, 16, (start, 0), (2, 2)) for start in starts)
        entry = TensorEntry("w", "float32", (6, 2), chunks)
        return Layout(tmp_path, "rank_local", 1, {"w": entry}, {"w": TensorRef("w")})

    data = tmp_path / "rank0.pth"
    data.write_bytes(b"\0" * 16)
    check_coverage(with_boxes(0, 4, 2))
    with pytest.raises(IncompleteCheckpointError, match=r"'w' of shape \[6, 2\] is incomplete: 8 of its 12 elements"):
        check_coverage(with_boxes(0, 4))
    with pytest.raises(CorruptCheckpointError, match=r"'w': the boxes in rank0\.pth \(at \[0, 0\].* overlap"):
        check_coverage(with_boxes(0, 1, 4))
    with pytest.raises(CorruptCheckpointError, match=r"the box at \[5, 0\] of size \[2, 2\], which does not fit"):
        check_coverage(with_boxes(0, 2, 5))
    os.truncate(data, 15)
    with pytest.raises(CorruptCheckpointError, match=r"rank0\.pth is truncated: tensor 'w' reaches to byte 16"):
        check_coverage(with_boxes(0, 4, 2))


class _Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch pwned",)


class _Sneaky:
    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (dict, "clear")


def test_unsafe_pickles_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {"w": torch.ones(2)}, "meta": _Malicious()}, "in.pth")
    message = r"in\.pth wants to import 'posix\.system', which is not on the list of safe names; nothing was imported\."
    with pytest.raises(UnsafePickleError, match=message) as caught:
        open_layout("in.pth")
    assert caught.value.context == {"file": "in.pth"}
    torch.save({"w": _Sneaky()}, "sneaky.pth")
    with pytest.raises(UnsafePickleError, match=r"'builtins\.dict\.clear'"):
        open_layout("sneaky.pth")
    # Trusted, it is a placeholder: still not run.
    assert repr(open_layout("in.pth", trust=True).tree["meta"]) == "<pickled posix.system>"
    convert("in.pth", "out.pth", trust=True)
    assert not Path("pwned").exists()


def test_pickles_that_tamper_with_what_they_are_given(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "in.pth")
    for payload in (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x01\x00\x00\x00aK\x01sb.",  # BUILD on a function
        b"\x80\x02ccollections\nOrderedDict\nN}X\x03\x00\x00\x00popK\x01s\x86b.",  # setattr on a class
        b"\x80\x02ctorch\nFloatStorage\n)R.",  # a storage out of nothing
        b"\x80\x02X\x01\x00\x00\x00aQ.",  # a persistent id of the wrong kind
        b"\x80\x02(",
        b"",
    ):
        with zipfile.ZipFile(tmp_path / "bad.pth", "w") as archive:
            archive.writestr("bad/data.pkl", payload)
        with pytest.raises((CorruptCheckpointError, FormatError), match=r"bad\.pth"):
            open_layout(tmp_path / "bad.pth")
    open_layout(tmp_path / "in.pth")


def test_directories_of_stock_mmengine(tmp_path: Path) -> None:
    (tmp_path / "epoch_1").mkdir()
    torch.save({"state_dict": {"w": torch.ones(1)}, "meta": _Malicious()}, tmp_path / "epoch_1" / "rank0.pth")
    with pytest.raises(UnsafePickleError, match=r"rank0\.pth wants to import 'posix\.system'"):
        open_layout(tmp_path / "epoch_1")


def test_one_rank_file_is_not_taken_for_a_checkpoint(tmp_path: Path) -> None:
    source = save_local(tmp_path / "epoch_1")
    with pytest.raises(FormatError, match=r"rank1\.pth is one rank's part of a sharded checkpoint; open its directory"):
        open_layout(source / "rank1.pth")


def test_files_of_other_formats(tmp_path: Path) -> None:
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(FormatError, match=r"plain\.pkl is not a checkpoint of a known format: it begins with b'\\x80"):
        open_layout(tmp_path / "plain.pkl")
    with zipfile.ZipFile(tmp_path / "docs.zip", "w") as archive:
        archive.writestr("a.txt", "hello")
    with pytest.raises(FormatError, match=r"docs\.zip is a zip archive but not a file of torch\.save"):
        open_layout(tmp_path / "docs.zip")
    with zipfile.ZipFile(tmp_path / "packed.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("packed/data.pkl", "x" * 100)
    with pytest.raises(FormatError, match=r"Entry 'packed/data\.pkl' of packed\.pth is compressed or encrypted"):
        open_layout(tmp_path / "packed.pth")
    torch.save({"w": torch.ones(2, dtype=torch.complex64).conj()}, tmp_path / "conj.pth")
    with pytest.raises(FormatError, match=r"conjugated or negated lazily"):
        open_layout(tmp_path / "conj.pth")


@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.eye(3).to_sparse(), r"holds a sparse tensor; save its to_dense\(\) instead"),
        (lambda: torch.eye(3).to_sparse_csr(), r"holds a sparse tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), r"holds a quantized tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), r"holds a nested tensor"),
        (lambda: torch.empty(3, device="meta"), r"holds a tensor on the meta device, which has no data"),
    ],
)
def test_kinds_of_tensors_that_are_not_read(make: Any, said: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "other": make()}, tmp_path / "a.pth")
    for trust in (False, True):
        with pytest.raises(FormatError, match=r"a\.pth " + said):
            open_layout(tmp_path / "a.pth", trust=trust)


def test_a_wrong_path_names_the_nearest(tmp_path: Path) -> None:
    save_local(tmp_path / "epoch_12")
    (tmp_path / "notes.txt").touch()
    message = r"There is no checkpoint at '.*epoch12'\. Did you mean 'epoch_12'\?"
    with pytest.raises(CheckpointNotFoundError, match=message):
        open_layout(tmp_path / "epoch12")
    with pytest.raises(
        CheckpointNotFoundError,
        match=r"has no file of a rank such as rank0\.pth, .*\. It holds 'epoch_12', 'notes\.txt'\.",
    ):
        open_layout(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=r"Its directory '.*nowhere' does not exist either\."):
        open_layout(tmp_path / "nowhere" / "x.pth")


def test_arguments_of_convert(tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.ones(2)}, "ema_state_dict": {"w": torch.zeros(2)}}, tmp_path / "in.pth")
    with pytest.raises(ConfigError, match=r"The suffix '\.bin' of 'out\.bin' does not name a format"):
        convert(tmp_path / "in.pth", tmp_path / "out.bin")
    with pytest.raises(ConfigError, match=r"'safetensor' is not a format to write\. Did you mean 'safetensors'\?"):
        convert(tmp_path / "in.pth", tmp_path / "out.bin", to="safetensor")
    with pytest.raises(ConfigError, match=r"nor a top-level key of in\.pth\. Did you mean 'ema_state_dict'"):
        convert(tmp_path / "in.pth", tmp_path / "out.pth", keep="ema_statedict")
    with pytest.raises(ConfigError, match=r"is part of the source"):
        convert(tmp_path / "in.pth", tmp_path / "in.pth", overwrite=True)
    with pytest.raises(CheckpointNotFoundError, match=r"the directory '.*gone' does not exist"):
        convert(tmp_path / "in.pth", tmp_path / "gone" / "out.pth")
    torch.save({"w": torch.ones(2, dtype=torch.complex128)}, tmp_path / "complex.pth")
    with pytest.raises(ConfigError, match=r"safetensors cannot hold dtype 'complex128'"):
        convert(tmp_path / "complex.pth", tmp_path / "out.safetensors")
    torch.save({"model_ema": {"w": torch.ones(2)}}, tmp_path / "odd.pth")
    with pytest.raises(FormatError, match=r"odd\.pth has no 'state_dict'\. Its top-level keys are 'model_ema'"):
        convert(tmp_path / "odd.pth", tmp_path / "out.pth")
    assert_only(tmp_path, "in.pth", "complex.pth", "odd.pth")

    report = convert(tmp_path / "in.pth", tmp_path / "ema.bin", keep="ema_state_dict", to="pth")
    assert (report.tensors, report.bytes, report.dropped, report.format) == (1, 8, ("state_dict",), "torch_zip")


def test_an_existing_target_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "in.pth")
    (tmp_path / "out.pth").write_text("precious")
    with pytest.raises(TargetExistsError, match=re.escape("Pass overwrite=True to replace this file")):
        convert(tmp_path / "in.pth", tmp_path / "out.pth")
    assert (tmp_path / "out.pth").read_text() == "precious"
    convert(tmp_path / "in.pth", tmp_path / "out.pth", overwrite=True)
    assert torch.load(tmp_path / "out.pth", weights_only=True)["state_dict"]["w"].tolist() == [1, 1]


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, suffix: str, error: type[BaseException]) -> None:
    source = save_local(tmp_path / "in")
    seen = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))
        if len(seen) == 3:
            raise error("stop")

    with pytest.raises(error, match="stop"):
        convert(source, tmp_path / f"out.{suffix}", progress=progress)
    assert_only(tmp_path, "in")
    assert seen[-1][0] <= seen[-1][1] == 3 * 2 * 4 * 4 + 3 * 4
