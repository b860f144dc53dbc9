"""The room that a new file is given on disk."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import pytest

from mmfsdp.checkpoint.files.reserving import reserve

SIZE = (1 << 20) + 5


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
