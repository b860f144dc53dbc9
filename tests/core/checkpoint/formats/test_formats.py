"""The registry of formats: what it lists is what can be read and written, and a conversion loads little else."""

from __future__ import annotations

import gzip
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mmfsdp.checkpoint import Conversion, convert, known_formats, open_layout
from mmfsdp.checkpoint.formats.registry import FORMATS
from mmfsdp.errors import CheckpointError, ConfigError, FormatError


def accepted(name: str) -> list[str]:
    return [spelling for info in known_formats() if info.name == name for spelling in (info.name, *info.aliases)]


def is_known(path: Path, name: str) -> bool:
    """Whether `open_layout` takes the name for that of a format, whatever it then finds at the path."""
    try:
        open_layout(path, format=name)
    except ConfigError:
        return False
    except CheckpointError:
        pass
    return True


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.save({"w": torch.ones(4)}, tmp_path / "in.pth")
    return tmp_path / "in.pth"


def test_the_names_listed_are_those_accepted(source: Path) -> None:
    (directory := source.with_name("a_directory")).mkdir()
    for info in known_formats():
        assert info.description
        assert info.reads or info.writes
        for name in accepted(info.name):
            assert is_known(source, name) + is_known(directory, name) == info.reads
            if info.reads:
                assert Conversion(source_format=name).source_format == name
            else:
                with pytest.raises(ConfigError, match=r"Conversion\.source_format: .* is not a format to read"):
                    Conversion(source_format=name)
            if info.writes:
                assert Conversion(to=name).to == name
            else:
                with pytest.raises(ConfigError, match=r"Conversion\.to: .* is not a format to write"):
                    Conversion(to=name)
    for name in ("", "pth2", "detect"):
        with pytest.raises(ConfigError, match=r"is not a format to read"):
            Conversion(source_format=name)
    spellings = [name for info in known_formats() for name in accepted(info.name)]
    assert len(spellings) == len({*spellings})


@pytest.mark.parametrize("item", [item for item in FORMATS if item.writes and item.reads], ids=lambda item: item.name)
def test_what_is_written_is_recognised_without_and_with_its_name(source: Path, item: object) -> None:
    name = item.name  # type: ignore[attr-defined]
    target = source.with_name("out")
    settings = {}
    if name == "huggingface":
        (like := source.with_name("like")).mkdir()
        (like / "config.json").write_text("{}")
        settings = {"like": like}
    assert convert(source, target, to=name, fsync=False, **settings).format == name
    assert open_layout(target).format == name
    assert all(open_layout(target, format=spelling).format == name for spelling in accepted(name))


def test_without_docstrings() -> None:
    code = "from mmfsdp.checkpoint import known_formats; print([str(info) for info in known_formats()])"
    done = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{[str(info) for info in known_formats()]}\n"


def modules_loaded(statement: str, *paths: Path) -> list[str]:
    code = (
        f"import sys; import mmfsdp.checkpoint as checkpoint; checkpoint.{statement}\n"
        "print(*sorted(name for name in sys.modules if name.startswith('mmfsdp.checkpoint.')))"
    )
    words = [sys.executable, "-c", code, *map(str, paths)]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()


EXECUTED = """
import sys, threading
from mmfsdp.checkpoint import convert
files = set()
def note(frame, event, _):
    if event == "call" and frame.f_code.co_name != "<module>":
        files.add(frame.f_code.co_filename)
threading.setprofile(note)
sys.setprofile(note)
convert(sys.argv[1], sys.argv[2], fsync=True)
sys.setprofile(None)
print(*sorted(file.rpartition("/checkpoint/")[2] for file in files if "/mmfsdp/checkpoint/" in file))
"""


def test_a_conversion_executes_few_files(source: Path) -> None:
    convert(source, directory := source.with_name("dcp"), to="dcp", fsync=False)
    (directory / "manifest.json").unlink()  # as torch's own writer leaves it
    words = [sys.executable, "-c", EXECUTED, str(directory), str(source.with_name("out.safetensors"))]
    files = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert {"conversion/converting.py", "formats/dcp/metadata.py", "formats/safetensors/safetensors_files.py"} <= {
        *files
    }
    assert not {"formats/per_rank/rank_local.py", "formats/dcp/writer.py", "formats/huggingface/shard_indexes.py"} & {
        *files
    }


def test_opening_executes_no_writer(source: Path) -> None:
    modules = modules_loaded("open_layout(sys.argv[1])", source)
    assert not [name for name in modules if re.search(r"conversion|writer|\.(dcp|gguf|huggingface)\.(?!format)", name)]
    assert len(modules) <= 46, modules


def _npz(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, w=np.ones(3))


def _npy(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.ones(3))


def _directory(*names: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        for name in names:
            (path / name).write_bytes(b"\x0a\x01")

    return make


FOREIGN: dict[str, tuple[Callable[[Path], object], str]] = {
    "model.npz": (_npz, "is an .npz file of numpy. numpy.load reads it"),
    "model.npy": (_npy, "is an array of numpy. numpy.load reads it"),
    "model.gguf": (lambda path: path.write_bytes(b"GGUF\x03\0\0\0" + bytes(16)), "gguf.GGUFReader"),
    "model.h5": (lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(16)), "h5py.File reads it"),
    "model.pth.gz": (lambda path: path.write_bytes(gzip.compress(b"x")), "Decompress it first"),
    "model.onnx": (lambda path: path.write_bytes(b"\x08\x08\x12\x07pytorch"), "onnx.load reads it"),
    "saved": (_directory("saved_model.pb", "variables"), "tf.saved_model.load reads it"),
    "ckpt": (_directory("checkpoint", "m-1.index", "m-1.data-00000-of-00001"), "tf.train.load_checkpoint reads it"),
    "orbax": (_directory("_CHECKPOINT_METADATA", "manifest.ocdbt"), "orbax.checkpoint reads it"),
    "flax.msgpack": (lambda path: path.write_bytes(b"\x81\xa1w\x01"), "flax.serialization.msgpack_restore reads it"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_checkpoints_of_other_frameworks_are_answered_with_what_reads_them(tmp_path: Path, name: str) -> None:
    make, expected = FOREIGN[name]
    make(tmp_path / name)
    with pytest.raises(FormatError) as caught:
        open_layout(tmp_path / name)
    assert caught.value.message.startswith(f"{name} is ")
    assert expected in caught.value.message
