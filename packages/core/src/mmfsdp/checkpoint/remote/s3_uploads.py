"""Writes files to S3 in parts; a file appears when all its parts are there, and not before."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from mmfsdp.basics.masking import hide_secrets, mask_secrets
from mmfsdp.checkpoint.remote.over_fsspec import fsspec_store
from mmfsdp.checkpoint.remote.upload_parts import UploadParts
from mmfsdp.checkpoint.remote.urls import Url, check_writable
from mmfsdp.errors import CheckpointError

__all__ = ["S3Comparison", "S3Folder", "S3Upload"]

_PART = 16 << 20  # bytes; S3 takes 5 MB and more, and 10,000 parts of a file
_MOST_PARTS = 9_000

T = TypeVar("T")


class S3Folder:
    """A directory in a bucket, to which files are written.

    Args:
        url: The target: a file, or what the names of files begin with.

    Raises:
        ConfigError: It is not in S3, or s3fs is not installed.
    """

    def __init__(self, url: Url) -> None:
        check_writable(url)
        self._url, self._store = url, fsspec_store(url)[0]

    def exists(self) -> bool:
        """Tell whether there is a file with this name, or one below it."""
        self._store.invalidate_cache()
        return bool(self._called(lambda: self._store.exists(self._url.full)))

    def names(self) -> list[str]:
        """Return the names of the files below the target; an empty one is the target itself."""
        self._store.invalidate_cache()
        bucket, key = self._bucket_and_key("")
        found = self._called(lambda: self._store.find(f"{bucket}/{key}"))
        return [path.removeprefix(f"{bucket}/{key}").lstrip("/") for path in found]

    def upload(self, name: str, size: int, stretches: Iterable[tuple[int, int]], *, resume: bool = False) -> S3Upload:
        """Begin to write a file, or go on with it.

        Args:
            name: Its name below the target; empty for the target itself.
            size: Its length in bytes.
            stretches: Offset and length of everything that will be written to it; the rest is zeros.
            resume: Go on with the unfinished upload of this file that has the most parts, and give up any others.
        """
        call = self._calling(name)
        known: Mapping[int, str] = {}
        if not resume or not (unfinished := self._unfinished(name)):
            upload_id = call("create_multipart_upload")["UploadId"]
        else:
            upload_id, known = max(unfinished.items(), key=lambda item: len(item[1]))
            for other in unfinished.keys() - {upload_id}:
                call("abort_multipart_upload", UploadId=other)
        return S3Upload(call, upload_id, known, size, stretches)

    def comparison(self, name: str, size: int, stretches: Iterable[tuple[int, int]]) -> S3Comparison | None:
        """Begin to compare a finished file with what would be written; ``None`` if it is missing, or surely differs.

        Args:
            name: Its name below the target.
            size: The length in bytes that it would have.
            stretches: Offset and length of everything that would be written to it.
        """
        listed = self._calling(name, "Prefix")("list_objects_v2", MaxKeys=1).get("Contents", [])
        _, key = self._bucket_and_key(name)
        if [(item["Key"], item["Size"]) for item in listed] != [(key, size)]:
            return None
        return S3Comparison(listed[0]["ETag"], size, stretches)

    def put(self, name: str, data: bytes) -> None:
        """Write a small file at once."""
        bucket, key = self._bucket_and_key(name)
        self._s3("put_object", Bucket=bucket, Key=key, Body=data)

    def remove(self, name: str) -> None:
        """Remove a file."""
        bucket, key = self._bucket_and_key(name)
        self._s3("delete_object", Bucket=bucket, Key=key)

    def _unfinished(self, name: str) -> dict[str, dict[int, str]]:
        """Return the unfinished uploads of a file, the newest first: the ETag of each part that S3 has, by number."""
        _, key = self._bucket_and_key(name)
        uploads = [
            item
            for page in _pages(self._calling(name, "Prefix"), "list_multipart_uploads", "KeyMarker", "UploadIdMarker")
            for item in page.get("Uploads", [])
            if item["Key"] == key
        ]
        found = {}
        for item in sorted(uploads, key=lambda item: item["Initiated"], reverse=True):
            pages = _pages(self._calling(name), "list_parts", "PartNumberMarker", UploadId=item["UploadId"])
            parts = (part for page in pages for part in page.get("Parts", []))
            found[item["UploadId"]] = {part["PartNumber"]: part["ETag"] for part in parts}
        return found

    def _calling(self, name: str, key_is: str = "Key") -> Callable[..., Any]:
        """Return what calls a method of S3 with the bucket and key of a file."""
        bucket, key = self._bucket_and_key(name)
        return lambda method, **rest: self._s3(method, Bucket=bucket, **{key_is: key}, **rest)

    def _bucket_and_key(self, name: str) -> tuple[str, str]:
        url = self._url.child(name) if name else self._url
        bucket, key, _ = self._store.split_path(f"{url.host}{url.path}")
        return bucket, key

    def _s3(self, method: str, **arguments: Any) -> Any:
        return self._called(lambda: self._store.call_s3(method, **arguments))

    def _called(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:  # s3fs has tried again what may pass; its errors are of many kinds
            reason = mask_secrets(str(error)).rstrip(".") or type(error).__name__
            raise CheckpointError(
                f"{self._url.name} cannot be written: S3 says {reason!r}. Check the bucket, and the credentials that "
                "s3fs takes from the environment and from ~/.aws.",
                file=str(self._url),
            ) from hide_secrets(error)


class S3Upload(UploadParts):
    """A file that is being written.

    Args:
        call: Calls a method of S3 with the file's bucket and key.
        upload_id: The upload.
        known: The ETags of the parts that S3 has of it, by number from 1. A part that has the same MD5 is not sent.
        size: Length of the file in bytes.
        stretches: Offset and length of everything that will be written.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        upload_id: str,
        known: Mapping[int, str],
        size: int,
        stretches: Iterable[tuple[int, int]],
    ) -> None:
        super().__init__(self._send, size, _part_size(size), stretches)
        self._call, self._id, self._known = call, upload_id, known

    def complete(self) -> None:
        """Send what is left, wait until all parts are there, and let the file appear."""
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(self.finish(), start=1)]
        self._call("complete_multipart_upload", UploadId=self._id, MultipartUpload={"Parts": parts})

    def abort(self) -> None:
        """Give up: nothing appears, and S3 forgets the parts."""
        self.stop()
        self._call("abort_multipart_upload", UploadId=self._id)

    def _send(self, number: int, data: bytes) -> str:
        tag = self._known.get(number + 1)
        if tag is not None and tag.strip('"') == _md5(data).hexdigest():
            return tag
        answer = self._call("upload_part", UploadId=self._id, PartNumber=number + 1, Body=data)
        return str(answer["ETag"])


class S3Comparison(UploadParts):
    """A finished file that is compared, without reading it, with what would be written.

    Args:
        tag: Its ETag. That of a file that was sent in parts is the MD5 of the MD5s of its parts, and their number.
        size: Its length in bytes.
        stretches: Offset and length of everything that would be written.
    """

    def __init__(self, tag: str, size: int, stretches: Iterable[tuple[int, int]]) -> None:
        super().__init__(lambda _, data: _md5(data).hexdigest(), size, _part_size(size), stretches)
        self._tag = tag

    def same(self) -> bool:
        """Tell whether the file is what would be written."""
        sums = self.finish()
        return self._tag.strip('"') == f"{_md5(bytes.fromhex(''.join(sums))).hexdigest()}-{len(sums)}"


def _part_size(size: int) -> int:
    """Return the bytes of a part of a file; it depends on the file's size alone, so that parts can be found again."""
    return max(_PART, -(-size // _MOST_PARTS))


def _md5(data: bytes) -> Any:
    return hashlib.md5(data, usedforsecurity=False)


def _pages(call: Callable[..., Any], method: str, *markers: str, **arguments: Any) -> Iterator[Any]:
    """Yield the answers of a method that answers in pages. Each page says where the next one begins."""
    begin: dict[str, Any] = {}
    while True:
        page = call(method, **arguments, **begin)
        yield page
        if not page.get("IsTruncated"):
            return
        begin = {marker: page[f"Next{marker}"] for marker in markers}
