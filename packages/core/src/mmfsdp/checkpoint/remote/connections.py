"""Asks HTTP servers with Python's own client: connections stay open, redirects are followed, proxies are used."""

from __future__ import annotations

import base64
import http.client
import io
import re
import socket
import ssl
import urllib.request
import weakref
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import unquote, urljoin, urlsplit

from mmfsdp.basics.masking import hide_secrets, mask_url
from mmfsdp.checkpoint.remote.pacing import PacedStream, Pacer, patience
from mmfsdp.checkpoint.remote.transports import PassingError
from mmfsdp.errors import CheckpointError, MmfsdpError

__all__ = ["Connections", "Login", "Response", "basic"]

_REDIRECTS = 10
_SMALL = 1 << 16  # bytes of an unwanted answer that are read so that its connection can be used again
_ERRORS = (http.client.HTTPException, OSError, ValueError)


_Key = tuple[tuple[str, str, int | None], str | None]  # the server, and the proxy on the way to it


class Login(NamedTuple):
    """Who asks, and the only server that may know."""

    address: str
    """A URL of the server; its scheme, host and port count."""
    header: str
    """The value that `basic` returns."""


class Response:
    """The answer of a server; a context manager that keeps its connection if all of the answer was read."""

    def __init__(
        self,
        response: http.client.HTTPResponse,
        address: str,
        connection: http.client.HTTPConnection,
        idle: list[http.client.HTTPConnection],
        owner: Connections,
    ) -> None:
        self._response, self._connection, self._idle = response, connection, idle
        self._owner = owner  # which closes what is idle: not before this has given its connection back
        self.address, self.status, self.headers = address, response.status, response.headers

    def __enter__(self) -> Response:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, most: int) -> bytes:
        """Return up to the given number of bytes: fewer if the server stops.

        Raises:
            PassingError: The server is too slow.
        """
        data = bytearray()
        try:
            while len(data) < most and (block := self._response.read(min(1 << 20, most - len(data)))):
                data += block
        except http.client.IncompleteRead as error:
            data += error.partial
        except _ERRORS:
            pass
        return bytes(data)

    def read_into(self, view: memoryview) -> int:
        """Fill memory; return how many bytes came.

        Raises:
            PassingError: The server is too slow.
        """
        done = 0
        try:
            while done < len(view) and (count := self._response.readinto(view[done:])):
                done += count
        except _ERRORS:  # what has come is good
            pass
        return done

    def close(self) -> None:
        """Let go of the connection."""
        length = self._response.length
        if length is not None and length <= _SMALL:
            with suppress(PassingError):
                self.read(length + 1)
        if self._response.isclosed() and not self._response.will_close:
            self._idle.append(self._connection)
        else:
            self._response.close()
            self._connection.close()


class Connections:
    """Connections to servers, which threads share; those that are idle are closed with this."""

    def __init__(self) -> None:
        self._idle: defaultdict[_Key, list[http.client.HTTPConnection]] = defaultdict(list)
        weakref.finalize(self, _close, self._idle)

    def get(self, address: str, headers: Mapping[str, str], login: Login | None = None) -> Response:
        """Ask for a file, and follow where the server leads.

        Args:
            address: Where it is.
            headers: What every server may know that is asked.
            login: Sent to its own server, until the first redirect to another one.

        Raises:
            CheckpointError: The server leads nowhere, or from https to http, or nobody vouches for it.
            PassingError: It does not answer.
        """
        here, trusted = address, login is not None and _origin(login.address) == _origin(address)
        for _ in range(_REDIRECTS):
            private = {"Authorization": login.header} if login is not None and trusted else {}
            response = self._sent(here, {**headers, **private})
            if response.status not in (301, 302, 303, 307, 308) or "Location" not in response.headers:
                return response
            response.close()
            there = _next(here, response.headers["Location"])
            trusted = trusted and _origin(there) == _origin(here)
            here = there
        raise CheckpointError(f"The server of {mask_url(address)} redirects {_REDIRECTS} times.")

    def _sent(self, address: str, headers: Mapping[str, str]) -> Response:
        proxy = _proxy(address)
        idle = self._idle[_origin(address), proxy]
        while True:
            try:
                old = idle.pop()
            except IndexError:
                old = None
            connection = old
            try:
                connection = old or _connection(address, proxy)
                visited = proxy if address.startswith("http:") else None  # and told the whole address
                login = {} if visited is None else _proxy_login(visited)
                connection.request("GET", _target(address, whole=visited is not None), headers={**headers, **login})
                response = connection.getresponse()
            except (PassingError, MmfsdpError):
                if connection is not None:
                    connection.close()
                raise
            except _ERRORS as error:
                if connection is not None:
                    connection.close()
                if old is None:
                    raise _unanswered(address, error) from hide_secrets(error)
                continue  # it was open for a while, and the server has closed it
            return Response(response, address, connection, idle, self)


def _close(idle: Mapping[_Key, list[http.client.HTTPConnection]]) -> None:
    for connections in [*idle.values()]:
        while connections:
            connections.pop().close()


def basic(login: str) -> str:
    """Return the header that says who asks, from ``user:password``."""
    return f"Basic {base64.b64encode(unquote(login).encode()).decode()}"


class _Answer(http.client.HTTPResponse):
    """An answer that must keep coming: all of its headers in time, then its body at a least rate."""

    def __init__(self, connection: socket.socket, *args: Any, **settings: Any) -> None:
        super().__init__(connection, *args, **settings)
        self._pacer = Pacer()
        raw = self.fp.detach()
        self.fp = io.BufferedReader(PacedStream(raw, connection, self._pacer))

    def begin(self) -> None:
        super().begin()
        self._pacer.restart()


def _connection(address: str, proxy: str | None) -> http.client.HTTPConnection:
    parts = urlsplit(address)
    visited = parts if proxy is None else urlsplit(proxy)
    host, port = visited.hostname or "", visited.port
    connection: http.client.HTTPConnection
    if parts.scheme == "http":
        connection = http.client.HTTPConnection(host, port, timeout=patience())
    else:
        connection = http.client.HTTPSConnection(host, port, timeout=patience(), context=_trust())
        if proxy is not None:
            connection.set_tunnel(parts.hostname or "", parts.port, _proxy_login(proxy))
    connection.response_class = _Answer
    return connection


def _proxy_login(proxy: str) -> dict[str, str]:
    login = urlsplit(proxy).netloc.rpartition("@")[0]
    return {"Proxy-Authorization": basic(login)} if login else {}


def _origin(address: str) -> tuple[str, str, int | None]:
    """Return what tells servers apart: scheme, host and port."""
    parts = urlsplit(address)
    return parts.scheme, parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _next(here: str, location: str) -> str:
    """Return where a redirect leads.

    Raises:
        CheckpointError: It is nowhere, or others could read and change what comes from there.
    """
    try:
        there = urljoin(here, location)
        old, new = _origin(here)[0], _origin(there)[0]
    except ValueError:
        raise CheckpointError(f"The server of {mask_url(here)} redirects to {mask_url(location)!r}.") from None
    if new not in ("http", "https"):
        raise CheckpointError(f"The server of {mask_url(here)} redirects to {mask_url(there)!r}.")
    if (old, new) == ("https", "http"):
        raise CheckpointError(
            f"The server of {mask_url(here)} redirects from https to {mask_url(there)}, where anybody on the way could "
            "read and change what is sent; mmfsdp does not follow. Find out where the file lies, and give that URL."
        )
    return there


@cache
def _trust() -> ssl.SSLContext:
    return ssl.create_default_context()  # takes a while


def _proxy(address: str) -> str | None:
    """Return the proxy for an address, which variables such as ``https_proxy`` and ``no_proxy`` name."""
    parts = urlsplit(address)
    if urllib.request.proxy_bypass(parts.hostname or ""):
        return None
    found = urllib.request.getproxies().get(parts.scheme)
    return found if found is None or "://" in found else f"http://{found}"


def _target(address: str, *, whole: bool) -> str:
    parts = urlsplit(address)
    text = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    text = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{text}" if whole else text
    return re.sub(r"[^!-~]", lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), text)


def _unanswered(address: str, error: Exception) -> Exception:
    host = urlsplit(address).hostname
    if isinstance(error, ssl.SSLCertVerificationError):
        return CheckpointError(
            f"Nobody vouches for the server {host!r}: {error.verify_message}. Set the variable SSL_CERT_FILE to a file "
            "with the certificate of the authority that does."
        )
    if isinstance(error, socket.gaierror):
        return PassingError(f"there is no server {host!r}, or the network is down")
    if isinstance(error, ValueError):  # the port is not a number
        return CheckpointError(f"{mask_url(address)!r} is not the address of a server. Check the host and the port.")
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return PassingError(f"the server {host!r} does not answer ({text})")
