"""Reads files of any store that fsspec knows, such as S3, Google Cloud Storage and the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from mmfsdp.basics.installing import pip_install
from mmfsdp.basics.masking import hide_secrets, mask_secrets
from mmfsdp.checkpoint.remote.pacing import call_within
from mmfsdp.checkpoint.remote.transports import HEAD, DeniedError, Info, PassingError, changed
from mmfsdp.checkpoint.remote.urls import Url
from mmfsdp.errors import CheckpointError, ConfigError, MmfsdpError

__all__ = ["FsspecTransport", "fsspec_store", "transport"]

T = TypeVar("T")

_DRIVERS = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "hf": "huggingface_hub",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "sftp": "paramiko",
    "ssh": "paramiko",
}
# What stores call that which changes with a file.
_MARKS = ("ETag", "etag", "generation", "md5Hash", "blob_id", "LastModified", "last_modified", "mtime", "created")


def transport(url: Url) -> FsspecTransport:
    """Return the transport for a URL and all others of its scheme; errors as for `fsspec_store`."""
    return FsspecTransport(*fsspec_store(url))


def fsspec_store(url: Url) -> tuple[Any, Callable[[str], str]]:
    """Return fsspec's file system for a URL and all others of its scheme, and what makes its paths of their URLs.

    Raises:
        ConfigError: fsspec, or the driver for the scheme, is not installed.
        CheckpointError: The driver connects at once, and its server does not answer in time.
    """
    try:
        from fsspec.core import strip_protocol, url_to_fs  # type: ignore[import-untyped]
    except ImportError as error:
        needed = ["mmfsdp[remote]", *([_DRIVERS[url.scheme]] if url.scheme in _DRIVERS else [])]
        raise ConfigError(f"{url.scheme}:// needs fsspec. Install it with: {pip_install(*needed)}") from error
    try:
        store, _ = call_within(lambda: url_to_fs(url.full))  # SFTP connects here
    except ImportError as error:
        driver = _DRIVERS.get(url.scheme)
        install = f"Install it with: pip install {driver}" if driver else f"{mask_secrets(str(error))}"
        raise ConfigError(f"{url.scheme}:// needs a driver of fsspec. {install}") from hide_secrets(error)
    except PassingError as error:
        raise CheckpointError(f"{url.name} cannot be read: {error.reason}.", file=str(url)) from error
    except ValueError as error:
        raise ConfigError(
            f"{url.scheme}:// is not a scheme that can be read: {mask_secrets(str(error))}. Use https://, s3://, "
            "gs://, hf:// or another that fsspec knows."
        ) from hide_secrets(error)
    store.invalidate_cache()
    return store, strip_protocol


class FsspecTransport:
    """Reads files through fsspec; see `Transport`.

    Args:
        store: A file system of fsspec.
        path: Makes of a URL what the file system calls it.
    """

    def __init__(self, store: Any, path: Callable[[str], str]) -> None:
        self._store, self._to_path = store, path
        # What reads parts through open files, as for the Hugging Face Hub, would read megabytes ahead by itself.
        by_file = getattr(store.cat_file, "__func__", None) is getattr(_base(), "cat_file", None)
        self._options = {"cache_type": "none"} if by_file else {}

    def first(self, url: Url) -> tuple[Info, bytes] | None:
        path = self._path(url)
        try:
            found = self._called(url, lambda: self._store.info(path))
            if found.get("type") == "directory":
                return None
            info = _info(url, found)
            return info, self._part(url, 0, min(HEAD, info.size)) if info.size else b""
        except FileNotFoundError:
            return None

    def fill(self, url: Url, view: memoryview, at: int, info: Info) -> int:
        try:
            data = self._part(url, at, at + len(view))
        except FileNotFoundError as error:
            raise changed(url) from error
        if len(data) > len(view):
            raise CheckpointError(
                f"{url.name} cannot be read by ranges: its store sent {len(data)} bytes (expected {len(view)}). "
                "Download the checkpoint first, and open the copy.",
                file=str(url),
            )
        view[: len(data)] = data
        return len(data)

    def names(self, url: Url) -> list[str]:
        path = self._path(url)
        try:
            found = self._called(url, lambda: self._store.ls(path, detail=False))
        except (FileNotFoundError, NotADirectoryError):
            return []
        own = path.strip("/")
        names = {str(one).rstrip("/").rpartition("/")[2] for one in found if str(one).strip("/") != own}
        return sorted(name for name in names if name not in ("", ".", ".."))

    def check(self, url: Url, info: Info) -> None:
        self._store.invalidate_cache()
        try:
            found = self._called(url, lambda: self._store.info(self._path(url)))
        except FileNotFoundError as error:
            raise changed(url) from error
        if _info(url, found) != info:
            raise changed(url)

    def _path(self, url: Url) -> str:
        return self._to_path(url.full)

    def _part(self, url: Url, begin: int, end: int) -> bytes:
        path = self._path(url)

        def read() -> bytes:
            return self._store.cat_file(path, start=begin, end=end, **self._options)  # type: ignore[no-any-return]

        return self._called(url, read, end - begin)

    def _called(self, url: Url, call: Callable[[], T], size: int = 0) -> T:
        try:
            return call_within(call, size)
        except (FileNotFoundError, NotADirectoryError, MmfsdpError, PassingError):
            raise
        except PermissionError as error:
            raise _denied(url, error) from hide_secrets(error)
        except Exception as error:  # each driver has errors of its own
            text = mask_secrets(str(error)).strip() or type(error).__name__
            if "credential" in text.lower():
                raise _denied(url, error) from hide_secrets(error)
            raise PassingError(f"its store says {text.rstrip('.')!r}") from hide_secrets(error)


def _base() -> Any:
    from fsspec import AbstractFileSystem  # type: ignore[import-untyped]

    return AbstractFileSystem


def _info(url: Url, found: Any) -> Info:
    size = found.get("size")
    if not isinstance(size, int):
        raise CheckpointError(f"{url.name} cannot be read: its store does not say its size.", file=str(url))
    return Info(size, next((f"{mark}={found[mark]}" for mark in _MARKS if found.get(mark)), ""))


def _denied(url: Url, error: BaseException) -> DeniedError:
    reason = mask_secrets(str(error)).rstrip(".") or type(error).__name__
    return DeniedError(
        f"{url.scheme}:// does not let {url.name} be read: {reason}. "
        "Check the name, and the credentials that its driver takes from the environment and from its own files.",
        file=str(url),
    )
