"""Files of kind ``full`` and ``local``: what ``torch.save`` can save is loaded as it was, with true checksums."""

from __future__ import annotations

import collections
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from mmfsdp.checkpoint.manifest import FileEntry
from mmfsdp.errors import StateDictError
from mmfsdp.saving import write_archive
from mmfsdp.saving.writing.memory import bytes_of


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


def test_an_archive_is_that_of_torch(tmp_path: Path) -> None:
    saved, path = content(), tmp_path / "ours.pth"
    entry = write_archive(saved, path)
    assert entry == FileEntry.of(path)
    torch.save(saved, tmp_path / "theirs.pth")
    ours, theirs = (zipfile.ZipFile(tmp_path / name) for name in ("ours.pth", "theirs.pth"))
    assert ours.testzip() is None
    facts = [
        {item.filename.split("/", 1)[1]: (item.file_size, item.CRC) for item in file.infolist()}
        for file in (ours, theirs)
    ]
    # The pickle and the data are torch's. Some releases also say how they wrote the file, which no reader needs.
    assert {*facts[0]} == {name for name in facts[1] if not name.startswith(".")}
    assert facts[0] == {name: facts[1][name] for name in facts[0]}
    loaded = torch.load(path, weights_only=True, mmap=True)
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


def test_tensors_of_other_classes_are_saved_as_torch_pickles_them(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):  # prototypes, say torch and its quantisation
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        quantised = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.qint8)
    entry = write_archive({"nested": nested, "quantised": quantised}, tmp_path / "nested.pth")
    assert entry == FileEntry.of(tmp_path / "nested.pth")
    with warnings.catch_warnings(action="ignore"):
        found = torch.load(tmp_path / "nested.pth", weights_only=False)
    assert [part.tolist() for part in found["nested"].unbind()] == [[1.0] * 2, [1.0] * 3]
    assert torch.equal(found["quantised"].dequantize(), quantised.dequantize())


def test_two_dtypes_of_one_memory_are_refused_as_torch_refuses_them(tmp_path: Path) -> None:
    whole = torch.ones(4)
    with pytest.raises(StateDictError, match=r"torch\.float32 and torch\.int32 share their memory"):
        write_archive({"a": whole, "b": whole.view(torch.int32)}, tmp_path / "ours.pth")
