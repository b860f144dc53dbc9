"""Runs the command line, and makes checkpoints for it without torch or numpy."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from click.testing import CliRunner, Result
from tools.cli_reference import FIELDS, JSON

from mmfsdp_cli.main import app

__all__ = [
    "ALONE",
    "damaged",
    "fields_of",
    "golden",
    "invoke",
    "read_safetensors",
    "rewritten",
    "run",
    "write_safetensors",
]

ALONE = (
    "import atexit, os, sys\n"
    "atexit.register(lambda: 'torch' in sys.modules and os._exit(99))\n"
    "from mmfsdp_cli.main import main; main()"
)
"""The command line in a process that fails if torch has been imported."""

_CODES = {"F32": "f", "F64": "d", "I64": "q", "U8": "B"}


def run(*words: object, **settings: object) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    command = [sys.executable, "-c", ALONE, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **settings)  # type: ignore[call-overload,no-any-return]


def invoke(*words: object) -> Result:
    """Run the command line in this process, stdout and stderr apart."""
    apart = {"mix_stderr": False} if tuple(map(int, _version())) < (8, 2) else {}
    return CliRunner(**apart).invoke(app, [*map(str, words)])  # type: ignore[arg-type]


_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "text": (str,),
    "boolean": (bool,),
    "list": (list,),
    "object": (dict,),
}


def fields_of(command: str, printed: str) -> Any:
    """Return what a command printed with ``--json``, which has the fields that docs/reference/cli.md gives it."""
    content = json.loads(printed)
    expected = JSON[command].split()
    least = {field for field in expected if not field.endswith("?")}
    most = {field.rstrip("?") for field in expected}
    for item in content if isinstance(content, list) else [content]:
        assert least <= {*item} <= most, ({*item} - most, least - {*item})
        for field, value in item.items():
            _check_field(field, value)
    return content


def _check_field(field: str, value: Any) -> None:
    kind, meaning = FIELDS[field]
    if value is None:
        assert re.search(r"\bnull\b", meaning), field
        return
    assert isinstance(value, _TYPES[kind]), field
    assert kind == "boolean" or not isinstance(value, bool), field
    # What is said to lie below: all of it, if nothing else is said.
    below = value if kind == "object" else value[0] if kind == "list" and value else None
    named = {*re.findall(r"`(\w+)`", meaning)}
    if isinstance(below, dict) and field != "content" and named:
        is_all = re.fullmatch(r"[^`]*: (`\w+`, )*`\w+`\.", meaning)
        assert named == {*below} if is_all else named <= {*below}, (field, named ^ {*below})


def golden(name: str, folder: Path) -> Path:
    """Copy a checkpoint that torch wrote, see golden/make.py, and return its path."""
    source = Path(__file__).parent / "golden" / name
    copy = shutil.copytree if source.is_dir() else shutil.copy
    return Path(copy(source, folder / name))


def write_safetensors(path: Path, tensors: Mapping[str, Sequence[float]], dtype: str = "F32") -> Path:
    """Write vectors, byte by byte as the format's definition says, and return the path."""
    header, data = {}, b""
    for name, values in tensors.items():
        raw = struct.pack(f"<{len(values)}{_CODES[dtype]}", *values)
        header[name] = {"dtype": dtype, "shape": [len(values)], "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def read_safetensors(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Return dtype, shape and bytes of each tensor of a file."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    found = {}
    for name, entry in json.loads(raw[8:start]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            found[name] = (entry["dtype"], entry["shape"], raw[start + begin : start + end])
    return found


def damaged(path: Path) -> Path:
    """Return a copy of golden epoch_3.pth, one bit of the first tensor's data changed."""
    raw = bytearray(path.read_bytes())
    raw[raw.index(struct.pack("<6f", *range(6))) + 3] ^= 1
    path.with_name("damaged.pth").write_bytes(raw)
    return path.with_name("damaged.pth")


def rewritten(path: Path, content: object) -> Path:
    """Replace the pickle in a file of torch.save by that of other content."""
    with ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, pickle.dumps(content, protocol=2) if name.endswith("/data.pkl") else data)
    return path


def _version() -> list[str]:
    return version("click").split(".")[:2]
