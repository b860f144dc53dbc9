"""Files of torch before version 1.6: read as torch.load reads them, and refused when they are damaged."""

from __future__ import annotations

import collections
import contextlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from mmfsdp.basics.dtypes import DTYPES, to_torch
from mmfsdp.checkpoint import convert, open_layout
from mmfsdp.errors import CorruptCheckpointError, FormatError, MmfsdpError, UnsafePickleError

# Those that this format can name: newer dtypes have no storage class.
DTYPE_NAMES = [
    name for name in DTYPES if not name.startswith(("float4", "float6", "float8", "uint16", "uint32", "uint64"))
]


def content() -> dict[str, Any]:
    torch.manual_seed(0)
    whole = torch.randn(6, 4)
    return {
        "state_dict": collections.OrderedDict(
            whole=whole,
            rows=whole[2:5],
            transposed=whole.t(),
            parameter=torch.nn.Parameter(torch.randn(3)),
            scalar=torch.tensor(7),
            empty=torch.zeros(0, 3),
            **{name: torch.ones(3, dtype=to_torch(name)) for name in DTYPE_NAMES},
        ),
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "meta": {"epoch": 3},
    }


def save(path: Path, value: Any, protocol: int = 2) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=False, pickle_protocol=protocol)
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_reads_what_torch_reads(protocol: int, tmp_path: Path) -> None:
    source = save(tmp_path / "old.pth", content(), protocol)
    layout = open_layout(source)
    assert (layout.format, layout.tree["meta"]) == ("torch_legacy", {"epoch": 3})
    convert(source, tmp_path / "new.pth", keep="all")
    expected, found = (torch.load(tmp_path / name, weights_only=False) for name in ("old.pth", "new.pth"))
    assert list(found["state_dict"]) == list(expected["state_dict"])
    for name, tensor in expected["state_dict"].items():
        assert found["state_dict"][name].dtype == tensor.dtype, name
        assert torch.equal(found["state_dict"][name], tensor), name
    assert found["optimizer"] == expected["optimizer"]
    assert isinstance(found["state_dict"]["parameter"], torch.nn.Parameter)


def test_a_bare_tensor_and_a_model_with_its_source(tmp_path: Path) -> None:
    layout = open_layout(save(tmp_path / "t.pth", torch.ones(2, 3)))
    assert [entry.shape for entry in layout.tensors.values()] == [(2, 3)]
    source = save(tmp_path / "model.pth", {"model": torch.nn.Linear(2, 2), "w": torch.ones(1)})
    with pytest.raises(UnsafePickleError, match=r"model\.pth wants to import 'torch\.nn\.modules\.linear\.Linear'"):
        open_layout(source)
    assert len(open_layout(source, trust=True).tensors) == 3


def test_every_truncation_is_found(tmp_path: Path) -> None:
    data = save(tmp_path / "old.pth", {"w": torch.ones(3), "b": torch.ones(2)}).read_bytes()
    cut = tmp_path / "cut.pth"
    for length in range(20, len(data)):
        cut.write_bytes(data[:length])
        with pytest.raises((CorruptCheckpointError, FormatError), match=r"cut\.pth"):
            open_layout(cut)
    cut.write_bytes(data + b"\0")
    with pytest.raises(CorruptCheckpointError, match=r"it is too long"):
        open_layout(cut)


@pytest.mark.exhaustive
def test_flipped_bits_never_raise_anything_else(tmp_path: Path) -> None:
    data = save(tmp_path / "old.pth", {"w": torch.ones(3), "b": torch.ones(2)}).read_bytes()
    bad = tmp_path / "bad.pth"
    for offset in range(16, len(data)):
        for bit in (1, 16, 128):
            bad.write_bytes(data[:offset] + bytes([data[offset] ^ bit]) + data[offset + 1 :])
            with contextlib.suppress(MmfsdpError):
                open_layout(bad)


def test_a_length_that_does_not_fit_is_named(tmp_path: Path) -> None:
    source = save(tmp_path / "old.pth", {"w": torch.ones(3)})
    data = bytearray(source.read_bytes())
    data[-20:-12] = (4).to_bytes(8, "little")
    source.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"Storage '\d+' in old\.pth has 4 elements \(expected 3\)"):
        open_layout(source)


def test_nothing_is_run(tmp_path: Path) -> None:
    source = save(tmp_path / "old.pth", {"w": torch.ones(1), "x": _Malicious()})
    with pytest.raises(UnsafePickleError, match=r"'posix\.system'"):
        open_layout(source)
    open_layout(source, trust=True)
    assert not (tmp_path / "was-run").exists()


class _Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, ("touch was-run",)


def test_other_protocols(tmp_path: Path) -> None:
    data = save(tmp_path / "old.pth", {"w": torch.ones(1)}).read_bytes()
    head = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)
    assert data.startswith(head)
    for version, little, message in ((1002, True, "unknown protocol version 1002"), (1001, False, "big-endian")):
        machine = {"protocol_version": version, "little_endian": little, "type_sizes": {}}
        (tmp_path / "x.pth").write_bytes(head + pickle.dumps(version, 2) + pickle.dumps(machine, 2) + data[-100:])
        with pytest.raises(FormatError, match=message):
            open_layout(tmp_path / "x.pth")
