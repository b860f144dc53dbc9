"""Random trees of tensors, sharded unevenly over ranks, come out bit-equal in every target format."""

from __future__ import annotations

import collections
import json
import math
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mmfsdp.basics.dtypes import DTYPES, numbers_per_element, to_torch
from mmfsdp.checkpoint import convert, open_layout
from mmfsdp.checkpoint.formats.torch_files import torch_zip_writer, zip_archive

SAFETENSORS_DTYPES = [name for name, (_, code) in DTYPES.items() if code is not None and "float6" not in name]
# What safetensors 0.4 and later read on every torch that is supported.
READABLE = [
    name for name in SAFETENSORS_DTYPES if not name.startswith(("float4", "float8_e8m0")) and "fnuz" not in name
]


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random bytes seen as a dtype: NaNs and denormals included."""
    size = math.prod(shape) * DTYPES[dtype][0]
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == "bool" else 256
    raw = torch.randint(0, high, (size,), dtype=torch.uint8, generator=generator)
    return raw.view(to_torch(dtype)).reshape(shape) if size else torch.zeros(shape, dtype=to_torch(dtype))


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    return one.numel() == 0 or bool(
        torch.equal(one.contiguous().reshape(-1).view(torch.uint8), two.contiguous().reshape(-1).view(torch.uint8))
    )


def assert_same_tree(one: Any, two: Any, path: str = "") -> None:
    assert type(one) is type(two), path
    if isinstance(one, torch.Tensor):
        assert same(one, two), path
    elif isinstance(one, dict):
        assert list(one) == list(two), path
        for key in one:
            assert_same_tree(one[key], two[key], f"{path}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(two), path
        for index, (a, b) in enumerate(zip(one, two, strict=True)):
            assert_same_tree(a, b, f"{path}/{index}")
    else:
        assert one == two, path


def write_local(directory: Path, tree: dict[str, Any], world_size: int, dims: dict[str, int], **header: Any) -> None:
    """Write a ``local`` checkpoint: tensors named in ``dims`` are cut along that dimension in ceil(d / n) pieces."""
    directory.mkdir()
    for rank in range(world_size):
        boxes: dict[str, Any] = {}

        def cut(path: str, value: Any, rank: int = rank, boxes: dict[str, Any] = boxes) -> Any:
            if isinstance(value, dict):
                pairs = [(key, cut(f"{path}/{key}" if path else str(key), child)) for key, child in value.items()]
                return type(value)(pairs)
            if path not in dims:
                return value
            dim = dims[path]
            step = math.ceil(value.shape[dim] / world_size)
            start = min(rank * step, value.shape[dim])
            piece = value.narrow(dim, start, min(step, value.shape[dim] - start)).clone()
            boxes[path] = {"shape": list(value.shape), "offsets": [start if i == dim else 0 for i in range(value.ndim)]}
            return piece

        local = cut("", tree)
        local["mmfsdp"] = {
            "format": "rank_local",
            "version": 1,
            "world_size": world_size,
            "rank": rank,
            "save_id": "save-1",
            "tensors": boxes,
            **header,
        }
        torch.save(local, directory / f"rank{rank}.pth")


names = st.text(st.characters(categories=["L", "N"], include_characters="._-/ ~"), min_size=1, max_size=8)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def trees(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, int], int]:
    tree: dict[str, Any] = {"state_dict": collections.OrderedDict(), "optimizer": {"state": {}}, "meta": {"epoch": 3}}
    dims: dict[str, int] = {}
    for index, name in enumerate(draw(st.lists(names.map(lambda text: f"n{text}"), max_size=5, unique=True))):
        shape = draw(shapes)
        tree["state_dict"][name] = random_tensor(draw(st.sampled_from(READABLE)), shape, index)
        tree["optimizer"]["state"][index] = {"exp_avg": random_tensor("float32", shape, index + 99), "step": index}
        if shape and draw(st.booleans()):
            dims[f"state_dict/{name}"] = dims[f"optimizer/state/{index}/exp_avg"] = draw(st.integers(0, len(shape) - 1))
    return tree, dims, draw(st.integers(1, 4))


@settings(max_examples=40, deadline=None)
@given(trees())
def test_local_directories_come_out_bit_equal(case: tuple[dict[str, Any], dict[str, int], int]) -> None:
    tree, dims, world_size = case
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "epoch_1")
        write_local(source, tree, world_size, dims)

        convert(source, Path(folder, "all.pth"), keep="all")
        assert_same_tree(torch.load(Path(folder, "all.pth"), weights_only=True), tree)
        assert_same_tree(torch.load(Path(folder, "all.pth"), weights_only=True, mmap=True), tree)
        assert zipfile.ZipFile(Path(folder, "all.pth")).testzip() is None

        convert(source, Path(folder, "model.pth"))
        expected = {key: tree[key] for key in ("state_dict", "meta")}
        assert_same_tree(torch.load(Path(folder, "model.pth"), weights_only=True), expected)

        # A .pth made here is a source like any other.
        for name, origin in {"local.safetensors": source, "again.safetensors": Path(folder, "all.pth")}.items():
            convert(origin, Path(folder, name))
            loaded = load_file(Path(folder, name))
            assert loaded.keys() == tree["state_dict"].keys()
            assert all(same(loaded[key], tree["state_dict"][key]) for key in loaded)


@pytest.mark.parametrize("dtype", [name for name in DTYPES if numbers_per_element(name) == 1])  # torch slices no other
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_dtype_through_pth(tmp_path: Path, dtype: str, world_size: int) -> None:
    tensor = random_tensor(dtype, (5, 3))
    parts = {"cut": tensor, "whole": tensor[1:2], "scalar": tensor[0, 0].clone(), "none": tensor[:0].clone()}
    tree = {"state_dict": parts}
    write_local(tmp_path / "local", tree, world_size, {"state_dict/cut": 0})
    convert(tmp_path / "local", tmp_path / "out.pth", keep="all")
    assert_same_tree(torch.load(tmp_path / "out.pth", weights_only=True, mmap=True), tree)
    layout = open_layout(tmp_path / "out.pth")
    assert {entry.dtype for entry in layout.tensors.values()} == {dtype}


@pytest.mark.parametrize("dtype", SAFETENSORS_DTYPES)
def test_every_dtype_through_safetensors(tmp_path: Path, dtype: str) -> None:
    small = () if numbers_per_element(dtype) == 1 else (1,)
    state = {"x": random_tensor(dtype, (4, 3)), "s": random_tensor(dtype, small)}
    torch.save({"state_dict": state}, tmp_path / "in.pth")
    convert(tmp_path / "in.pth", tmp_path / "out.safetensors")
    convert(tmp_path / "out.safetensors", tmp_path / "back.pth")
    back = torch.load(tmp_path / "back.pth", weights_only=True)
    assert same(back["state_dict"]["x"], random_tensor(dtype, (4, 3)))
    assert same(back["state_dict"]["s"], random_tensor(dtype, small))
    if dtype in READABLE:
        assert same(load_file(tmp_path / "out.safetensors")["x"], random_tensor(dtype, (4, 3)))


def test_safetensors_metadata_names_the_framework(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "in.pth")
    convert(tmp_path / "in.pth", tmp_path / "out.safetensors")
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        metadata = file.metadata()
    assert (metadata.pop("format"), [*metadata]) == ("pt", ["mmfsdp.crc32"])


def test_a_file_of_safetensors_own_writer_is_read(tmp_path: Path) -> None:
    tensors = {"b": random_tensor("bfloat16", (3, 2)), "a": random_tensor("int64", (1,)), "z": torch.zeros(0, 2)}
    save_file(tensors, tmp_path / "in.safetensors", metadata={"by": "them"})
    convert(tmp_path / "in.safetensors", tmp_path / "out.pt")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert loaded["meta"] == {}
    assert all(same(loaded["state_dict"][key], tensors[key]) for key in tensors)


def test_strides_views_and_shared_storage(tmp_path: Path) -> None:
    base = random_tensor("float32", (4, 6, 2, 3))
    tensors = {
        "offset": base[1:3],
        "transposed": base[0, :, :, 1].t(),
        "channels_last": base.to(memory_format=torch.channels_last),
        "stepped": base.reshape(-1)[3::5],
        "expanded": base[:1, :1].expand(3, 2, 2, 3),
        "complex": random_tensor("complex128", (4, 3)).t(),
        "bytes": random_tensor("int8", (7, 5)).t(),
        "one": base[2:3, :, :1, :1],
    }
    torch.save({"state_dict": tensors}, tmp_path / "in.pth")
    convert(tmp_path / "in.pth", tmp_path / "out.pth")
    loaded = torch.load(tmp_path / "out.pth", weights_only=True)["state_dict"]
    assert all(same(loaded[key], tensors[key]) and loaded[key].is_contiguous() for key in tensors)
    assert zipfile.ZipFile(tmp_path / "out.pth").testzip() is None


def test_channels_last_shards(tmp_path: Path) -> None:
    weight = random_tensor("float16", (5, 4, 3, 2)).contiguous(memory_format=torch.channels_last)
    write_local(tmp_path / "rows", {"state_dict": {"w": weight}}, 3, {"state_dict/w": 0})
    write_local(tmp_path / "columns", {"state_dict": {"w": weight}}, 3, {"state_dict/w": 1})
    for name in ("rows", "columns"):
        convert(tmp_path / name, tmp_path / f"{name}.safetensors")
        assert same(load_file(tmp_path / f"{name}.safetensors")["w"], weight)


def test_tied_weights_stay_tied_in_pth_and_are_copied_in_safetensors(tmp_path: Path) -> None:
    weight = random_tensor("float32", (6, 4))
    tree = {"state_dict": {"embed": weight, "head": weight, "flat": weight.view(-1), "copy": weight.clone()}}
    torch.save(tree, tmp_path / "full.pth")
    report = convert(tmp_path / "full.pth", tmp_path / "out.pth")
    loaded = torch.load(tmp_path / "out.pth", weights_only=True)["state_dict"]
    addresses = {name: tensor.untyped_storage().data_ptr() for name, tensor in loaded.items()}
    assert addresses["embed"] == addresses["head"] == addresses["flat"] != addresses["copy"]
    assert (report.tensors, report.bytes) == (4, 2 * weight.nbytes)

    report = convert(tmp_path / "full.pth", tmp_path / "out.safetensors")
    assert (report.tensors, report.bytes) == (4, 4 * weight.nbytes)
    assert_same_tree(load_file(tmp_path / "out.safetensors")["head"], weight)


def test_tied_weights_stay_tied_when_they_were_sharded(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    weight = random_tensor("float32", (5, 4))
    for rank, (start, stop) in enumerate([(0, 3), (3, 5)]):
        piece = weight[start:stop].clone()
        boxes = {f"state_dict/{name}": {"shape": [5, 4], "offsets": [start, 0]} for name in ("embed", "head")}
        header = {"format": "rank_local", "version": 1, "world_size": 2, "rank": rank, "save_id": "s", "tensors": boxes}
        content = {"state_dict": {"embed": piece, "head": piece}, "mmfsdp": header}
        torch.save(content, tmp_path / "local" / f"rank{rank}.pth")
    convert(tmp_path / "local", tmp_path / "out.pth")
    loaded = torch.load(tmp_path / "out.pth", weights_only=True)["state_dict"]
    assert loaded["embed"].data_ptr() == loaded["head"].data_ptr()
    assert same(loaded["embed"], weight)


def test_hybrid_shards_use_the_first_of_identical_boxes(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    weight = random_tensor("float32", (4, 2))
    for rank in range(4):
        start = 2 * (rank % 2)
        boxes = {"state_dict/w": {"shape": [4, 2], "offsets": [start, 0]}}
        header = {"format": "rank_local", "version": 1, "world_size": 4, "rank": rank, "save_id": "s", "tensors": boxes}
        content = {"state_dict": {"w": weight[start : start + 2].clone()}, "mmfsdp": header}
        torch.save(content, tmp_path / "local" / f"rank{rank}.pth")
    layout = open_layout(tmp_path / "local")
    assert [chunk.file.name for chunk in layout.tensors["state_dict/w"].chunks()] == ["rank0.pth", "rank1.pth"]
    convert(tmp_path / "local", tmp_path / "out.safetensors")
    assert same(load_file(tmp_path / "out.safetensors")["w"], weight)


def test_content_that_is_no_tensor_survives(tmp_path: Path) -> None:
    state = torch.nn.Linear(2, 2).state_dict()
    tree = {
        "state_dict": state,
        "meta": {"bytes": b"\x00\xff", "big": 2**70, "negative": -5, "float": 1e-300, "text": "ä\n€", "none": None},
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "set": {1, 2},
        "nested": [(), (1, (2.5, True)), [[]]],
        "parameter": torch.nn.Parameter(torch.ones(3)),
    }
    torch.save(tree, tmp_path / "in.pth")
    convert(tmp_path / "in.pth", tmp_path / "out.pth", keep="all")
    loaded = torch.load(tmp_path / "out.pth", weights_only=True)
    assert_same_tree({**loaded, "parameter": None}, {**tree, "parameter": None})
    assert isinstance(loaded["parameter"], torch.nn.Parameter)
    assert loaded["state_dict"]._metadata == state._metadata


def test_objects_of_numpy_and_mmengine_survive_without_being_imported(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    mmengine = pytest.importorskip("mmengine")
    buffer = mmengine.logging.HistoryBuffer([1.0, 2.0], [1, 1])
    config = mmengine.config.ConfigDict(model={"type": "ResNet", "depth": 50})
    meta = {"cfg": config, "lr": numpy.float64(0.5)}
    tree = {"state_dict": {"w": torch.ones(2)}, "message_hub": {"loss": buffer}, "meta": meta}
    torch.save(tree, tmp_path / "in.pth")
    convert(tmp_path / "in.pth", tmp_path / "out.pth", keep="all")
    loaded = torch.load(tmp_path / "out.pth", weights_only=False)
    assert loaded["message_hub"]["loss"].mean() == 1.5
    assert loaded["meta"]["cfg"].model.depth == 50
    assert loaded["meta"]["lr"] == 0.5


def test_zip64_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Every field beyond 100 is written as if it did not fit: the same code as beyond 4 GiB.
    monkeypatch.setattr(torch_zip_writer, "_LIMIT_32", 100)
    monkeypatch.setattr(torch_zip_writer, "_LIMIT_16", 3)
    tree = {"state_dict": {"w": random_tensor("float32", (50, 3)), "b": torch.ones(2)}}
    torch.save(tree, tmp_path / "in.pth")
    convert(tmp_path / "in.pth", tmp_path / "out.pth", keep="all")
    assert zipfile.ZipFile(tmp_path / "out.pth").testzip() is None
    assert_same_tree(torch.load(tmp_path / "out.pth", weights_only=True, mmap=True), tree)
    convert(tmp_path / "out.pth", tmp_path / "out.safetensors")
    assert same(load_file(tmp_path / "out.safetensors")["w"], tree["state_dict"]["w"])


def test_records_are_aligned_and_output_is_reproducible(tmp_path: Path) -> None:
    torch.save({"state_dict": {f"w{i}": torch.full((i,), float(i)) for i in range(5)}}, tmp_path / "in.pth")
    for name in ("one.pth", "two.pth"):
        convert(tmp_path / "in.pth", tmp_path / name)
    assert (tmp_path / "one.pth").read_bytes() == (tmp_path / "two.pth").read_bytes()
    records = zip_archive.read_records(tmp_path / "one.pth")
    assert {record.offset % 64 for record in records.values()} == {0}
    assert all(record.crc32 is not None for record in records.values())


def test_a_source_without_checksums_is_read_and_the_target_has_them(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"state_dict": {"w": torch.ones(9)}}, tmp_path / "in.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    convert(tmp_path / "in.pth", tmp_path / "out.pth")
    assert zipfile.ZipFile(tmp_path / "out.pth").testzip() is None


def test_header_of_safetensors_is_sorted_for_alignment(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3, dtype=torch.int8), "b": torch.ones(2, dtype=torch.float64)}, tmp_path / "in.pth")
    convert(tmp_path / "in.pth", tmp_path / "out.safetensors")
    raw = (tmp_path / "out.safetensors").read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:begin])
    assert [header[name]["data_offsets"] for name in ("b", "a")] == [[0, 16], [16, 19]]
    assert (begin % 64, len(raw)) == (0, begin + 19)
