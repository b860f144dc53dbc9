"""Gives new files their size, and the room for it on disk."""

from __future__ import annotations

import ctypes
import errno
import os

__all__ = ["reserve"]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def reserve(descriptor: int, size: int) -> None:
    """Make an empty file so many bytes long, with room on disk for all of them where the file system can do that.

    A disk that is too small says so before anything is written, and what is written finds its blocks chosen already,
    which takes the kernel less time (docs/adr/0002-extents.md).

    Args:
        descriptor: The file, open for writing.
        size: Its size in bytes.

    Raises:
        OSError: There is no room for it.
    """
    # Python's os.posix_fallocate() writes to every block where the file system knows no better; this asks only.
    allocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)  # Linux alone has it
    while allocate is not None and size:
        if allocate(descriptor, 0, ctypes.c_longlong(0), ctypes.c_longlong(size)) == 0:
            return
        code = ctypes.get_errno()
        if code in _FULL:
            raise OSError(code, os.strerror(code))
        if code != errno.EINTR:
            break
    os.truncate(descriptor, size)
