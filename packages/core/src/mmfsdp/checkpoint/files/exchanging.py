"""Renames that Python lacks: exchanging two paths in one step, and never replacing what is there.

Linux has ``renameat2`` for both (https://man7.org/linux/man-pages/man2/rename.2.html); some file systems refuse it.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

__all__ = ["exchange", "rename_new"]

_NOREPLACE, _EXCHANGE = 1, 2
_HERE = -100  # AT_FDCWD
_REFUSED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}


def exchange(one: Path, two: Path) -> bool:
    """Let two paths, each a file or a directory, change places in one step.

    Returns:
        Whether that was done; ``False`` where the system or the file system cannot do it.

    Raises:
        OSError: It went wrong otherwise; ``FileNotFoundError`` if one of them does not exist.
    """
    return _renameat2(one, two, _EXCHANGE)


def rename_new(source: Path, target: Path) -> None:
    """Rename a file or a directory to a path at which there is nothing.

    Raises:
        FileExistsError: There is something.
        OSError: It went wrong otherwise.
    """
    if _renameat2(source, target, _NOREPLACE):
        return
    if os.path.lexists(target):
        raise _exists(target)
    if not source.is_dir():
        try:
            os.link(source, target)
        except FileExistsError:
            raise
        except OSError:  # there are no hard links either: what appears just now would be replaced
            os.rename(source, target)
        else:
            os.unlink(source)
        return
    try:
        os.rename(source, target)  # what has appeared since is replaced only if it is an empty directory
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.ENOTDIR):
            raise _exists(target) from error
        raise


def _exists(target: Path) -> FileExistsError:
    return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))


def _renameat2(source: Path, target: Path, flags: int) -> bool:
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    if function(_HERE, os.fsencode(source), _HERE, os.fsencode(target), ctypes.c_uint(flags)) == 0:
        return True
    code = ctypes.get_errno()
    if code in _REFUSED:
        return False
    raise OSError(code, os.strerror(code), str(source), None, str(target))
