"""Ranges of flattened tensors become boxes that hold exactly their elements, whatever order they had in memory."""

from __future__ import annotations

import itertools
import math
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from mmfsdp.checkpoint.chunks import Record
from mmfsdp.checkpoint.files.planned_files import write_files
from mmfsdp.checkpoint.formats.fsdp1.flat_parameters import (
    FlatRange,
    FlatUnit,
    entry_of_ranges,
    flat_boxes,
    flat_unit,
    spans_in_order,
    spans_of_views,
)
from mmfsdp.checkpoint.formats.safetensors.safetensors_files import plan_file
from mmfsdp.checkpoint.formats.torch_files.torch_zip import PickledShards, PickledTensor
from mmfsdp.checkpoint.geometry import check_coverage
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.errors import CorruptCheckpointError

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@settings(deadline=None)
@given(SHAPES, st.data())
def test_boxes_hold_the_elements_of_a_range(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start, stop = sorted(data.draw(st.integers(0, numel)) for _ in range(2))
    whole = torch.arange(numel).reshape(shape)
    found: list[int] = []
    boxes = list(flat_boxes(shape, start, stop))
    for at, offsets, sizes in boxes:
        assert at == start + len(found)
        found += whole[tuple(slice(a, a + b) for a, b in zip(offsets, sizes, strict=True))].reshape(-1).tolist()
    assert found == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


@settings(deadline=None, max_examples=50)
@given(SHAPES, st.data())
def test_pieces_in_any_memory_order_make_the_tensor_again(shape: tuple[int, ...], data: st.DataObject) -> None:
    whole = torch.arange(float(math.prod(shape))).reshape(shape)
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    flat = whole.permute(order).contiguous().reshape(-1)
    cuts = sorted(data.draw(st.lists(st.integers(0, flat.numel()), max_size=3)))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "data"
        file.write_bytes(b"head" + bytes(flat.view(torch.uint8).tolist() if flat.numel() else b""))
        record = Record(file, 4, flat.numel() * 4, None)
        bounds = [0, *cuts, flat.numel()]
        ranges = [FlatRange(a, b, 4 + 4 * a, record) for a, b in itertools.pairwise(bounds)]
        entry = entry_of_ranges("w", "float32", shape, ranges, order)
        check_coverage(Layout(file, "test", 1, {"w": entry}, {}))
        write_files(Path(folder) / "out", [plan_file("", {"w": entry})])
        assert torch.equal(load_file(Path(folder) / "out")["w"], whole)


def stored(numel: int, file: str = "rank0.pth", offset: int = 64, at: int = 0) -> PickledTensor:
    return PickledTensor("float32", (numel,), offset + 4 * at, None, Record(Path(file), offset, 4096, None))


def shards(rank: int, start: int, numel: int, shape: tuple[int, ...] = (10,), dtype: str = "float32") -> PickledShards:
    parts = ((stored(numel, f"rank{rank}.pth"), (start,)),) if numel else ()
    return PickledShards(dtype, shape, parts, rank, 2)


def unit() -> FlatUnit:
    files = [Path("rank0.pth"), Path("rank1.pth")]
    return flat_unit("a._flat_param", [shards(0, 0, 5), shards(1, 5, 5)], files)


def test_parameters_are_cut_from_a_flat_parameter() -> None:
    spans = spans_in_order(unit(), {"a.w": (2, 3), "a.b": (4,)})
    assert spans is not None
    pieces = {
        name: [(r.start, r.stop, r.record.file.name, r.offset) for r in span.ranges] for name, span in spans.items()
    }
    assert pieces == {
        "a.w": [(0, 5, "rank0.pth", 64), (5, 6, "rank1.pth", 64)],
        "a.b": [(0, 4, "rank1.pth", 68)],
    }
    assert spans_in_order(unit(), {"a.w": (2, 3)}) is None


def test_parts_that_do_not_follow_each_other() -> None:
    files = [Path("rank0.pth"), Path("rank1.pth")]
    with pytest.raises(CorruptCheckpointError, match=r"'f' in rank1\.pth begins at element 4 \(expected 5\)"):
        flat_unit("f", [shards(0, 0, 5), shards(1, 4, 5)], files)
    with pytest.raises(CorruptCheckpointError, match=r"'f' is float32 of shape \[9\] in rank1\.pth but float32"):
        flat_unit("f", [shards(0, 0, 5), shards(1, 5, 5, (9,))], files)
    with pytest.raises(CorruptCheckpointError, match=r"'f' is float16 of shape"):
        flat_unit("f", [shards(0, 0, 5), shards(1, 5, 5, dtype="float16")], files)


def test_pieces_are_placed_by_the_storage_that_they_view() -> None:
    pieces = {
        "a.w": [stored(5), stored(1, "rank1.pth")],
        "a.b": [stored(0, offset=9000), stored(4, "rank1.pth", at=1)],
        "a.tied": [stored(5), stored(1, "rank1.pth")],
        "a.buffer": [stored(5, offset=9000), stored(5, "rank1.pth", offset=9000)],
        "count": [None, None],
    }
    spans = spans_of_views([unit()], pieces)
    assert {name: (span.numel, span.start) for name, span in spans.items()} == {
        "a.w": (6, ("a.", 0)),
        "a.b": (4, ("a.", 6)),
        "a.tied": (6, ("a.", 0)),
    }
    with pytest.raises(CorruptCheckpointError, match=r"parameter 'a\.w' do not follow each other; that in rank1\.pth"):
        spans_of_views([unit()], {"a.w": [stored(4), stored(1, "rank1.pth")]})
