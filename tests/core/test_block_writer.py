from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfsdp.checkpoint.files import block_writer, direct_io
from mmfsdp.checkpoint.files.block_writer import BlockWriter
from mmfsdp.checkpoint.files.direct_io import Ways, open_direct

MB = 1 << 20

# What is left out between two stretches, and the length of the second; pages, blocks and the smallest direct request
# are where something could go wrong.
_edges = st.sampled_from([1, 4095, 4096, 4097, MB // 2, MB - 1, MB, MB + 5000, 4 * MB - 1, 4 * MB, 4 * MB + 1, 5 * MB])
_stretches = st.lists(
    st.tuples(st.integers(0, 9000) | st.just(0), st.integers(1, 9000) | _edges), min_size=1, max_size=6
)


@pytest.mark.parametrize("way", ["buffered", "direct", "in turn"])
@settings(max_examples=25, deadline=None)
@given(stretches=_stretches)
def test_bytes_come_to_their_places(way: str, stretches: list[tuple[int, int]]) -> None:
    size = sum(gap + length for gap, length in stretches)
    noise = os.urandom(size)
    expected = bytearray(size)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        with path.open("xb") as file:
            file.truncate(size)
        ways = Ways(fsync=way == "direct")
        writer = BlockWriter(ways)
        with writer.to(path):
            at = 0
            for number, (gap, length) in enumerate(stretches):
                at += gap
                ways.direct = number % 2 == 1 if way == "in turn" else way == "direct"
                writer.write(noise[at : at + length], at)
                expected[at : at + length] = noise[at : at + length]
                at += length
        assert path.read_bytes() == expected


def test_threads_that_write_to_one_file_both_ways(tmp_path: Path) -> None:
    path, data, random = tmp_path / "file", os.urandom(64 * MB), Random(0)
    ends = sorted({0, len(data), *(random.randrange(len(data)) for _ in range(60))})
    pieces = list(pairwise(ends))  # most begin and end in the middle of a page
    idle: SimpleQueue[BlockWriter] = SimpleQueue()
    for _ in range(4):
        idle.put(BlockWriter(Ways(fsync=False)))  # each with its own idea of which way is faster
    for _ in range(5):
        path.unlink(missing_ok=True)
        with path.open("xb") as file:
            file.truncate(len(data))

        def _write(piece: tuple[int, int]) -> None:
            writer = idle.get()
            with writer.to(path):
                writer.write(data[piece[0] : piece[1]], piece[0])
            idle.put(writer)

        random.shuffle(pieces)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(_write, pieces))
        with path.open("rb") as file:
            os.fsync(file.fileno())  # says so if the two ways had met on one page
        assert path.read_bytes() == data


def test_direct_blocks_do_not_fill_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, 16 * MB)
    descriptor = open_direct(path)
    assert (descriptor is not None) == (os.major(path.stat().st_dev) != 0)  # every local file system of note has it
    if descriptor is not None:
        os.close(descriptor)
    data = os.urandom(9 * MB)
    for fsync in (True, False):
        writer = BlockWriter(Ways(fsync=fsync))
        with writer.to(path):
            writer.write(data, 5000)
        cached = _is_cached(path, 5 * MB)
        assert cached == (not fsync or descriptor is None)
        os.truncate(path, 0)
        os.truncate(path, 16 * MB)


def _is_cached(path: Path, at: int) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(descriptor, [bytearray(4096)], at, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("wrong", ["refused", "short"])
def test_a_file_system_that_does_not_write_directly_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    path, data = tmp_path / "file", os.urandom(9 * MB)
    path.touch()
    pwrite, refused = os.pwrite, []

    def _open_direct(path: Path) -> int:
        refused.append(os.open(path, os.O_WRONLY))
        return refused[-1]

    def _pwrite(descriptor: int, block: memoryview, at: int) -> int:
        if descriptor not in refused:
            return pwrite(descriptor, block, at)
        if wrong == "refused":
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(descriptor, block[:4096], at)

    monkeypatch.setattr(block_writer, "open_direct", _open_direct)
    monkeypatch.setattr(os, "pwrite", _pwrite)
    ways = Ways(fsync=True)
    writer = BlockWriter(ways)
    with writer.to(path):
        writer.write(data, 0)
    assert path.read_bytes() == data
    assert ways.direct == (wrong == "short")


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def _full(descriptor: int, block: memoryview, at: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "pwrite", _full)
    writer = BlockWriter(Ways(fsync=True))
    with pytest.raises(OSError, match="No space left"), writer.to(tmp_path / "file"):
        writer.write(bytes(9 * MB), 0)


def _seconds(nbytes: int, speed: Callable[[bool, int], float], *, fsync: bool = False) -> tuple[float, int]:
    """Return how long writing takes on a disk of given speeds (bytes per second), and how many bytes went directly."""
    now, written, direct = 0.0, 0, 0
    ways = Ways(fsync=fsync, clock=lambda: now)
    while written < nbytes:
        block = 4 * MB if ways.direct else MB // 2
        now += block / speed(ways.direct, written)
        direct += block * ways.direct
        written += block
        ways.wrote(block)
    return now, direct


@pytest.mark.parametrize(("buffered", "direct"), [(5e9, 2e9), (0.35e9, 2e9), (2e9, 0.15e9), (1e9, 1e9)])
def test_the_faster_way_is_found(buffered: float, direct: float) -> None:
    taken, _ = _seconds(8 << 30, lambda way, _: direct if way else buffered)
    assert taken <= 1.25 * (8 << 30) / max(buffered, direct)


def test_a_way_that_becomes_slow_is_left_at_once() -> None:
    # Memory is fast until the kernel has it written back.
    taken, _ = _seconds(8 << 30, lambda way, at: 2e9 if way else 5e9 if at < 3 << 30 else 0.4e9)
    assert taken <= 1.25 * ((3 << 30) / 5e9 + (5 << 30) / 2e9)
    # And the other way round: it is slow at first.
    taken, _ = _seconds(8 << 30, lambda way, at: 2e9 if way else 0.4e9 if at < 1 << 30 else 5e9)
    assert taken <= 1.35 * ((1 << 30) / 2e9 + (7 << 30) / 5e9)


def test_what_has_to_be_on_disk_goes_there_directly() -> None:
    for buffered in (1e8, 1e10):
        assert _seconds(1 << 28, lambda way, _, other=buffered: 2e9 if way else other, fsync=True)[1] == 1 << 28
    ways = Ways(fsync=True)
    ways.no_direct()
    assert not ways.direct


def test_network_file_systems_are_not_written_directly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.touch()
    monkeypatch.setattr(direct_io.os, "major", lambda _: 0)
    assert open_direct(path) is None
    ways = Ways(fsync=True)
    with BlockWriter(ways).to(path):
        assert not ways.direct
