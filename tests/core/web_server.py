"""A web server on the loopback interface for tests: ranges, latency, a limited rate, and answers that go wrong."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["Handler", "Request", "WebServer", "serving"]

_BLOCK = 1 << 16


@dataclass(frozen=True)
class Request:
    """What a client asked for."""

    path: str
    begin: int | None
    end: int | None
    headers: dict[str, str]


Fault = Callable[["Handler", Request], bool]


@dataclass
class WebServer:
    """A running server. What tests change of it counts from the next request on."""

    directory: Path
    url: str = ""
    latency: float = 0.0
    """Seconds before each answer."""
    rate: float = 0.0
    """Bytes per second, for all connections together; 0 for no limit."""
    listing: bool = True
    """Whether it lists directories; names that begin with a dot are never listed."""
    fault: Fault = lambda handler, request: False
    """Called with each request; answers it in another way and returns true, or returns false."""
    requests: list[Request] = field(default_factory=list)
    sent: int = 0
    """Bytes of bodies."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _free_at: float = 0.0

    def pay(self, count: int) -> None:
        """Wait until the link has sent some bytes."""
        with self._lock:
            self.sent += count
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + (count / self.rate if self.rate else 0.0)
            wait = self._free_at - now
        if wait > 0.002:
            time.sleep(wait)


class Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    web: WebServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        begin, end = (int(match[1]), int(match[2]) + 1) if match else (None, None)
        request = Request(self.path, begin, end, dict(self.headers))
        self.web.requests.append(request)
        time.sleep(self.web.latency)
        if not self.web.fault(self, request):
            self.answer(request)

    def answer(self, request: Request, *, stop: int | None = None, **changes: object) -> None:
        """Answer as a good server does, apart from changes of headers; with ``stop``, break off after those bytes."""
        file = self.web.directory / unquote(urlsplit(request.path).path).lstrip("/")
        if file.is_dir():
            self._answer_directory(file, request)
            return
        if not file.is_file():
            self.reply(404, b"no such file")
            return
        size = file.stat().st_size
        headers = {"ETag": f'"{file.stat().st_mtime_ns:x}-{size:x}"'}
        status, begin, end = 200, 0, size
        if request.begin is not None and request.end is not None:
            begin, end = request.begin, min(request.end, size)
            if begin >= size:
                self.reply(416, b"", {**headers, "Content-Range": f"bytes */{size}"})
                return
            status = 206
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        with file.open("rb") as opened:
            opened.seek(begin)
            body = opened.read(end - begin)
        self.reply(status, body, {**headers, **{name: str(text) for name, text in changes.items()}}, stop)

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None, stop: int | None = None) -> None:
        """Send an answer; with ``stop``, break the connection after that many bytes."""
        self.send_response(status)
        for name, text in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        view = memoryview(body)[: len(body) if stop is None else stop]
        while view:
            part, view = view[:_BLOCK], view[_BLOCK:]
            self.web.pay(len(part))
            self.wfile.write(part)
        if stop is not None:
            self.close_connection = True

    def _answer_directory(self, directory: Path, request: Request) -> None:
        parts = urlsplit(request.path)
        if not parts.path.endswith("/"):
            self.reply(301, b"", {"Location": parts._replace(path=f"{parts.path}/").geturl()})
        elif not self.web.listing:
            self.reply(403, b"no listing")
        else:
            names = sorted(entry.name for entry in directory.iterdir() if not entry.name.startswith("."))
            links = "".join(f'<a href="{name}">{name}</a>\n' for name in names)
            page = f'<html><a href="../">up</a><a href="?sort=size">size</a>{links}</html>'
            self.reply(200, page.encode(), {"Content-Type": "text/html; charset=utf-8"})


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients may go while they are answered


@contextmanager
def serving(directory: Path) -> Iterator[WebServer]:
    """Serve a directory while the block runs."""
    web = WebServer(directory)
    handler = type("Handler", (Handler,), {"web": web})
    server = _Server(("127.0.0.1", 0), handler)
    web.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield web
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
