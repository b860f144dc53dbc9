"""Fusing, splitting, stacking and rearranging by arithmetic on boxes equals what torch computes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfsdp.checkpoint import Layout, TensorEntry, convert, open_layout
from mmfsdp.checkpoint.entries import ComputedEntry
from mmfsdp.checkpoint.files.cast_entries import CastEntry
from mmfsdp.checkpoint.files.disk import OpenFiles
from mmfsdp.checkpoint.files.elements import tensor_blocks
from mmfsdp.checkpoint.geometry import check_coverage
from mmfsdp.checkpoint.recipes import stand_in_files
from mmfsdp.checkpoint.recipes.rearranging import Pattern, fused, split, stacked, unstacked
from mmfsdp.errors import ConfigError

SHAPE = (24, 10)
VALUES = torch.arange(240.0).reshape(SHAPE)
PATTERNS = [
    ("(h d p) c -> (h p d) c", {"h": 3, "p": 2}, lambda t: t.reshape(3, 4, 2, 10).transpose(1, 2).reshape(SHAPE)),
    ("(a b c) d -> (c b a) d", {"a": 2, "b": 3}, lambda t: t.reshape(2, 3, 4, 10).permute(2, 1, 0, 3).reshape(SHAPE)),
    ("o (c y x) -> o (x y c)", {"y": 1, "x": 2}, lambda t: t.reshape(24, 5, 1, 2).permute(0, 3, 2, 1).reshape(SHAPE)),
    ("o i -> i o", {}, lambda t: t.t()),
    ("(h d) c -> h d c", {"h": 4}, lambda t: t.reshape(4, 6, 10)),
    ("(h d) (x y) -> x (d h) y", {"h": 4, "x": 2}, lambda t: t.reshape(4, 6, 2, 5).permute(2, 1, 0, 3).flatten(1, 2)),
    ("(a 1) b -> (a b)", {"a": 24}, lambda t: t.reshape(-1)),
    ("a b -> (b a) ()", {"a": 24, "b": 10}, lambda t: t.t().reshape(240, 1)),
]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    path = tmp_path_factory.mktemp("stored") / "x.pth"
    torch.save({"rows": VALUES, "columns": VALUES.t().contiguous().t()}, path)
    return open_layout(path)


def in_pieces(entry: TensorEntry, rows: Sequence[int]) -> TensorEntry:
    """A tensor whose chunks hold so many rows each, as ranks write it."""
    chunks, begin = [], 0
    for count in rows:
        [chunk] = entry.cut((begin, 0), (count, entry.shape[1])).chunks()
        chunks.append(replace(chunk, box_offsets=(begin, 0)))
        begin += count
    return replace(entry, stored=tuple(chunks))


def read(entry: TensorEntry) -> torch.Tensor:
    layout = Layout(Path(), "torch_zip", 1, {entry.name: entry}, {})
    check_coverage(layout)
    with OpenFiles() as files:
        data = b"".join(bytes(block) for block in tensor_blocks(files, entry))
    return torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(entry.shape)


def test_what_is_computed_is_rearranged_like_what_is_stored(stored: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole or some of it, however few elements are computed at a time, unless each would be computed many times."""
    sources = [CastEntry.of(replace(entry, name="x"), "float64", lambda _: None) for entry in stored.tensors.values()]
    for most, (pattern, sizes, expected), source in itertools.product((1 << 20, 30), PATTERNS, sources):
        monkeypatch.setattr(stand_in_files, "_MOST", most)
        monkeypatch.setattr(stand_in_files, "_WORTHWHILE", min(most, 1 << 16))
        stand_ins = stand_in_files.StandIns()
        turned = Pattern(pattern).applied(stand_ins.of(source), sizes)
        whole = expected(VALUES)
        if most == 30 and (pattern.startswith(("o i", "a b ->"))):
            with pytest.raises(ConfigError, match="row by row, and would be written col"):
                stand_ins.resolved(turned)
            continue
        found = CastEntry.of(stand_ins.resolved(turned), "float32", lambda _: None)
        assert isinstance(found, ComputedEntry)
        assert torch.equal(read(found), whole)
        part = found.cut([size // 2 for size in whole.shape], [size - size // 2 for size in whole.shape])
        assert torch.equal(read(part), whole[tuple(slice(size // 2, None) for size in whole.shape)])
    mixed = fused("x", [stand_ins.of(CastEntry.of(sources[0], "float32", lambda _: None)), stored.tensors["rows"]], 0)
    with pytest.raises(ConfigError, match="put together of weights that are stored and others that are computed"):
        stand_ins.resolved(mixed)


rows_of_ranks = st.lists(st.integers(1, 24), min_size=1).map(
    lambda sizes: [size for size, end in zip(sizes, torch.tensor(sizes).cumsum(0).tolist(), strict=True) if end < 24]
)


@given(rows=rows_of_ranks, name=st.sampled_from(["rows", "columns"]))
@settings(max_examples=10, deadline=None)
def test_as_torch(stored: Layout, rows: list[int], name: str) -> None:
    entry = in_pieces(stored.tensors[name], [*rows, 24 - sum(rows)])
    for text, sizes, expected in PATTERNS:
        pattern = Pattern(text)
        moved = pattern.applied(entry, sizes)
        by_chunks = TensorEntry(moved.name, moved.dtype, moved.shape, moved.chunks())
        assert torch.equal(read(by_chunks), expected(VALUES))
        box = tuple(size // 2 for size in moved.shape), tuple(size - size // 2 for size in moved.shape)
        assert torch.equal(read(moved.cut(*box)), expected(VALUES)[tuple(slice(start, None) for start in box[0])])
        assert torch.equal(read(moved), expected(VALUES))
        assert torch.equal(read(Pattern(pattern.inverse).applied(moved, sizes)), VALUES)
    for dim, parts, sizes in ((0, (4, 1, 1), (16, 4, 4)), (1, (3, 2), (6, 4))):
        found = split(entry, "xyz"[: len(parts)], dim, parts)
        for part, wanted in zip(found, VALUES.split(sizes, dim), strict=True):
            assert torch.equal(read(part), wanted)
        assert torch.equal(read(fused("f", found, dim)), VALUES)
    for dim in (0, 1):
        slices = unstacked(entry, dim)
        assert all(torch.equal(read(one), two) for one, two in zip(slices, VALUES.unbind(dim), strict=True))
        for place in (0, 1):
            assert torch.equal(read(stacked("f", slices, place)), torch.stack(VALUES.unbind(dim), place))


def test_a_record_that_is_moved_whole_keeps_its_checksum(stored: Layout) -> None:
    entry = stored.tensors["rows"]
    crc = entry.chunks()[0].crc32
    assert crc is not None
    assert [chunk.crc32 for chunk in fused("f", [entry, entry], 0).chunks()] == [crc, crc]
    assert Pattern("(h d) c -> h d c").applied(entry, {"h": 4}).chunks()[0].crc32 == crc


@pytest.mark.parametrize(
    ("text", "sizes", "said"),
    [
        ("a b", {}, "two sides"),
        ("a b -> a", {}, "the same axes"),
        ("a a -> a a", {}, "each once"),
        ("a-b c -> c a-b", {}, "'a-b'"),
        ("(a b) c -> a b c", {}, "'a' and 'b' are not given"),
        ("(a b) c -> a b c", {"a": 5}, "24 elements do not divide into (a b) with a=5"),
        ("(a b) c -> a b c", {"a": 2, "b": 2}, "with a=2, b=2"),
        ("(a b) c -> a b c", {"a": 0}, "with a=0"),
        ("a b c -> c b a", {}, "it has 2 dimensions, and the pattern 3"),
    ],
)
def test_patterns_that_do_not_fit(stored: Layout, text: str, sizes: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("(", r"\(").replace(")", r"\)")):
        Pattern(text).applied(stored.tensors["rows"], sizes)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128])
def test_views_whose_last_dimension_is_short(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.arange(3 * 2 * 40 * 2).reshape(3, 2, 40, 2).to(dtype)
    views = {"".join(map(str, order)): values.permute(order)[1:, :, :2] for order in itertools.permutations(range(4))}
    torch.save(views, tmp_path / "a.pth")
    convert(tmp_path / "a.pth", tmp_path / "b.pth")
    found = torch.load(tmp_path / "b.pth", weights_only=True)["state_dict"]
    assert found.keys() == views.keys()
    assert all(torch.equal(found[name], view) for name, view in views.items())
