"""Lets a test that runs as root be refused what a user without rights is refused."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_override"]

_VERSION = 0x20080522  # of the kernel's interface: _LINUX_CAPABILITY_VERSION_3
_OVERRIDES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


@contextmanager
def without_override() -> Iterator[None]:
    """Within the block, permissions of files count for this thread though it is root's."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, held = (ctypes.c_uint32 * 2)(_VERSION, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, held) == 0
    reduced = (ctypes.c_uint32 * 6)(*held)
    reduced[0] &= ~_OVERRIDES  # of those in effect; the permitted ones stay, to be taken again
    assert libc.capset(header, reduced) == 0
    try:
        yield
    finally:
        assert libc.capset(header, held) == 0
