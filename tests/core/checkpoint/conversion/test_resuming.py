"""A conversion that is interrupted or killed goes on from what it has written, if nothing else has changed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.core.web_server import Handler, Request, WebServer, serving

from mmfsdp.checkpoint import convert, diff
from mmfsdp.checkpoint.files import planned_files
from mmfsdp.checkpoint.remote import sessions
from mmfsdp.errors import CheckpointError, ConfigError

UNIT = 1 << 17  # of a small scale: tensors of 128 KB, parts of 256 KB


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    generator = torch.Generator().manual_seed(1)
    tensors = {f"layer.{i:02}": torch.randn(UNIT // 4, generator=generator) for i in range(40)}
    save_file(tensors, folder / "a.safetensors")
    convert(folder / "a.safetensors", folder / "dcp", to="dcp", ranks=2, fsync=False)
    return folder


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_files, "_BATCH", 2 * UNIT)


class StopError(Exception):
    pass


def stop_at(count: int) -> object:
    def progress(done: int, _: int) -> None:
        if done >= count:
            raise StopError

    return progress


def copied(path: Path, target: Path, **settings: object) -> int:
    """Convert with ``resume=True``; return the bytes that the first report of progress says are there."""
    seen: list[int] = []
    convert(path, target, resume=True, fsync=False, jobs=1, progress=lambda done, _: seen.append(done), **settings)
    jumps = [after - before for before, after in zip([0, *seen], seen, strict=False)]
    return sum(jump for jump in jumps if jump == 2 * UNIT)


def only(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("source", "settings"),
    [
        ("a.safetensors", {}),
        ("dcp", {}),
        ("a.safetensors", {"dtype": "bf16"}),
        ("dcp", {"to": "dcp", "ranks": 3}),
        ("a.safetensors", {"max_shard_size": 7 * UNIT}),
    ],
)
def test_goes_on_where_it_was_interrupted(
    source: str, settings: dict[str, object], folder: Path, tmp_path: Path
) -> None:
    target = tmp_path / ("out" if {"to", "max_shard_size"} & {*settings} else "out.safetensors")
    with pytest.raises(StopError):
        convert(folder / source, target, resume=True, fsync=False, jobs=1, progress=stop_at(12 * UNIT), **settings)
    assert len(only(tmp_path)) == 3  # what is written, its journal, and the lease of this process
    report = convert(folder / source, target, resume=True, fsync=False, verify_output=True, **settings)
    assert report.verified
    assert only(tmp_path) == [target.name]
    fresh = target.with_name(f"fresh{target.suffix}")
    convert(folder / source, fresh, fsync=False, **settings)
    assert diff(target, fresh).same


def test_what_is_written_is_not_read_again(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    with pytest.raises(StopError):
        convert(folder / "a.safetensors", target, resume=True, fsync=False, jobs=1, progress=stop_at(21 * UNIT))
    assert copied(folder / "a.safetensors", target) == 20 * UNIT
    assert target.read_bytes() == (fresh(folder, tmp_path)).read_bytes()


def fresh(folder: Path, tmp_path: Path) -> Path:
    convert(folder / "a.safetensors", tmp_path / "fresh.safetensors", fsync=False)
    return tmp_path / "fresh.safetensors"


def test_what_was_damaged_meanwhile_is_written_again(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    with pytest.raises(StopError):
        convert(folder / "a.safetensors", target, resume=True, fsync=False, jobs=1, progress=stop_at(21 * UNIT))
    [partial] = [path for path in tmp_path.iterdir() if path.name.endswith("partial")]
    [journal] = [path for path in tmp_path.iterdir() if path.name.endswith("journal")]
    with partial.open("r+b") as file:
        file.seek(5 * UNIT)
        file.write(b"damage")
    with journal.open("ab") as file:
        file.write(b'["", 30, [1,')  # a line that was not finished
    assert copied(folder / "a.safetensors", target) == 18 * UNIT
    assert target.read_bytes() == fresh(folder, tmp_path).read_bytes()


def test_another_conversion_or_a_changed_source_is_an_error(folder: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "source.safetensors", tmp_path / "out.safetensors"
    source.write_bytes((folder / "a.safetensors").read_bytes())
    with pytest.raises(StopError):
        convert(source, target, resume=True, fsync=False, progress=stop_at(12 * UNIT))
    with pytest.raises(ConfigError, match=r"conversion to out\.safetensors that was interrupted had other settings"):
        convert(source, target, resume=True, fsync=False, dtype="bf16")
    os.utime(source, ns=(1, 1))
    with pytest.raises(ConfigError, match=r"source\.safetensors' has changed since .* begin anew"):
        convert(source, target, resume=True, fsync=False)
    convert(source, target, fsync=False)
    assert only(tmp_path) == ["out.safetensors", "source.safetensors"]


KILLED = """
import os, signal, sys
from mmfsdp.checkpoint import convert
from mmfsdp.checkpoint.files import planned_files
planned_files._BATCH = 2 << 17
def progress(done, _):
    if done >= 15 << 17:
        os.kill(os.getpid(), signal.SIGKILL)
convert(sys.argv[1], sys.argv[2], resume=True, progress=progress)
"""


@pytest.fixture
def web(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    monkeypatch.setattr(sessions, "_FIRST_PAUSE", 0.002)
    with serving(folder) as web:
        yield web


def test_a_killed_conversion_from_a_server_goes_on(web: WebServer, folder: Path, tmp_path: Path) -> None:
    url, target = f"{web.url}/a.safetensors", tmp_path / "out.safetensors"
    done = subprocess.run([sys.executable, "-c", KILLED, url, str(target)], check=False)
    assert done.returncode == -signal.SIGKILL
    web.sent = 0
    convert(url, target, resume=True, fsync=False)
    assert web.sent <= (40 - 14) * UNIT + (1 << 18)
    assert load_file(target).keys() == load_file(folder / "a.safetensors").keys()
    assert diff(target, folder / "a.safetensors").same
    assert only(tmp_path) == ["out.safetensors"]


def test_a_lost_connection_loses_nothing(web: WebServer, folder: Path, tmp_path: Path) -> None:
    def break_off(handler: Handler, request: Request) -> bool:
        if request.begin is not None and request.begin > 20 * UNIT:
            handler.close_connection = True
            return True
        return False

    url, target = f"{web.url}/a.safetensors", tmp_path / "out.safetensors"
    web.fault = break_off
    with pytest.raises(CheckpointError, match="in 5 attempts"):
        convert(url, target, resume=True, fsync=False)
    web.fault = lambda *_: False
    web.sent = 0
    convert(url, target, resume=True, fsync=False)
    assert web.sent <= 24 * UNIT + (1 << 18)
    assert diff(target, folder / "a.safetensors").same


def test_a_file_that_the_server_has_replaced(web: WebServer, folder: Path, tmp_path: Path) -> None:
    served, target = folder / "b.safetensors", tmp_path / "out.safetensors"
    served.write_bytes((folder / "a.safetensors").read_bytes())
    url = f"{web.url}/b.safetensors"
    with pytest.raises(StopError):
        convert(url, target, resume=True, fsync=False, progress=stop_at(12 * UNIT))
    os.utime(served, ns=(1, 1))
    with pytest.raises(ConfigError, match="has changed since"):
        convert(url, target, resume=True, fsync=False)
