"""Asks HTTP servers with Python's own client: connections stay open, redirects are followed, proxies are used."""

from __future__ import annotations

import base64
import http.client
import re
import socket
import ssl
import urllib.request
import weakref
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from urllib.parse import unquote, urljoin, urlsplit

from mmfsdp.checkpoint.remote.sessions import PassingError
from mmfsdp.checkpoint.remote.urls import shown
from mmfsdp.errors import CheckpointError

__all__ = ["Connections", "Response", "basic"]

_TIMEOUT = 30.0  # seconds without an answer
_REDIRECTS = 10
_SMALL = 1 << 16  # bytes of an unwanted answer that are read so that its connection can be used again
_ERRORS = (http.client.HTTPException, OSError, ValueError)


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
        """Return up to the given number of bytes: fewer if the server stops."""
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
        """Fill memory; return how many bytes came."""
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
            self.read(length + 1)
        if self._response.isclosed() and not self._response.will_close:
            self._idle.append(self._connection)
        else:
            self._response.close()
            self._connection.close()


class Connections:
    """Connections to servers, which threads share; those that are idle are closed with this."""

    def __init__(self) -> None:
        self._idle: defaultdict[str, list[http.client.HTTPConnection]] = defaultdict(list)
        weakref.finalize(self, _close, self._idle)

    def get(self, address: str, headers: Mapping[str, str]) -> Response:
        """Ask for a file, and follow where the server leads.

        Raises:
            CheckpointError: The server leads nowhere, or nobody vouches for it.
            PassingError: It does not answer.
        """
        headers, here = dict(headers), address
        for _ in range(_REDIRECTS):
            response = self._sent(here, headers)
            if response.status not in (301, 302, 303, 307, 308) or "Location" not in response.headers:
                return response
            there = urljoin(here, response.headers["Location"])
            response.close()
            if urlsplit(there).scheme not in ("http", "https"):
                raise CheckpointError(f"The server of {shown(address)} redirects to {shown(there)!r}.")
            if urlsplit(there).netloc != urlsplit(here).netloc:
                headers.pop("Authorization", None)  # it is for the first server only
            here = there
        raise CheckpointError(f"The server of {shown(address)} redirects {_REDIRECTS} times.")

    def _sent(self, address: str, headers: Mapping[str, str]) -> Response:
        origin = "{0.scheme}://{0.netloc}".format(urlsplit(address))
        idle = self._idle[origin]
        while True:
            try:
                old = idle.pop()
            except IndexError:
                old = None
            connection = old
            try:
                connection = old or _connection(address)
                through_proxy = _proxy(address) if address.startswith("http:") else None
                connection.request("GET", _target(address, whole=through_proxy is not None), headers=dict(headers))
                response = connection.getresponse()
            except _ERRORS as error:
                if connection is not None:
                    connection.close()
                if old is None:
                    raise _unanswered(address, error) from error
                continue  # it was open for a while, and the server has closed it
            return Response(response, address, connection, idle, self)


def _close(idle: Mapping[str, list[http.client.HTTPConnection]]) -> None:
    for connections in [*idle.values()]:
        while connections:
            connections.pop().close()


def basic(login: str) -> str:
    """Return the header that says who asks, from ``user:password``."""
    return f"Basic {base64.b64encode(unquote(login).encode()).decode()}"


def _connection(address: str) -> http.client.HTTPConnection:
    parts, proxy = urlsplit(address), _proxy(address)
    host, port = parts.hostname or "", parts.port
    if proxy is not None:
        through = urlsplit(proxy)
        host, port = through.hostname or "", through.port
    if parts.scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=_TIMEOUT)
    secure = http.client.HTTPSConnection(host, port, timeout=_TIMEOUT, context=_trust())
    if proxy is not None:
        login = urlsplit(proxy).netloc.rpartition("@")[0]
        secure.set_tunnel(parts.hostname or "", parts.port, {"Proxy-Authorization": basic(login)} if login else None)
    return secure


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
    text = f"{parts.scheme}://{parts.netloc}{text}" if whole else text
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
        return CheckpointError(f"{shown(address)!r} is not the address of a server: {error}.")
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return PassingError(f"the server {host!r} does not answer ({text})")
