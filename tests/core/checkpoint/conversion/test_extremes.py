"""Tensors and headers at the limits: expanded views, too many dimensions, huge headers. Constant memory, or refused."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

from mmfsdp.checkpoint import convert, diff, open_layout, tensor_statistics, verify
from mmfsdp.checkpoint.integrity import parse_json
from mmfsdp.errors import CheckpointError, CorruptCheckpointError

MEMORY = 150_000_000  # bytes beyond what the interpreter has


def limited(program: str, *arguments: object, memory: int = MEMORY) -> subprocess.CompletedProcess[str]:
    """Run a program with little memory on top of its imports; it prints the seconds it took and its peak in bytes."""
    text = (
        "import resource, sys, time; from pathlib import Path\n"
        "from mmfsdp.checkpoint import convert, diff, open_layout, tensor_statistics, verify\n"
        "from mmfsdp.errors import MmfsdpError; import numpy\n"
        "used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
        f"limits = [resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU)]\n"
        f"resource.setrlimit(resource.RLIMIT_AS, (used + {memory}, limits[0]))\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (60, limits[1]))\n"
        "arguments = sys.argv[1:]\n"
        "try:\n" + "".join(f"    {line}\n" for line in program.splitlines()) + "except MmfsdpError as error:\n"
        "    sys.exit(f'refused: {error}')\n"
    )
    command = [sys.executable, "-c", text, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def expanded(path: Path, *shape: int, value: float = 1.5) -> Path:
    torch.save({"w": torch.full((1,) * len(shape), value).expand(shape), "n": torch.arange(3)}, path)
    assert path.stat().st_size < 5000
    return path


BASE = torch.arange(24.0).reshape(2, 3, 4)
VIEWS = {
    "row": BASE[0, 0].expand(5, 4),
    "column": BASE[0, :, :1].expand(3, 7),
    "middle": BASE[:, :1].expand(2, 9, 4),
    "scalar": torch.tensor(2.5).expand(3, 2, 2),
    "both": BASE[:1, :, :1].expand(4, 3, 5),
    "transposed": BASE[0, 0].expand(5, 4).t(),
    "permuted": BASE[:, :1].expand(2, 9, 4).permute(2, 1, 0),
    "complex": torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64).expand(3, 2).t(),
    "byte": torch.tensor([1, 2], dtype=torch.uint8).expand(3, 2),
    "stepped": torch.arange(100.0)[::7].expand(2, 15),
    "single": torch.ones(1).expand(1, 1),
}


@pytest.mark.parametrize("target", ["out.pth", "out.safetensors", "dcp", "local"])
def test_expanded_tensors_are_written_in_full(tmp_path: Path, target: str) -> None:
    torch.save(VIEWS, tmp_path / "in.pth")
    out = tmp_path / target
    to = target if "." not in target else None
    convert(tmp_path / "in.pth", out, to=to, ranks=2 if to else None, verify_output=True, fsync=False)
    assert diff(tmp_path / "in.pth", out).same
    assert verify(out).ok
    convert(out, tmp_path / "back.safetensors", fsync=False)
    found = load_file(tmp_path / "back.safetensors")
    for name, view in VIEWS.items():
        assert torch.equal(found[name], view), name


def test_blocks_of_repeated_elements_end_where_they_should(tmp_path: Path) -> None:
    wide = torch.arange(3.0).expand(800_003, 3)  # 9.6 MB out of 12 bytes, in blocks of 4 MiB
    high = torch.arange(600_003.0).reshape(-1, 1).expand(600_003, 2)
    torch.save({"wide": wide, "high": high, "down": wide.t()}, tmp_path / "in.pth")
    convert(tmp_path / "in.pth", tmp_path / "out.safetensors", fsync=False)
    found = load_file(tmp_path / "out.safetensors")
    assert torch.equal(found["wide"], wide)
    assert torch.equal(found["high"], high)
    assert torch.equal(found["down"], wide.t())


@pytest.mark.exhaustive
def test_large_views_take_constant_memory(tmp_path: Path) -> None:
    source = expanded(tmp_path / "in.pth", 25, 1_000_003)
    command = "convert(arguments[0], arguments[1], fsync=False)"
    done = limited(command, source, tmp_path / "out.safetensors", memory=MEMORY // 2)  # of 100 MB
    assert done.returncode == 0, done.stderr[-2000:]
    found = load_file(tmp_path / "out.safetensors")["w"]
    assert found.shape == (25, 1_000_003)
    assert bool((found == 1.5).all())
    strided = torch.arange(15_000_000.0)[::2]
    torch.save({"w": strided, "t": strided.reshape(3, -1).t()}, tmp_path / "in.pth")
    done = limited(
        "convert(arguments[0], arguments[1], fsync=False, jobs=1)",
        *(tmp_path / "in.pth", tmp_path / "out2.safetensors"),
        memory=MEMORY // 2 + 60_000_000,  # of the file 60 MB are mapped
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = load_file(tmp_path / "out2.safetensors")
    assert torch.equal(found["w"], strided)
    assert torch.equal(found["t"], strided.reshape(3, -1).t())


SHAPE = (1 << 20, 1 << 24, 1 << 12)


def test_what_would_be_absurdly_large_does_not_fit_the_disk(tmp_path: Path) -> None:
    source = expanded(tmp_path / "in.pth", *SHAPE)
    for target in ("out.safetensors", "out.pth"):
        with pytest.raises(CheckpointError, match="no room"):
            convert(source, tmp_path / target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pth"]


def test_statistics_and_differences_of_expanded_tensors_read_what_is_stored(tmp_path: Path) -> None:
    one, two = expanded(tmp_path / "one.pth", *SHAPE), expanded(tmp_path / "two.pth", *SHAPE, value=-1.0)
    done = limited(
        "found = tensor_statistics(open_layout(arguments[0]), 'w')\n"
        "assert (found.min, found.max, found.mean) == (1.5, 1.5, 1.5), found\n"
        f"assert found.elements == {math.prod(SHAPE)}\n"
        f"assert found.norm == 1.5 * {math.prod(SHAPE)} ** 0.5, found\n"
        "report = diff(arguments[0], arguments[1])\n"
        f"assert [(v.name, v.elements, v.differing, v.max_abs) for v in report.values] == [('w', {math.prod(SHAPE)}, "
        f"{math.prod(SHAPE)}, 2.5)], report\n"
        "assert diff(arguments[0], arguments[0]).same",
        *(one, two),
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_statistics_of_expanded_tensors_are_those_of_the_whole(tmp_path: Path) -> None:
    torch.save(VIEWS, tmp_path / "views.pth")
    torch.save({name: view.contiguous() for name, view in VIEWS.items()}, tmp_path / "whole.pth")
    other = {name: view.contiguous() + 1 for name, view in VIEWS.items()}
    torch.save(other, tmp_path / "other.pth")
    views, whole = open_layout(tmp_path / "views.pth"), open_layout(tmp_path / "whole.pth")
    for name in VIEWS:
        got, expected = (tensor_statistics(layout, name).describe() for layout in (views, whole))
        assert got.pop("norm") == pytest.approx(expected.pop("norm"))
        assert got.pop("mean") == pytest.approx(expected.pop("mean"))
        assert got == expected
    assert diff(views, whole).same
    for a, b in ((views, views), (views, whole), (whole, views)):
        assert diff(a, b).same
        assert diff(a, tmp_path / "other.pth").values == diff(whole, tmp_path / "other.pth").values
    torch.save({name: view + 0 * view for name, view in VIEWS.items()}, tmp_path / "again.pth")
    moved = {"row": (BASE[0, 0] + 1).expand(5, 4), "column": (BASE[0, :, :1] + 1).expand(3, 7)}
    torch.save(moved, tmp_path / "moved.pth")
    some = {name: VIEWS[name] for name in moved}
    torch.save(some, tmp_path / "some.pth")
    report = diff(tmp_path / "some.pth", tmp_path / "moved.pth")
    assert [(value.name, value.elements, value.differing) for value in report.values] == [
        ("row", 20, 20),
        ("column", 21, 21),
    ]


def safetensors_file(path: Path, header: bytes, data: bytes = b"") -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


DIMENSIONS = 300_000


def with_dimensions(path: Path, sizes: list[int]) -> Path:
    header = {"w": {"dtype": "F32", "shape": sizes, "data_offsets": [0, 4]}}
    return safetensors_file(path, json.dumps(header).encode(), bytes(4))


@pytest.mark.parametrize("size", [1, 2, 1 << 40], ids=["ones", "twos", "large"])
def test_too_many_dimensions_are_refused_at_once(tmp_path: Path, size: int) -> None:
    path = with_dimensions(tmp_path / "in.safetensors", [size] * DIMENSIONS)
    began = time.process_time()
    with pytest.raises(CorruptCheckpointError, match=r"in\.safetensors.*'w'.*300000 .*at most 64") as caught:
        open_layout(path)
    assert time.process_time() - began < 2
    assert len(str(caught.value)) < 1000


def test_as_many_dimensions_as_torch_takes(tmp_path: Path) -> None:
    shape = [1] * 62 + [2, 3]
    save_file({"w": torch.arange(6.0).reshape(shape)}, tmp_path / "in.safetensors")
    convert(tmp_path / "in.safetensors", tmp_path / "out.pth", fsync=False)
    convert(tmp_path / "out.pth", tmp_path / "dcp", to="dcp", fsync=False)
    convert(tmp_path / "dcp", tmp_path / "local", to="local", ranks=2, fsync=False)
    convert(tmp_path / "local", tmp_path / "back.safetensors", fsync=False)
    assert torch.equal(load_file(tmp_path / "back.safetensors")["w"], torch.arange(6.0).reshape(shape))
    assert torch.load(tmp_path / "out.pth")["state_dict"]["w"].shape == torch.Size(shape)


def test_too_many_dimensions_in_pickles_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros([1] * 65)}, tmp_path / "in.pth")
    with pytest.raises(CorruptCheckpointError, match=r"in\.pth.* 65 sizes \(expected at most 64\)"):
        open_layout(tmp_path / "in.pth")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is one process
        dcp.save({"w": torch.zeros([1] * 65)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert FileSystemReader(tmp_path / "dcp").read_metadata()
    with pytest.raises(CorruptCheckpointError, match=r"\.metadata.*'w'.* 65 sizes \(expected at most 64\)"):
        open_layout(tmp_path / "dcp")


HUGE = {
    "many tensors": lambda: (
        "{" + ",".join(f'"{i:x}":{{"dtype":"F32","shape":[],"data_offsets":[0,0]}}' for i in range(1_700_000)) + "}"
    ),
    "many sizes": lambda: '{"w":{"dtype":"F32","data_offsets":[0,0],"shape":[' + "0," * 49_000_000 + "0]}}",
    "many objects": lambda: "{" + ",".join(f'"{i:x}":{{}}' for i in range(8_000_000)) + "}",
    "a long name": lambda: '{"' + "n" * 99_000_000 + '":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}',
    "a long number": lambda: '{"w":{"dtype":"F32","shape":[' + "9" * 99_000_000 + "]}}",
    "deep": lambda: '{"w":' + "[" * 49_000_000 + "]" * 49_000_000 + "}",
}


@pytest.mark.sample("many sizes")
@pytest.mark.parametrize("kind", HUGE)
def test_huge_headers_take_little_memory_and_time(tmp_path: Path, kind: str) -> None:
    path = safetensors_file(tmp_path / "in.safetensors", HUGE[kind]().encode())
    assert 94_000_000 < path.stat().st_size < 100_000_000
    done = limited(
        "print(len(open_layout(arguments[0]).tensors))\nprint(time.process_time())", path, memory=450_000_000
    )
    text = done.stdout + done.stderr[-2000:]
    assert done.returncode == 0 or done.stderr.startswith("refused: "), text


@pytest.mark.exhaustive
def test_headers_of_very_large_models_are_read(tmp_path: Path) -> None:
    entries: dict[str, Any] = {}
    for i in range(150_000):
        name = f"model.layers.{i // 2500}.mlp.experts.{i % 2500}.down_proj.weight_scale_inv"
        entries[name] = {"dtype": "F32", "shape": [1, 0], "data_offsets": [0, 0]}
    path = safetensors_file(tmp_path / "in.safetensors", json.dumps(entries).encode())
    assert len(open_layout(path).tensors) == 150_000


def test_a_key_that_is_there_twice_is_found_at_once() -> None:
    names = [f'"{i}":0' for i in range(300_000)]
    began = time.process_time()
    with pytest.raises(ValueError, match="'299999' appears twice"):
        parse_json("{" + ",".join([*names, '"299999":1']) + "}")
    assert time.process_time() - began < 5
