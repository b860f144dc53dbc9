"""Directories of torch's distributed checkpoint, as one process writes them: read as torch reads them, or refused."""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mmfsdp.basics.dtypes import DTYPES, to_torch
from mmfsdp.checkpoint import convert, open_layout, verify
from mmfsdp.checkpoint.formats.dcp.metadata import INTEGER_KEYS
from mmfsdp.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatError,
    IncompleteCheckpointError,
    MmfsdpError,
    UnsafePickleError,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns that there is one process


def content() -> dict[str, Any]:
    torch.manual_seed(0)
    weight = torch.randn(4, 6)
    return {
        "model": {
            "weight": weight,
            "tied": weight,
            "transposed": torch.randn(3, 5).t(),
            "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
            "view": torch.randn(10)[2:5],
            "scalar": torch.tensor(7),
            "empty": torch.zeros(0, 3),
            "parameter": torch.nn.Parameter(torch.randn(3)),
            **{f"dtype.{name}": torch.ones(3).to(to_torch(name)) for name in DTYPES if "_x" not in name},
        },
        "optimizer": {
            "state": {"weight": {"step": torch.tensor(3.0), "exp_avg": torch.randn(4, 6)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["weight"]}],
        },
        "list": [torch.ones(2), {"a": "text"}, [torch.zeros(1)]],
        "epoch": 3,
        "rng": torch.get_rng_state(),
        "tuple": (torch.ones(2), 5),
    }


def save(directory: Path, value: dict[str, Any], **options: Any) -> Path:
    dcp.save(value, storage_writer=dcp.FileSystemWriter(directory, **options), no_dist=True)
    return directory


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("dcp") / "in", content())


@pytest.fixture
def source(stored: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stored, tmp_path / "in"))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Two tensors of 24 and 16 bytes, and an object."""
    return save(tmp_path / "in", {"a": torch.arange(6.0), "b": torch.ones(4), "c": "text"})


def by_place(value: dict[str, Any]) -> dict[str, Any]:
    """Return content with the optimizer's state as a .pth file has it: by place, the names beside."""
    [name] = value["optimizer"]["state"]
    [group] = value["optimizer"]["param_groups"]
    groups = [{**group, "params": [0], "param_names": [name]}]
    return {**value, "optimizer": {"state": {0: value["optimizer"]["state"][name]}, "param_groups": groups}}


def same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        raw = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, two) if tensor.numel()]
        return one.dtype == two.dtype and one.shape == two.shape and (not raw or torch.equal(*raw))
    if isinstance(one, dict):
        return [*one] == [*two] and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


@pytest.mark.parametrize("threads", [1, 3])
def test_reads_what_torch_reads(tmp_path: Path, threads: int) -> None:
    source = save(tmp_path / "in", content(), thread_count=threads, single_file_per_rank=threads == 1)
    assert len(list(source.glob("*.distcp"))) >= threads
    layout = open_layout(source)
    assert (layout.format, layout.world_size, layout.tree["epoch"]) == ("dcp", 1, 3)
    assert all(chunk.record for entry in layout.tensors.values() for chunk in entry.chunks())
    convert(source, tmp_path / "out.pth", keep="all")
    dcp_to_torch_save(source, tmp_path / "torch.pth")
    expected, found = (torch.load(tmp_path / name) for name in ("torch.pth", "out.pth"))
    assert same(by_place(expected), found)
    assert same(content()["model"], found["model"])


def test_safetensors_inside(tmp_path: Path) -> None:
    value = content()
    for name in ("tied", "transposed", "channels_last", "view", "dtype.complex128"):  # torch's writer cannot hold them
        del value["model"][name]
    source = save(tmp_path / "in", value, serialization_format=SerializationFormat.SAFETENSORS)
    convert(source, tmp_path / "out.pth", keep="all")
    assert same(by_place(value), torch.load(tmp_path / "out.pth"))
    for length in range(1, 200, 7):
        file = source / "__0_0.distcp"
        file.write_bytes(file.read_bytes()[:-length])
        with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp"):
            located(source)


TENSOR = torch.ones(2)
NESTED = st.recursive(
    st.just(TENSOR),
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(["a", "b.c", "", 0, 7, -1]), inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=2).map(lambda parts: [*parts, 3]),
        st.lists(inner, min_size=1, max_size=2).map(tuple),
    ),
    max_leaves=8,
)


@pytest.mark.exhaustive
@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "b.c", "x", 0, 7]), NESTED, min_size=1, max_size=3))
def test_names_are_those_of_torchs_planner(tree: dict[Any, Any]) -> None:
    try:
        planned, _ = flatten_state_dict(tree)
    except ValueError:  # two values of one name
        assume(False)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(tree, Path(folder, "in.pth"))
        convert(Path(folder, "in.pth"), Path(folder, "out"), to="dcp", keep="all", fsync=False)
        stored = dcp.FileSystemReader(Path(folder, "out")).read_metadata().state_dict_metadata
        assert {*planned} == {*stored}
        convert(Path(folder, "out"), Path(folder, "again.pth"), keep="all", fsync=False)
        assert same(torch.load(Path(folder, "again.pth")), tree)


def test_a_dict_that_was_stored_whole(tmp_path: Path) -> None:
    """Earlier releases stored dicts with integer keys so; a planner of torch can, too."""
    tree = {"averages": {0: torch.ones(2), "0": torch.zeros(1)}, "plain": {3: 4}}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save(tree, storage_writer=dcp.FileSystemWriter(tmp_path / "in"), planner=planner, no_dist=True)
    convert(tmp_path / "in", tmp_path / "again", to="dcp", keep="all")
    convert(tmp_path / "again", tmp_path / "out.pth", keep="all")
    assert same(torch.load(tmp_path / "out.pth"), tree)


def test_flat_names_and_model_only(tmp_path: Path) -> None:
    source = save(tmp_path / "in", {"layer.weight": torch.ones(2, 3), "layer.bias": torch.zeros(2)})
    assert open_layout(source).is_flat
    convert(source, tmp_path / "out.pth")
    assert [*torch.load(tmp_path / "out.pth")["state_dict"]] == ["layer.weight", "layer.bias"]


def test_async_save(tmp_path: Path) -> None:
    dcp.async_save({"a": torch.arange(6.0)}, checkpoint_id=tmp_path / "in", no_dist=True).result()
    convert(tmp_path / "in", tmp_path / "out.pth")
    assert torch.equal(torch.load(tmp_path / "out.pth")["state_dict"]["a"], torch.arange(6.0))


def located(directory: Path) -> None:
    """Open a checkpoint and look up all of its tensors."""
    for entry in open_layout(directory).tensors.values():
        assert entry.num_chunks == len(entry.chunks())


def test_a_layout_can_be_sent_to_other_processes(small: Path) -> None:
    layout = open_layout(small)
    expected = [entry.chunks() for entry in open_layout(small).tensors.values()]
    assert [entry.chunks() for entry in pickle.loads(pickle.dumps(layout)).tensors.values()] == expected
    assert [entry.chunks() for entry in layout.tensors.values()] == expected


def rewrite(directory: Path, change: Callable[[Metadata], Any]) -> None:
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    changed = change(metadata)
    path.write_bytes(pickle.dumps(metadata if changed is None else changed))


def relocate(name: str, **fields: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == name:
                metadata.storage_data[index] = dataclasses.replace(info, **fields)

    return change


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"offset": -1}, CorruptCheckpointError, r"'a' lies at byte -1"),
        ({"offset": 1 << 40}, CorruptCheckpointError, r"__0_0\.distcp is truncated: 'a' reaches to byte"),
        ({"length": 1 << 62}, CorruptCheckpointError, r"'a' lies at byte \d+ with length"),
        ({"length": -5}, CorruptCheckpointError, r"'a' lies at byte \d+ with length -5"),
        ({"length": True}, CorruptCheckpointError, r"'a' lies at byte \d+ with length True"),
        ({"length": 10}, CorruptCheckpointError, r"'a': __0_0\.distcp is truncated or damaged"),
        ({"relative_path": "../in/__0_0.distcp"}, FormatError, r"which is not in its directory"),
        ({"relative_path": "/etc/passwd"}, FormatError, r"'/etc/passwd', which is not in its directory"),
        ({"relative_path": ""}, FormatError, r"which is not in its directory"),
        ({"relative_path": 3}, CorruptCheckpointError, r"the file of 'a' is 3"),
        ({"relative_path": "__1_0.distcp"}, IncompleteCheckpointError, r"__1_0\.distcp, which holds 'a', is missing"),
        ({"transform_descriptors": ("zstd",)}, FormatError, r"'a' of \.metadata is stored through zstd"),
    ],
)
def test_crafted_locations(small: Path, fields: dict[str, Any], error: type[MmfsdpError], message: str) -> None:
    rewrite(small, relocate("a", **fields))
    with pytest.raises(error, match=message):
        located(small)


def test_overlapping_and_swapped_extents(small: Path) -> None:
    def swap(metadata: Metadata) -> None:
        one, two = (next(index for index in metadata.storage_data if index.fqn == name) for name in "ab")
        data = metadata.storage_data
        data[one], data[two] = data[two], data[one]

    def same_place(metadata: Metadata) -> None:
        one, two = (next(index for index in metadata.storage_data if index.fqn == name) for name in "ab")
        metadata.storage_data[one] = metadata.storage_data[two]

    rewrite(small, swap)
    message = r"holds float32 of size \[4\] for tensor 'a' at \[0\] \(expected float32 of size \[6\]\)"
    assert open_layout(small).tensors["a"].num_chunks == 1
    with pytest.raises(CorruptCheckpointError, match=message):
        located(small)
    report = verify(small)  # names each of them
    assert {problem.message.split("tensor ")[1][:3] for problem in report.problems} == {"'a'", "'b'"}
    rewrite(small, same_place)
    with pytest.raises(CorruptCheckpointError, match=r"overlap in __0_0\.distcp"):
        open_layout(small)


def test_links_out_of_the_directory(small: Path, tmp_path: Path) -> None:
    (small / "__0_0.distcp").rename(tmp_path / "elsewhere")
    (small / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FormatError, match=r"names the file '__0_0\.distcp', which is a link out of its directory"):
        open_layout(small)


@pytest.mark.parametrize(
    "change",
    [
        lambda metadata: metadata.state_dict_metadata.update(a=3),
        lambda metadata: setattr(metadata.state_dict_metadata["a"], "size", torch.Size([1 << 40, 1 << 40])),
        lambda metadata: setattr(metadata.state_dict_metadata["a"], "size", [-6]),
        lambda metadata: setattr(metadata.state_dict_metadata["a"], "size", [2, 3]),
        lambda metadata: setattr(metadata.state_dict_metadata["a"], "chunks", 3),
        lambda metadata: setattr(metadata.state_dict_metadata["a"].properties, "dtype", None),
        lambda metadata: metadata.planner_data.update(a=(1, 2)),
        lambda metadata: metadata.planner_data.update(a=("x", -1)),
        lambda metadata: metadata.planner_data.update(a=("x", 1 << 40)),
        lambda metadata: metadata.planner_data.update(a=("x",) * 1000),
        lambda metadata: metadata.planner_data.update(a=("b", "a"), b=("b",)),
        lambda metadata: metadata.planner_data.update(a=("b",), b=("b", "a")),
        lambda metadata: metadata.planner_data.update(a=("b",), b=("b",)),
        lambda metadata: setattr(metadata, "planner_data", 3),
        lambda metadata: setattr(metadata, INTEGER_KEYS, 3),
        lambda metadata: setattr(metadata, INTEGER_KEYS, {"a": (0,)}),
        lambda metadata: setattr(metadata, INTEGER_KEYS, {"a": (-1,)}),
        lambda metadata: setattr(metadata, "storage_data", 3),
        lambda metadata: metadata.storage_data.update({3: 4}),
        lambda metadata: {"a": 1},
    ],
)
def test_crafted_metadata(small: Path, change: Callable[[Metadata], Any]) -> None:
    rewrite(small, change)
    with pytest.raises((CorruptCheckpointError, FormatError), match=r"\.metadata"):
        open_layout(small)


def test_missing_chunks(small: Path, tmp_path: Path) -> None:
    def lose(metadata: Metadata) -> None:
        del metadata.storage_data[next(index for index in metadata.storage_data if index.fqn == "a")]

    rewrite(small, lose)
    with pytest.raises(
        IncompleteCheckpointError, match=r"Tensor 'a' of shape \[6\] is incomplete: 0 of its 6 elements"
    ):
        convert(small, tmp_path / "out.pth", keep="all")

    def half(metadata: Metadata) -> None:
        metadata.state_dict_metadata["b"].size = torch.Size([8])

    rewrite(small, half)
    with pytest.raises(
        IncompleteCheckpointError, match=r"Tensor 'b' of shape \[8\] is incomplete: 4 of its 8 elements"
    ):
        convert(small, tmp_path / "out.pth", keep="b")
    rewrite(small, lambda metadata: metadata.storage_data.pop(MetadataIndex("c")) and None)
    with pytest.raises(IncompleteCheckpointError, match=r"The metadata does not say where 'c' is stored"):
        open_layout(small)
    assert os.listdir(tmp_path) == ["in"]


def test_an_unfinished_save(small: Path) -> None:
    (small / ".metadata").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"has no \.metadata, which torch's DCP writes last"):
        open_layout(small)


def test_every_flipped_byte_of_data_is_found(small: Path, tmp_path: Path) -> None:
    for name, entry in open_layout(small).tensors.items():
        file, offset = entry.chunks()[0].file, entry.chunks()[0].offset
        data = file.read_bytes()
        for at in range(offset, offset + entry.nbytes, 5):
            file.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
            with pytest.raises(
                CorruptCheckpointError, match=rf"The data of tensor '{name}' in __0_0\.distcp is damaged"
            ):
                convert(small, tmp_path / "out.pth", keep=name)
        file.write_bytes(data)
    convert(small, tmp_path / "out.pth", keep="all")


def test_truncations_are_found(small: Path) -> None:
    metadata, data = ((small / name).read_bytes() for name in (".metadata", "__0_0.distcp"))
    for length in range(0, len(metadata), 13):
        (small / ".metadata").write_bytes(metadata[:length])
        with pytest.raises((CorruptCheckpointError, FormatError), match=r"\.metadata"):
            open_layout(small)
    (small / ".metadata").write_bytes(metadata)
    for length in range(0, len(data), 97):
        (small / "__0_0.distcp").write_bytes(data[:length])
        with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp is truncated: '[abc]' reaches to byte"):
            open_layout(small)


@pytest.mark.exhaustive
def test_damaged_metadata_raises_only_our_errors(small: Path) -> None:
    data = (small / ".metadata").read_bytes()
    generator = torch.Generator().manual_seed(0)
    for offset in range(0, len(data), 2):
        flipped = data[offset] ^ (1 << int(torch.randint(0, 8, (), generator=generator)))
        (small / ".metadata").write_bytes(data[:offset] + bytes([flipped]) + data[offset + 1 :])
        try:
            layout = open_layout(small)
        except MmfsdpError:
            continue
        assert sum(math.prod(entry.shape) for entry in layout.tensors.values()) < 1 << 64


def test_nothing_is_run(source: Path, tmp_path: Path) -> None:
    rewrite(source, lambda metadata: metadata.state_dict_metadata.update(x=_Malicious()))
    with pytest.raises(UnsafePickleError, match=r"\.metadata wants to import 'posix\.system'"):
        open_layout(source)
    other = save(tmp_path / "other", {"a": torch.ones(1), "evil": _Malicious()})
    with pytest.raises(UnsafePickleError, match=r"'evil': __0_0\.distcp wants to import 'posix\.system'"):
        open_layout(other)
    assert "evil" in open_layout(other, trust=True).tree


class _Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch was-run",)


def test_metadata_of_older_versions(small: Path) -> None:
    """Torch 2.0 knew neither a planner's mapping for flat names nor where the metadata came from."""

    def older(metadata: Metadata) -> Metadata:
        for name in ("storage_meta", "version", "planner_data"):
            del metadata.__dict__[name]
        return metadata

    rewrite(small, older)
    assert [*open_layout(small).tensors] == ["a", "b"]


def test_thousands_of_chunks_that_overlap_are_refused(small: Path, tmp_path: Path) -> None:
    def add(metadata: Metadata) -> None:
        info = metadata.storage_data[next(index for index in metadata.storage_data if index.fqn == "a")]
        for start in (0, 3):
            metadata.storage_data[MetadataIndex("a", [start])] = dataclasses.replace(info)
        metadata.state_dict_metadata["a"] = TensorStorageMetadata(
            TensorProperties(torch.float32),
            torch.Size([9]),
            [ChunkStorageMetadata(torch.Size([start]), torch.Size([6])) for start in (0, 3)],
        )
        metadata.state_dict_metadata["d"] = BytesStorageMetadata()

    rewrite(small, add)
    with pytest.raises(CorruptCheckpointError, match=r"'a' and 'a' overlap in __0_0\.distcp"):
        open_layout(small)


@pytest.mark.exhaustive
def test_archives_like_one_already_read_are_checked_all_the_same(tmp_path: Path) -> None:
    # 200 tensors of few shapes: most are recognised and not parsed.
    torch.manual_seed(0)
    shapes = [(3,), (2, 2), (4,), (5000,), (40, 125), ()]
    state = {f"t{i}": torch.randn(shapes[i % len(shapes)]) for i in range(200)}
    dcp.save(state, checkpoint_id=tmp_path / "in", no_dist=True)
    layout = open_layout(tmp_path / "in")
    data = (tmp_path / "in" / "__0_0.distcp").read_bytes()
    for name, tensor in state.items():
        chunk = layout.tensors[name].chunks()[0]
        assert layout.tensors[name].shape == tuple(tensor.shape)
        assert data[chunk.offset : chunk.offset + chunk.nbytes] == tensor.numpy().tobytes()
        assert chunk.crc32 == zlib.crc32(tensor.numpy().tobytes())
    # A byte of what surrounds the data of any of them: as if it were the only one.
    for name in ("t0", "t7", "t198", "t195"):
        record = layout.tensors[name].chunks()[0].record
        assert record is not None
        end = record.offset + record.nbytes
        flips = {
            "local header": data.rfind(b"PK\x03\x04", 0, record.offset),
            "pickle": data.rfind(b"FloatStorage", 0, record.offset),
            "directory": data.find(b"PK\x01\x02", end),
            "end record": data.find(b"PK\x05\x06", end),
        }
        for place in flips.values():
            damaged = bytearray(data)
            damaged[place] ^= 1
            (tmp_path / "in" / "__0_0.distcp").write_bytes(damaged)
            with pytest.raises(CorruptCheckpointError, match=rf"'{name}': "):
                located(tmp_path / "in")
        # A byte of the data, or of its stored checksum: found when they are compared.
        crc_at = data.find(struct.pack("<L", record.crc32 or 0), data.find(b"PK\x01\x02", end))
        for place in (record.offset, crc_at):
            damaged = bytearray(data)
            damaged[place] ^= 1
            (tmp_path / "in" / "__0_0.distcp").write_bytes(damaged)
            with pytest.raises(CorruptCheckpointError, match=rf"tensor '{name}' .* is damaged"):
                convert(tmp_path / "in", tmp_path / "out.pth", keep="all")


STRIDED = Path(__file__).parents[2] / "strided" / "2.9.1"


def test_parts_in_several_pieces_that_torch_lost(tmp_path: Path) -> None:
    """FSDP2 over tensor parallelism is right, in uneven rows, too; a fused projection's parts are lost in torch 2.9."""
    expected = torch.arange(40.0).reshape(10, 4)
    report = verify(STRIDED)
    assert [problem.message.split(" for tensor ")[1][:15] for problem in report.problems] == ["'packed.weight'"]
    with pytest.raises(CorruptCheckpointError, match=r"'packed\.weight' .*_StridedShard.*the other parts are lost"):
        convert(STRIDED, tmp_path / "out.pth", fsync=False)
    convert(STRIDED, tmp_path / "out.pth", exclude=["packed.*"], fsync=False)
    assert torch.equal(torch.load(tmp_path / "out.pth")["state_dict"]["rows.weight"], expected)
