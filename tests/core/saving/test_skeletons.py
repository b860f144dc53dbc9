"""Files that are written in parts: whatever ``torch.save`` can save is loaded as it was, and its checksums are true."""

from __future__ import annotations

import collections
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from mmfsdp.checkpoint.manifest import FileEntry
from mmfsdp.saving import write_archive
from mmfsdp.saving.writing.skeletons import bytes_of, skeleton_of, skeleton_of_tensor


def content() -> dict[str, Any]:
    weight = torch.arange(600_000.0).reshape(600, 1000)
    return {
        "weight": weight,
        "tied": weight,
        "rows": weight[10:20],
        "columns": weight.t(),
        "parameter": [torch.nn.Parameter(torch.ones(3, 3))],
        "nothing": torch.zeros(0, 4),
        "number": torch.tensor(3.5),
        "eight bits": torch.ones(7).to(torch.float8_e4m3fn),
        "ordered": collections.OrderedDict(a=torch.arange(5), b=(torch.ones(2), {3: torch.zeros(2, dtype=torch.bool)})),
        "sparse": torch.eye(3).to_sparse(),
        "step": 7,
    }


@pytest.mark.parametrize("direct", [False, True])
def test_an_archive_in_parts_is_that_of_torch(direct: bool, tmp_path: Path) -> None:
    saved, path = content(), tmp_path / "ours.pth"
    entry = write_archive(saved, path, direct=direct)
    assert entry == FileEntry.of(path)
    torch.save(saved, tmp_path / "theirs.pth")
    ours, theirs = (zipfile.ZipFile(tmp_path / name) for name in ("ours.pth", "theirs.pth"))
    assert ours.testzip() is None
    facts = [
        {item.filename.split("/", 1)[1]: (item.file_size, item.CRC) for item in file.infolist()}
        for file in (ours, theirs)
    ]
    identifiers = [fact.pop(".data/serialization_id") for fact in facts]  # a hash of the data, of some releases
    assert identifiers[0][0] == identifiers[1][0]
    assert facts[0] == facts[1]
    loaded = torch.load(path, weights_only=True)
    for name in ("weight", "rows", "columns", "nothing", "number"):
        assert torch.equal(loaded[name], saved[name]), name
    assert loaded["tied"].data_ptr() == loaded["weight"].data_ptr()
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(loaded["ordered"]["b"][1][3], torch.zeros(2, dtype=torch.bool))


def test_memory_that_is_read_can_still_be_resized(tmp_path: Path) -> None:
    """FSDP frees the storages of whole parameters by resizing them."""
    saved = content()
    write_archive(saved, tmp_path / "ours.pth")
    bytes_of(saved["weight"])
    assert saved["weight"].untyped_storage().resizable()


def test_what_torch_saves_only_with_its_data_is_saved_so(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):  # a prototype, says torch
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert skeleton_of({"nested": nested}) is None
    entry = write_archive({"nested": nested}, tmp_path / "nested.pth")
    assert entry == FileEntry.of(tmp_path / "nested.pth")
    found = torch.load(tmp_path / "nested.pth", weights_only=False)["nested"]
    assert [part.tolist() for part in found.unbind()] == [[1.0] * 2, [1.0] * 3]


def test_the_frame_of_a_tensor_is_made_once() -> None:
    one, other = (skeleton_of_tensor(torch.float32, (4, 2)) for _ in range(2))
    assert one is other
    assert one.parts[1] == 32
    assert len(skeleton_of_tensor(torch.float32, (0, 2)).parts) == 1
