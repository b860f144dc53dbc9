from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfsdp.checkpoint.files.copying import BlockWriter, reserve, write_at

MB = 1 << 20
SIZE = MB + 5

# What is left out between two stretches, and the length of the second; pages and blocks are where something could go
# wrong.
_edges = st.sampled_from([1, 4095, 4096, 4097, MB // 2, MB - 1, MB, MB + 5000, 4 * MB - 1, 4 * MB, 4 * MB + 1, 5 * MB])
_stretches = st.lists(
    st.tuples(st.integers(0, 9000) | st.just(0), st.integers(1, 9000) | _edges), min_size=1, max_size=6
)


@pytest.mark.sample("False")
@pytest.mark.parametrize("durable", [False, True])
@settings(max_examples=25, deadline=None)
@given(stretches=_stretches)
def test_bytes_come_to_their_offsets(durable: bool, stretches: list[tuple[int, int]]) -> None:
    size = sum(gap + length for gap, length in stretches)
    noise = os.urandom(size)
    expected = bytearray(size)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        with path.open("xb") as file:
            file.truncate(size)
        writer = BlockWriter(durable=durable)
        with writer.to(path):
            at = 0
            for gap, length in stretches:
                at += gap
                write_at(writer, noise[at : at + length], at)
                expected[at : at + length] = noise[at : at + length]
                at += length
        assert path.read_bytes() == expected


def test_threads_that_write_to_one_file(tmp_path: Path) -> None:
    path, data, random = tmp_path / "file", os.urandom(64 * MB), Random(0)
    ends = sorted({0, len(data), *(random.randrange(len(data)) for _ in range(60))})
    pieces = list(pairwise(ends))  # most begin and end in the middle of a page
    idle: SimpleQueue[BlockWriter] = SimpleQueue()
    for number in range(4):
        idle.put(BlockWriter(durable=number % 2 == 0))
    for _ in range(5):
        path.unlink(missing_ok=True)
        with path.open("xb") as file:
            file.truncate(len(data))

        def _write(piece: tuple[int, int]) -> None:
            writer = idle.get()
            with writer.to(path):
                write_at(writer, data[piece[0] : piece[1]], piece[0])
            idle.put(writer)

        random.shuffle(pieces)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(_write, pieces))
        with path.open("rb") as file:
            os.fsync(file.fileno())
        assert path.read_bytes() == data


def test_the_disk_begins_to_write_what_must_be_there(tmp_path: Path) -> None:
    path, data = tmp_path / "file", os.urandom(24 * MB)
    for durable in (True, False):
        with path.open("wb") as file:
            reserve(file.fileno(), len(data))
        writer = BlockWriter(durable=durable)
        with writer.to(path):
            write_at(writer, data, 0)
        assert path.read_bytes() == data
        in_memory = os.major(path.stat().st_dev) == 0  # tmpfs has no disk
        ends = time.monotonic() + (10 if durable and not in_memory else 0.5)  # of itself the kernel waits for five
        time.sleep(0.5)
        while (cached := _stays_cached(path)) and time.monotonic() < ends:
            time.sleep(0.1)
        assert cached == (not durable or in_memory)


def _stays_cached(path: Path) -> bool:
    """Whether a page is in memory after the kernel was asked to forget the file: it forgets what the disk has."""
    cached = _is_cached(path, 12 * MB)
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return cached and _is_cached(path, 12 * MB)


def _is_cached(path: Path, at: int) -> bool:
    # A read with RWF_NOWAIT would tell too, but starts reading ahead, and on a fast disk finds what it caused.
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        page = ctypes.c_char.from_buffer(mapped, at)
        resident = ctypes.c_ubyte()
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(page)), ctypes.c_size_t(1), ctypes.byref(resident))
        del page
    assert not failed, os.strerror(ctypes.get_errno())
    return bool(resident.value & 1)


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def _full(descriptor: int, block: memoryview, at: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "pwrite", _full)
    writer = BlockWriter(durable=True)
    with pytest.raises(OSError, match="No space left"), writer.to(tmp_path / "file"):
        write_at(writer, bytes(9 * MB), 0)


def test_a_file_has_its_size_and_room_for_it(tmp_path: Path) -> None:
    with (tmp_path / "file").open("xb") as file:
        reserve(file.fileno(), SIZE)
        found = os.fstat(file.fileno())
    assert found.st_size == SIZE
    assert found.st_blocks * 512 >= SIZE
    assert (tmp_path / "file").read_bytes() == bytes(SIZE)


def test_an_empty_file_stays_empty(tmp_path: Path) -> None:
    with (tmp_path / "file").open("xb") as file:
        reserve(file.fileno(), 0)
    assert (tmp_path / "file").read_bytes() == b""


def test_where_room_cannot_be_asked_for_the_file_has_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())  # the C library of another system
    with (tmp_path / "file").open("xb") as file:
        reserve(file.fileno(), SIZE)
    assert (tmp_path / "file").read_bytes() == bytes(SIZE)


def test_no_room_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    with (tmp_path / "file").open("xb") as file:
        with pytest.raises(OSError, match=r"too large|No space") as caught:
            reserve(file.fileno(), 1 << 60)
        assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)
        assert os.fstat(file.fileno()).st_size == 0
