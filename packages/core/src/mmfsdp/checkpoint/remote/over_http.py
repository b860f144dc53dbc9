"""Reads files of HTTP servers by ranges, and finds out what lies in a directory there."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from email.message import Message
from html.parser import HTMLParser
from urllib.parse import unquote, urljoin, urlsplit

from mmfsdp.checkpoint.remote.connections import Connections, Login, Response, basic
from mmfsdp.checkpoint.remote.pacing import Pacer
from mmfsdp.checkpoint.remote.transports import HEAD, DeniedError, Info, PassingError, changed
from mmfsdp.checkpoint.remote.urls import Url
from mmfsdp.errors import CheckpointError, CorruptCheckpointError, FormatError

__all__ = ["HttpTransport", "transport"]

_PASSING = {408, 425, 429, 500, 502, 503, 504}
_PAGE = 16 << 20  # bytes of a page that lists a directory
_MANIFEST = "manifest.json"
_MANIFEST_LIMIT = 200_000_000  # bytes
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
# Where no page lists a directory, these names tell what it is; and most servers hide names that begin with a dot.
_KNOWN = (
    ".metadata",
    _MANIFEST,
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "rank0.pth",
)


def transport(_: Url) -> HttpTransport:
    """Return a transport with connections of its own, for any URL."""
    return HttpTransport()


class HttpTransport:
    """Reads files over HTTP; see `Transport`."""

    def __init__(self) -> None:
        self._connections = Connections()
        self._moved: dict[Url, str] = {}  # where a server has led; such addresses are often signed, and expire

    def first(self, url: Url) -> tuple[Info, bytes] | None:
        response = self._asked(url, 0, HEAD)
        if response is None:
            return None
        with response:
            if response.status == 416:  # an empty file has no first byte
                return Info(0, _identity(response.headers)), b""
            # A server may send less than it is asked for, and say so.
            end, size = _range(response, url, 0) if response.status == 206 else (_whole_size(response, url),) * 2
            head = response.read(min(HEAD, end))
            if len(head) < min(HEAD, end):
                raise PassingError(f"the server stopped {min(HEAD, end) - len(head)} bytes early")
            return Info(size, _identity(response.headers)), head

    def fill(self, url: Url, view: memoryview, at: int, info: Info) -> int:
        done, pacer = 0, Pacer()
        pacer.restart()
        while done < len(view):  # a server may send less than it is asked for, and say so
            pacer.left()
            count, announced = self._part(url, view[done:], at + done, info)
            done += count
            if count < announced:
                break
            pacer.count(count)
        return done

    def _part(self, url: Url, view: memoryview, at: int, info: Info) -> tuple[int, int]:
        """Read one answer; return how many bytes came, and how many of those asked for the server has announced."""
        response = self._asked(url, at, len(view))
        if response is None or response.status == 416:
            raise changed(url)
        with response:
            if response.status != 206:
                raise _no_ranges(url)
            identity = _identity(response.headers)
            end, size = _range(response, url, at)
            if size != info.size or (identity and info.identity and identity != info.identity):
                raise changed(url)
            view = view[: end - at]
            return response.read_into(view), len(view)

    def names(self, url: Url) -> list[str]:
        found = self._listed(url)
        with ThreadPoolExecutor(len(_KNOWN), thread_name_prefix="mmfsdp-names") as pool:
            unknown = [name for name in _KNOWN if name not in found]
            there = pool.map(lambda name: self._is_there(url.child(name)), unknown)
            found |= {name for name, is_there in zip(unknown, there, strict=True) if is_there}
        return sorted(found | self._in_manifest(url.child(_MANIFEST)) if _MANIFEST in found else found)

    def check(self, url: Url, info: Info) -> None:
        pass  # every answer says which file it is of

    def _is_there(self, url: Url) -> bool:
        try:
            response = self._asked(url, 0, 1)
        except DeniedError:
            return False
        if response is not None:
            response.close()
        return response is not None

    def _listed(self, url: Url) -> set[str]:
        """Return the names on the page that a server makes of a directory."""
        try:
            response = self._asked(replace(url, path=f"{url.path}/"))
        except DeniedError:
            return set()
        if response is None:
            return set()
        with response:
            if "html" not in response.headers.get("Content-Type", ""):
                return set()
            page = _ListingParser(response.address)
            page.feed(response.read(_PAGE).decode(errors="replace"))
            return page.names

    def _in_manifest(self, url: Url) -> set[str]:
        """Return the names that a manifest of mmfsdp lists; who reads it says what is wrong with it."""
        response = self._asked(url)
        if response is None:
            return set()
        with response:
            try:
                return {name for name in json.loads(response.read(_MANIFEST_LIMIT))["files"] if _is_name(name)}
            except (ValueError, KeyError, TypeError, RecursionError):
                return set()

    def _asked(self, url: Url, at: int | None = None, count: int = 0) -> Response | None:
        """Ask for bytes of a file, or for all; return the answer, or ``None`` if there is no such file.

        Raises:
            DeniedError: The server does not allow it.
            PassingError: The server does not answer, or asks to come again.
        """
        headers = {"User-Agent": "mmfsdp", "Accept": "*/*", "Accept-Encoding": "identity"}
        if at is not None:
            headers["Range"] = f"bytes={at}-{at + count - 1}"
        start = replace(url, login="").full
        login = Login(start, basic(url.login[:-1])) if url.login else None
        try:
            response = None
            if (address := self._moved.get(url)) is not None:
                response = self._connections.get(address, headers, login)
                if response.status >= 400:  # the address has expired
                    response.close()
                    self._moved.pop(url, None)
                    response = None
            if response is None:
                response = self._connections.get(start, headers, login)
                if response.address != start and response.status < 400:
                    self._moved[url] = response.address
        except CheckpointError as error:
            raise type(error)(error.message, file=str(url)) from error.__cause__
        if at is not None and urlsplit(response.address).path.endswith("/"):  # the page of a directory
            response.close()
            return None
        coding = response.headers.get("Content-Encoding", "identity").strip()
        if at is not None and response.status in (200, 206) and coding != "identity":
            response.close()
            raise FormatError(
                f"The server of {url.name} sends it compressed ({coding}), though it was asked not to. Download and "
                "unpack the checkpoint first, and open the copy.",
                file=str(url),
            )
        return _checked(url, response)


def _checked(url: Url, response: Response) -> Response | None:
    """Return an answer, or ``None`` if there is no such file; everything else is an error."""
    status = response.status
    if status in (200, 206, 416):
        return response
    response.close()
    if status in (404, 410):
        return None
    if status in _PASSING:
        pause = response.headers.get("Retry-After", "")
        raise PassingError(f"the server answers {status}", float(pause) if pause.isdecimal() else 0.0)
    if status in (401, 403):
        raise DeniedError(
            f"The server does not let {url.name} be read (it answers {status}). Check the name; if the file is not "
            "public, use an address that is signed, or one with a login (https://user:password@host/...), or the "
            "scheme of its store (s3://, gs://, hf://), which finds your credentials.",
            file=str(url),
        )
    raise CheckpointError(f"{url.name} cannot be read: its server answers {status}.", file=str(url))


def _range(response: Response, url: Url, at: int) -> tuple[int, int]:
    """Return the end of a part of a file, which must begin where it should, and the size of the file."""
    text = response.headers.get("Content-Range", "")
    match = _RANGE.fullmatch(text)
    if match is None or int(match[1]) != at or not at <= int(match[2]) < int(match[3]):
        raise CorruptCheckpointError(
            f"The server of {url.name} is broken: asked for the bytes from {at} on, it sends {text!r}. Download the "
            "checkpoint by another way, and open the copy.",
            file=str(url),
            offset=at,
        )
    return int(match[2]) + 1, int(match[3])


def _whole_size(response: Response, url: Url) -> int:
    """Return the size of a file that was sent whole, though a part was asked for."""
    length = response.headers.get("Content-Length", "")
    if not length.isdecimal() or int(length) > HEAD:
        raise _no_ranges(url)
    return int(length)


def _no_ranges(url: Url) -> FormatError:
    return FormatError(
        f"The server of {url.name} ignores ranges, and sends the whole file. Download the checkpoint first, and open "
        "the copy.",
        file=str(url),
    )


def _identity(headers: Message) -> str:
    return str(headers.get("ETag", "") or headers.get("Last-Modified", ""))


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\\", "\0"} & {*name}


class _ListingParser(HTMLParser):
    """Collects what a page that lists a directory links to, if it lies in that directory."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs).get("href") if tag == "a" else None
        if not given:
            return
        here, there = urlsplit(self._address), urlsplit(urljoin(self._address, given))
        inside = there.path.removeprefix(here.path).removesuffix("/")
        name = unquote(inside)
        if there.netloc == here.netloc and there.path.startswith(here.path) and "/" not in inside and _is_name(name):
            self.names.add(name)
