"""Writes files to S3 in parts, in any order; a file appears when all its parts are there, and not before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from mmfsdp.checkpoint.remote.over_fsspec import fsspec_store
from mmfsdp.checkpoint.remote.urls import Url, shown
from mmfsdp.errors import CheckpointError, ConfigError

__all__ = ["S3Folder", "S3Upload"]

_PART = 16 << 20  # bytes; S3 takes 5 MB and more, and 10,000 parts of a file
_MOST_PARTS = 9_000
_AT_ONCE = 3  # parts under way at the same time

T = TypeVar("T")


class S3Folder:
    """Where files are written to.

    Args:
        url: The target: a file, or what the names of files begin with.

    Raises:
        ConfigError: It is not in S3, or s3fs is not installed.
    """

    def __init__(self, url: Url) -> None:
        if url.scheme not in ("s3", "s3a"):
            raise ConfigError(
                f"{str(url)!r} cannot be written: targets are paths on this machine, and s3://. Write to a path, and "
                "copy the result.",
                file=str(url),
            )
        self._url, self._store = url, fsspec_store(url)[0]

    def exists(self) -> bool:
        """Tell whether there is a file with this name, or one below it."""
        self._store.invalidate_cache()
        return bool(self._called(lambda: self._store.exists(self._url.full)))

    def upload(self, name: str, size: int, stretches: Iterable[tuple[int, int]]) -> S3Upload:
        """Begin to write a file.

        Args:
            name: Its name below the target; empty for the target itself.
            size: Its length in bytes.
            stretches: Offset and length of everything that will be written to it; the rest is zeros.
        """
        bucket, key = self._place(name)
        return S3Upload(lambda method, **rest: self._s3(method, Bucket=bucket, Key=key, **rest), size, stretches)

    def put(self, name: str, data: bytes) -> None:
        """Write a small file at once."""
        bucket, key = self._place(name)
        self._s3("put_object", Bucket=bucket, Key=key, Body=data)

    def remove(self, name: str) -> None:
        """Remove a file."""
        bucket, key = self._place(name)
        self._s3("delete_object", Bucket=bucket, Key=key)

    def _place(self, name: str) -> tuple[str, str]:
        url = self._url.child(name) if name else self._url
        bucket, key, _ = self._store.split_path(f"{url.host}{url.path}")
        return bucket, key

    def _s3(self, method: str, **arguments: Any) -> Any:
        return self._called(lambda: self._store.call_s3(method, **arguments))

    def _called(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:  # s3fs has tried again what may pass; its errors are of many kinds
            reason = shown(str(error)).rstrip(".") or type(error).__name__
            raise CheckpointError(
                f"{self._url.name} cannot be written: S3 says {reason!r}. Check the bucket, and the credentials that "
                "s3fs takes from the environment and from ~/.aws.",
                file=str(self._url),
            ) from error


class S3Upload:
    """A file that is being written; it offers what a `Copier` writes to.

    Bytes may come in any order. A part is sent when all that will be written to it is there; until then it is held, so
    what lies in front of a tensor may come after it.

    Args:
        call: Calls a method of S3 with the file's bucket and key.
        size: Length of the file in bytes.
        stretches: Offset and length of everything that will be written.
    """

    def __init__(self, call: Callable[..., Any], size: int, stretches: Iterable[tuple[int, int]]) -> None:
        self._call, self._size = call, size
        self.part = max(_PART, -(-size // _MOST_PARTS))
        """Bytes of a part."""
        self._left = [0] * -(-size // self.part)  # bytes that are still to come, by part
        for at, length in stretches:
            self._count(at, length)
        self._id = call("create_multipart_upload")["UploadId"]
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="mmfsdp-upload")
        self._free = threading.Semaphore(_AT_ONCE)
        self._sent: dict[int, Future[str]] = {}
        self._held: dict[int, bytearray] = {}
        self._number, self._data = -1, bytearray()
        self._at = 0

    def _count(self, at: int, length: int) -> None:
        while length > 0:
            number = at // self.part
            here = min(length, (number + 1) * self.part - at)
            self._left[number] += here
            at, length = at + here, length - here

    def room(self, at: int, most: int) -> memoryview:
        """Return memory for up to ``most`` bytes at byte ``at`` of the file; see `BlockWriter.room`."""
        number = at // self.part
        if number != self._number:
            self._flush()
            self._number = number
            self._data = self._taken(number)
        self._at = at - number * self.part
        return memoryview(self._data)[self._at : self._at + most]

    def filled(self, count: int) -> None:
        """Note that the first bytes of the ``room`` are there."""
        self._left[self._number] -= count

    def write(self, data: bytes | memoryview, at: int) -> None:
        """Write bytes at byte ``at`` of the file."""
        view = memoryview(data)
        while view:
            room = self.room(at, len(view))
            room[:] = view[: len(room)]
            self.filled(len(room))
            view, at = view[len(room) :], at + len(room)

    def finish(self) -> None:
        """Send what is left, wait until all parts are there, and let the file appear."""
        self._flush()
        for number in range(len(self._left)):
            if number not in self._sent:  # all zeros
                self._send(number, self._taken(number))
        if not self._sent:  # an empty file has one part, too
            self._send(0, bytearray())
        parts = [{"PartNumber": number + 1, "ETag": sent.result()} for number, sent in sorted(self._sent.items())]
        self._call("complete_multipart_upload", UploadId=self._id, MultipartUpload={"Parts": parts})
        self._pool.shutdown()

    def abort(self) -> None:
        """Give up: nothing appears, and S3 forgets the parts."""
        self._pool.shutdown(cancel_futures=True)
        self._call("abort_multipart_upload", UploadId=self._id)

    def _taken(self, number: int) -> bytearray:
        """Return what is there of a part."""
        if number in self._held:
            return self._held.pop(number)
        return bytearray(min(self.part, self._size - number * self.part))

    def _flush(self) -> None:
        if self._number < 0:
            return
        if self._left[self._number]:
            self._held[self._number] = self._data
        else:
            self._send(self._number, self._data)
        self._number = -1

    def _send(self, number: int, data: bytearray) -> None:
        for sent in self._sent.values():
            if sent.done():
                sent.result()  # an error ends the work now, and not with the last part
        self._free.acquire()
        self._sent[number] = self._pool.submit(self._sent_part, number, data)

    def _sent_part(self, number: int, data: bytearray) -> str:
        try:
            answer = self._call("upload_part", UploadId=self._id, PartNumber=number + 1, Body=bytes(data))
            return str(answer["ETag"])
        finally:
            self._free.release()
