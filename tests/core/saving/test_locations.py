"""What ranks are told about where tensors lie, and which records each of them checks, in worlds of any size."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from mmfsdp.basics.boxes import sharded_box
from mmfsdp.checkpoint import convert, open_layout
from mmfsdp.saving.reading import locations as places
from mmfsdp.saving.reading.source import Source
from mmfsdp.state.lazy_tensors import Wanted

SHAPES = {f"layers.{number}.weight": (4096, 2) for number in range(20)} | {"scale": (), "none": (0, 3), "bias": (3,)}


@pytest.fixture(params=["whole.pth", "ours.safetensors", "dcp"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    torch.save({name: torch.ones(shape) for name, shape in SHAPES.items()}, tmp_path / "whole.pth")
    path = tmp_path / request.param
    if path.name != "whole.pth":
        convert(tmp_path / "whole.pth", path, fsync=False, **({"to": "dcp", "ranks": 2} if path.name == "dcp" else {}))
    source = Source(path, lambda: open_layout(path))
    source.share()
    return source


def boxes(source: Source, place: int, count: int) -> list[Wanted]:
    found = []
    for name, entry in source.layout.tensors.items():
        offsets, sizes = sharded_box(entry.shape, [count], [0], [place]) if entry.shape else ((), ())
        found.append((name, (tuple(offsets), tuple(sizes))))
    return found


@pytest.mark.parametrize("count", [1, 7, 100])
def test_each_record_that_ranks_read_in_part_is_checked_by_one(source: Source, count: int) -> None:
    copies = pickle.dumps(source)
    some = [pickle.loads(copies) for _ in range(min(count, 7))]
    assert len(copies) < 300 * source.places.num_records + 20_000
    flags = [0] * source.num_records
    for place in range(count):
        own = some[place % len(some)].read_in_part(boxes(source, place, count))
        flags = [*map(min, flags, own)]
    dealt = [source.places.dealt(flags, place, count) for place in range(count)]
    asked = source.find([boxes(source, place, count) for place in range(count)])
    for found in (dealt, [answer.checks for answer in asked]):
        chunks = [chunk for entries in found for entry in entries for chunk in entry.chunks()]
        checked = {(chunk.file.name, chunk.offset) for chunk in chunks}
        assert len(checked) == len(chunks)
        assert len(checked) == (0 if count == 1 else len(flags) - flags.count(0))
        assert max(map(len, found)) <= -(-len(flags) // count)
    wide = 40 if source.path.name == "dcp" else 20  # chunks of several rows; a bias of three is cut only by few ranks
    assert count == 1 or wide <= len(flags) - flags.count(0) <= wide + 1


def test_a_checkpoint_of_many_pieces_is_asked_for(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_MOST_PIECES", 10)
    source.share()
    assert source.places is None
    assert source.num_records is None
    assert len(pickle.dumps(source)) < 1000
