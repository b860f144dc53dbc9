"""A target is claimed before it is written, replaced in one step, and whatever dies on the way leaves it complete."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from mmfsdp.checkpoint import TargetExistsError, convert, open_layout
from mmfsdp.checkpoint.files import disk, siblings
from mmfsdp.checkpoint.files.atomic import atomic_output, commit, discard, temporary_sibling
from mmfsdp.checkpoint.files.disk import make_parent
from mmfsdp.checkpoint.files.siblings import ABANDONED
from mmfsdp.errors import CheckpointNotFoundError


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sources")
    for seed, name in enumerate(("old.pth", "new.pth")):
        generator = torch.Generator().manual_seed(seed)
        torch.save({"state_dict": {"w": torch.randn(64, 64, generator=generator)}}, directory / name)
    return directory


@pytest.mark.sample("out.pth-exchanged-over", "out.pth-refused-over")
@pytest.mark.parametrize("over", ["over", "fresh"])
@pytest.mark.parametrize("refused", ["refused", "exchanged"])
@pytest.mark.parametrize("name", ["out", "out.pth"])
def test_killed_before_each_operation(sources: Path, tmp_path: Path, name: str, over: str, refused: str) -> None:
    seen = json.loads(run("replacing.py", copied(sources, tmp_path), name, over, refused))
    assert seen["steps"] >= (2 if name.endswith(".pth") else 3), seen
    assert seen["new"] > 0, seen
    assert (seen["old"] > 0, seen["nothing"] == 0) == ((True, True) if over == "over" else (False, False)), seen
    assert (seen["beside"] > 0) == (name == "out" and over == "over" and refused == "refused"), seen


def run(script: str, *arguments: object) -> str:
    command = [sys.executable, str(Path(__file__).parents[2].joinpath(script)), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.sample("out.pth")
@pytest.mark.parametrize("name", ["out.pth", "out"])
def test_of_two_conversions_one_wins(sources: Path, name: str, tmp_path: Path) -> None:
    for found in json.loads(run("racing.py", copied(sources, tmp_path), name, "no", 15)):
        assert [*found.values()].count("wrote") == 1
        [loser] = [answer for answer in found.values() if answer != "wrote"]
        assert "is being written by another process" in loser or "exists already" in loser


@pytest.mark.sample("out.pth")
@pytest.mark.parametrize("name", ["out.pth", "out"])
def test_of_two_forced_conversions_the_last_stays(sources: Path, name: str, tmp_path: Path) -> None:
    for found in json.loads(run("racing.py", copied(sources, tmp_path), name, "force", 15)):
        assert [*found.values()] == ["wrote", "wrote"]


def copied(sources: Path, directory: Path) -> Path:
    for file in sources.iterdir():
        shutil.copy(file, directory)
    return directory


def test_threads_that_write_one_directory_over_and_over(tmp_path: Path) -> None:
    failed: list[BaseException] = []

    def write(text: str) -> None:
        try:
            for _ in range(40):
                with atomic_output(tmp_path / "d", overwrite=True, fsync=False) as temporary:
                    temporary.mkdir()
                    (temporary / "one").write_text(text)
                    (temporary / "two").write_text(text)
        except BaseException as error:
            failed.append(error)

    writers = [threading.Thread(target=write, args=(text,)) for text in "abc"]
    for writer in writers:
        writer.start()
    seen = 0
    while any(writer.is_alive() for writer in writers):
        if not (tmp_path / "d").exists():
            assert not seen, "what was there is never missing"
            continue
        seen += 1
        descriptor = os.open(tmp_path / "d", os.O_RDONLY)  # one directory, whatever is at the path next
        try:
            found = set()
            for name in ("one", "two"):
                try:
                    part = os.open(name, os.O_RDONLY, dir_fd=descriptor)
                except FileNotFoundError:  # it is being removed, after it was replaced
                    continue
                found.add(os.read(part, 10))
                os.close(part)
            assert len(found) <= 1
        finally:
            os.close(descriptor)
    assert not failed
    assert os.listdir(tmp_path) == ["d"]


CLAIMING = """
import sys, time; from pathlib import Path
from mmfsdp.checkpoint.files.atomic import temporary_sibling
temporary_sibling(Path(sys.argv[1]), exclusive=True).write_text("half")
print("ready", flush=True)
time.sleep(600)
"""


def test_the_claim_of_a_dead_process_does_not_block(sources: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.pth"
    with subprocess.Popen([sys.executable, "-c", CLAIMING, str(target)], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
        with pytest.raises(TargetExistsError, match=rf"being written by another process \(process {worker.pid} on "):
            convert(sources / "new.pth", target)
        with atomic_output(tmp_path / "other.pth") as temporary:  # another target is another matter
            temporary.write_text("x")
        convert(sources / "old.pth", target, overwrite=True)  # --force asks nobody
        assert len([name for name in os.listdir(tmp_path) if name.endswith("partial")]) == 1, "it is alive"
        target.unlink()
        worker.kill()
    convert(sources / "new.pth", target)
    assert sorted(os.listdir(tmp_path)) == ["other.pth", "out.pth"]


def test_without_overwrite_nothing_is_replaced_at_the_end_either(tmp_path: Path) -> None:
    for name, make in (("file", Path.touch), ("directory", Path.mkdir), ("link", lambda path: path.symlink_to("x"))):
        for temporary_is in (Path.touch, Path.mkdir):
            target = tmp_path / name
            temporary = temporary_sibling(target, exclusive=True)
            temporary_is(temporary)
            make(target)  # type: ignore[operator]
            with pytest.raises(TargetExistsError, match="exists already"):
                commit(temporary, target)
            discard(temporary)
            target.unlink() if not target.is_dir() or target.is_symlink() else target.rmdir()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("refused", [False, True])
def test_renaming_to_nothing_only(tmp_path: Path, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if refused:
        monkeypatch.setattr(disk, "_renameat2", lambda *_: False)  # as on a file system without it
    for source_is in (Path.touch, Path.mkdir):
        source, target = tmp_path / "source", tmp_path / "target"
        source_is(source)
        for taken in (Path.touch, Path.mkdir, lambda path: path.symlink_to("nowhere")):
            taken(target)
            with pytest.raises(FileExistsError):
                disk.rename_new(source, target)
            target.rmdir() if target.is_dir() and not target.is_symlink() else target.unlink()
        disk.rename_new(source, target)
        assert os.listdir(tmp_path) == ["target"]
        with pytest.raises(FileNotFoundError):
            disk.rename_new(source, tmp_path / "third")
        target.rmdir() if target.is_dir() else target.unlink()


def test_any_kind_replaces_any_kind(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    makers = {
        "file": lambda path: path.write_text("file"),
        "directory": lambda path: (path.mkdir(), (path / "x").touch()),
        "link": lambda path: path.symlink_to(tmp_path / "elsewhere"),
    }
    for old, make_old in makers.items():
        for new in ("file", "directory"):
            make_old(tmp_path / "t")
            with atomic_output(tmp_path / "t", overwrite=True, fsync=False) as temporary:
                makers[new](temporary)
            assert (tmp_path / "t").is_dir() == (new == "directory"), (old, new)
            assert not (tmp_path / "t").is_symlink()
            assert sorted(os.listdir(tmp_path)) == ["elsewhere", "t"]
            shutil.rmtree(tmp_path / "t") if new == "directory" else (tmp_path / "t").unlink()
    assert os.listdir(tmp_path / "elsewhere") == ["kept"]


def test_parents_are_made_on_request_only(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        temporary_sibling(tmp_path / "a" / "b" / "c.pth")
    make_parent(tmp_path / "a" / "b" / "c.pth")
    temporary = temporary_sibling(tmp_path / "a" / "b" / "c.pth")
    temporary.touch()
    commit(temporary, tmp_path / "a" / "b" / "c.pth")
    assert os.listdir(tmp_path / "a" / "b") == ["c.pth"]


def test_what_says_nothing_about_its_writer_stays_for_an_hour(tmp_path: Path) -> None:
    old = tmp_path / ".out.pth.0123abcd-1-89abcdef.mmfsdp-partial"  # pid 1, as in every pod
    old.write_text("half")
    with atomic_output(tmp_path / "out.pth") as temporary:
        temporary.touch()
    assert old.exists()
    os.utime(old, (time.time() - ABANDONED - 60,) * 2)
    with atomic_output(tmp_path / "out.pth", overwrite=True) as temporary:
        temporary.touch()
    assert not old.exists()


def test_a_missing_checkpoint_is_still_missing(tmp_path: Path) -> None:
    (tmp_path / ".out.0123456789abcdef.mmfsdp-partial").mkdir()
    with pytest.raises(CheckpointNotFoundError, match="There is no checkpoint"):
        open_layout(tmp_path / "out")


FORGETFUL = """
import os, sys; from pathlib import Path
from mmfsdp.checkpoint.files.atomic import temporary_sibling
path = temporary_sibling(Path(sys.argv[1]), exclusive=True)
if sys.argv[2] == "partial": path.write_text("half")
if sys.argv[2] == "fork":
    if os.fork(): os.wait()
    else: sys.exit()  # as the workers of a data loader
    assert len(os.listdir(Path(sys.argv[1]).parent)) == 2
"""


@pytest.mark.parametrize("how", ["nothing", "partial", "fork"])
def test_a_process_that_ends_without_a_word_leaves_what_the_next_removes(tmp_path: Path, how: str) -> None:
    subprocess.run([sys.executable, "-c", FORGETFUL, tmp_path / "out.pth", how], check=True)
    left = [name for name in os.listdir(tmp_path) if not name.endswith("claim")]
    assert len(left) == (2 if how == "partial" else 0)
    with atomic_output(tmp_path / "out.pth") as temporary:
        temporary.touch()
    assert os.listdir(tmp_path) == ["out.pth"]


def test_a_lease_of_nothing_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".out.pth.0123456789abcdef.mmfsdp-lease").touch()  # killed before it was signed
    with atomic_output(tmp_path / "out.pth") as temporary:
        temporary.touch()
    assert os.listdir(tmp_path) == ["out.pth"]


def test_an_interrupt_at_any_line_of_taking_a_lease_leaves_no_file(tmp_path: Path) -> None:
    path, code = tmp_path / ".out.mmfsdp-lease", siblings.Lease.take.__func__.__code__  # type: ignore[attr-defined]
    interrupted = True
    moments = 0
    while interrupted:
        moments += 1
        left = moments

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal left
            if frame.f_code.co_filename != code.co_filename:
                return None
            left -= event == "line"
            if left == 0:
                left -= 1
                raise KeyboardInterrupt
            return trace

        lease = None
        sys.settrace(trace)
        try:
            lease = siblings.Lease.take(path)
        except KeyboardInterrupt as error:
            kept = error  # as whoever reports it does: its frames keep what they hold
            sys.settrace(None)
            siblings._release_all()
            assert os.listdir(tmp_path) == [], (moments, kept)
        finally:
            sys.settrace(None)
        interrupted = lease is None
    assert moments > 10
    lease.release()
    assert os.listdir(tmp_path) == []
