"""The registry of formats: what it lists is what can be read and written, and a conversion loads little else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mmfsdp.checkpoint import Conversion, convert, known_formats, open_layout
from mmfsdp.checkpoint.formats.registry import FORMATS
from mmfsdp.errors import CheckpointError, ConfigError


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
        assert info.reads
        for name in accepted(info.name):
            assert Conversion(source_format=name).source_format == name
            assert is_known(source, name) != is_known(directory, name)
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


@pytest.mark.parametrize("item", [item for item in FORMATS if item.writer], ids=lambda item: item.name)
def test_what_is_written_is_recognised_without_and_with_its_name(source: Path, item: object) -> None:
    name = item.name  # type: ignore[attr-defined]
    target = source.with_name("out")
    assert convert(source, target, to=name, fsync=False).format == name
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
    assert {"conversion/converting.py", "formats/dcp.py", "formats/safetensors.py"} <= {*files}
    assert len(files) <= 20, files
    assert not {"formats/rank_local.py", "formats/dcp_writer.py", "formats/shard_indexes.py"} & {*files}


def test_opening_executes_no_writer(source: Path) -> None:
    modules = modules_loaded("open_layout(sys.argv[1])", source)
    assert not [name for name in modules if "conversion" in name or "writer" in name or "dcp" in name]
    assert len(modules) <= 30, modules
