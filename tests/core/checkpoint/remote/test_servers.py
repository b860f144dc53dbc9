"""What a client must not do for a server, whatever that answers: tell secrets, follow to http, or wait without end."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import save_file
from tests.core.web_server import Request, WebServer, serving

from mmfsdp.basics.masking import mask_secrets, mask_url
from mmfsdp.checkpoint import convert, diff, open_layout, verify
from mmfsdp.checkpoint.remote import pacing, sessions
from mmfsdp.errors import CheckpointError, ConfigError

SECRET = "hush"


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    monkeypatch.setattr(sessions, "_FIRST_PAUSE", 0.002)
    (served := tmp_path / "served").mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layer.{i}": torch.randn(512, 512, generator=generator) for i in range(8)}
    save_file(tensors, served / "model.safetensors")
    with serving(served) as web:
        yield web


def all_of(error: BaseException) -> str:
    """What a traceback shows, and the attributes of the error."""
    return "".join(traceback.format_exception(error)) + repr(getattr(error, "context", ""))


class TestRedirects:
    def lead_to(self, web: WebServer, address: Callable[[Request], str]) -> None:
        web.fault = lambda handler, request: handler.reply(307, b"", {"Location": address(request)}) or True

    def with_login(self, web: WebServer) -> str:
        return web.url.replace("http://", f"http://me:{SECRET}@") + "/model.safetensors"

    def test_a_login_is_for_one_port_only(self, web: WebServer, tmp_path: Path) -> None:
        with serving(tmp_path / "served") as other:
            self.lead_to(web, lambda request: f"{other.url}{request.path}")
            open_layout(self.with_login(web))
            assert other.requests
            assert not [request for request in other.requests if "Authorization" in request.headers]

    def test_a_login_is_not_sent_again_on_the_way_back(self, web: WebServer, tmp_path: Path) -> None:
        with serving(tmp_path / "served") as other:
            web.fault = lambda handler, request: (
                "back" not in request.path
                and (handler.reply(307, b"", {"Location": f"{other.url}{request.path}"}) or True)
            )
            self.lead_to(other, lambda request: f"{web.url}{request.path}?back")
            open_layout(self.with_login(web))
            assert [("Authorization" in request.headers) for request in web.requests] == [True, False]

    def test_a_login_is_kept_on_its_server(self, web: WebServer, tmp_path: Path) -> None:
        web.fault = lambda handler, request: (
            "?" not in request.path and (handler.reply(302, b"", {"Location": f"{request.path}?there"}) or True)
        )
        convert(self.with_login(web), tmp_path / "out.pth", fsync=False)
        assert all("Authorization" in request.headers for request in web.requests)
        assert sum("?" not in request.path for request in web.requests) == 1  # the place is remembered

    @pytest.mark.parametrize("location", ["http://host/x?token=hush", "http://me:hush@host/x", "//a:b:c/hush"])
    def test_malformed_and_downgraded_locations(
        self, location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with secure_server(tmp_path, location, monkeypatch) as url, pytest.raises(CheckpointError) as caught:
            open_layout(f"{url}/model.safetensors")
        expected = "redirects from https to http://host/x" if "host" in location else "redirects to"
        assert expected in caught.value.message
        assert SECRET not in all_of(caught.value).replace("location = ", "") or location.startswith("//a:b:c")


@contextmanager
def secure_server(folder: Path, location: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server with TLS that redirects to one place; its certificate is trusted."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    made += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(made, check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    from mmfsdp.checkpoint.remote import connections

    connections._trust.cache_clear()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    answer = f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()

    def talk(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secure:
            secure.recv(1 << 16)
            secure.sendall(answer)

    with raw_server(talk) as url:
        yield url.replace("http://127.0.0.1", "https://localhost")
    connections._trust.cache_clear()


@contextmanager
def raw_server(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that does what is given with each connection, until that or the client ends it."""

    def one(connection: socket.socket) -> None:
        try:
            with connection:
                talk(connection)
        except OSError:
            pass

    def accept() -> None:
        while True:
            try:
                threading.Thread(target=one, args=(server.accept()[0],), daemon=True).start()
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def dripping(before: bytes, drop: bytes) -> Callable[[socket.socket], None]:
    def talk(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(before)
        while True:
            connection.sendall(drop)
            time.sleep(0.02)

    return talk


HEAD = b"HTTP/1.1 206 Partial\r\nContent-Range: bytes 0-262143/900000000\r\nContent-Length: 262144\r\n\r\n"


class TestPatience:
    @pytest.mark.sample("body", "no_length")
    @pytest.mark.parametrize(
        ("before", "drop", "text"),
        [
            (HEAD, b"x", "its server sends less than 32 KiB within 0.3 s"),
            (b"", b"HTTP/1.1 100 Continue\r\n\r\n", "its server does not answer within 0.3 s"),
            (b"HTTP/1.1 100 Continue\r\n", b"A: b\r\n", "its server does not answer within 0.3 s"),
            (b"", b"H", "its server does not answer within 0.3 s"),
            (b"HTTP/1.1 200 OK\r\n", b"A", "its server does not answer within 0.3 s"),
            (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n", "ignores ranges"),
            (
                HEAD.replace(b"Content-Length: 262144", b"Transfer-Encoding: chunked"),
                b"1\r\nx\r\n",
                "its server sends less than 32 KiB within 0.3 s",
            ),
        ],
        ids=["body", "continue", "continue_headers", "status", "header", "no_length", "chunks"],
    )
    def test_a_server_that_drips(self, before: bytes, drop: bytes, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MMFSDP_REMOTE_TIMEOUT", "0.3")
        monkeypatch.setattr(sessions, "_FIRST_PAUSE", 0.002)
        began = time.monotonic()
        with raw_server(dripping(before, drop)) as url, pytest.raises(CheckpointError, match=text):
            open_layout(f"{url}/model.safetensors")
        assert time.monotonic() - began < 10

    def test_a_proxy_that_drips(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MMFSDP_REMOTE_TIMEOUT", "0.3")
        monkeypatch.setattr(sessions, "_FIRST_PAUSE", 0.002)
        began = time.monotonic()
        with raw_server(dripping(b"HTTP/1.1 200 OK\r\n", b"A: b\r\n")) as url:
            monkeypatch.setenv("https_proxy", url)
            monkeypatch.setenv("no_proxy", "")
            with pytest.raises(CheckpointError, match=r"does not answer within 0\.3 s|more than 100 headers"):
                open_layout("https://nowhere.invalid/model.safetensors")
        assert time.monotonic() - began < 10

    def test_ranges_of_a_byte(self, web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        layout = open_layout(f"{web.url}/model.safetensors")
        monkeypatch.setenv("MMFSDP_REMOTE_TIMEOUT", "0.3")
        web.fault = lambda handler, request: (
            not handler.answer(Request(request.path, request.begin, (request.begin or 0) + 1, request.headers))
        )
        began = time.monotonic()
        with pytest.raises(CheckpointError, match="sends less than 32 KiB within"):
            convert(layout, tmp_path / "out.pth", fsync=False)
        assert time.monotonic() - began < 20

    def test_a_slow_link_that_keeps_sending(
        self, web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MMFSDP_REMOTE_TIMEOUT", "1")
        web.rate = 6e6
        convert(f"{web.url}/model.safetensors", tmp_path / "out.pth", fsync=False)
        assert diff(tmp_path / "out.pth", tmp_path / "served/model.safetensors").same

    @pytest.mark.parametrize("method", ["__init__", "info", "cat_file", "ls"])
    def test_a_store_that_never_answers(self, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MMFSDP_REMOTE_TIMEOUT", "0.1")
        monkeypatch.setattr(sessions, "_FIRST_PAUSE", 0.002)
        monkeypatch.setattr(pacing, "_RATE", 1 << 30)
        fsspec.filesystem("memory").pipe("/bucket/silent/model.safetensors", bytes(64))
        ended = threading.Event()

        def wait(*args: object, **kwargs: object) -> None:
            ended.wait(60)

        def path_of(path: str) -> str:
            return MemoryFileSystem._strip_protocol(path.replace("silent://", "memory://"))  # type: ignore[no-any-return]

        own = {"protocol": "silent", "cachable": False, "_strip_protocol": staticmethod(path_of), method: wait}
        silent = type("Silent", (MemoryFileSystem,), own)
        fsspec.register_implementation("silent", silent, clobber=True)
        name = "model.safetensors" if method != "ls" else ""
        try:
            with pytest.raises(CheckpointError, match=r"its store does not answer within 0\.1 s"):
                open_layout(f"silent://bucket/silent/{name}")
        finally:
            ended.set()
            fsspec.filesystem("memory").rm("/bucket/silent", recursive=True)

    def test_a_time_out_of_the_driver_is_its_own(self) -> None:
        def fail() -> None:
            raise TimeoutError("the driver's own")

        with pytest.raises(TimeoutError, match="the driver's own"):
            pacing.call_within(fail)

    @pytest.mark.parametrize("given", ["0", "-1", "soon", "inf"])
    def test_a_wrong_setting(self, given: str, web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MMFSDP_REMOTE_TIMEOUT", given)
        with pytest.raises(ConfigError, match="MMFSDP_REMOTE_TIMEOUT is"):
            open_layout(f"{web.url}/model.safetensors")


class TestForkedProcesses:
    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
    @pytest.mark.parametrize("store", ["http", "memory"])
    def test_a_layout_is_read_in_a_child(self, store: str, web: WebServer, tmp_path: Path) -> None:
        url = f"{web.url}/model.safetensors"
        if store == "memory":
            url, data = "memory://bucket/forked.safetensors", (tmp_path / "served/model.safetensors").read_bytes()
            fsspec.filesystem("memory").pipe("/bucket/forked.safetensors", data)
        layout = open_layout(url)
        assert verify(layout).ok  # its threads and connections are there
        child = os.fork()
        if child == 0:
            code = 1
            try:
                convert(layout, tmp_path / "out.safetensors", fsync=False)
                code = 0
            finally:
                os._exit(code)
        assert exit_code(child) == 0
        assert diff(tmp_path / "out.safetensors", tmp_path / "served/model.safetensors").same
        assert verify(layout).ok  # and the parent goes on

    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
    def test_a_file_that_is_read_ahead(self, web: WebServer, tmp_path: Path) -> None:
        path = open_layout(f"{web.url}/model.safetensors").path
        expected = (tmp_path / "served/model.safetensors").read_bytes()
        with path.open("rb") as file:
            read = file.read(1 << 20) + file.read(1 << 20)  # from here on, requests are under way
            child = os.fork()
            if child == 0:
                os._exit(0 if read + file.read() == expected else 1)
            assert exit_code(child) == 0
            assert read + file.read() == expected


def exit_code(child: int) -> int:
    """Wait for a forked process; -1 if it hangs."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -1


class TestMasking:
    @pytest.mark.parametrize(
        ("url", "shown"),
        [
            ("https://me:hush@host/x.pth", "https://host/x.pth"),
            ("https://me:hu/sh@host/x.pth", "https://host/x.pth"),
            ("https://me:hu?sh@host/x.pth", "https://host/x.pth"),
            ("https://me:hu#sh@host/x.pth", "https://host/x.pth"),
            ("https://me:hu@sh@host/x.pth", "https://host/x.pth"),
            ("https://me:12/hush@host/x.pth", "https://host/x.pth"),
            ("https://hush@host/x.pth", "https://host/x.pth"),
            ("https://me:hush", "https://***"),
            ("https://me:hush/x.pth", "https://***/x.pth"),
            ("https:/me:hush@host/x.pth", "https:/host/x.pth"),
            ("https://ho st:hush@x/y", "https://x/y"),
            ("s3://AKIA:hu/sh+x@bucket/x.pth", "s3://bucket/x.pth"),
            ("https://host/x?X-Amz-Signature=hush&a=b", "https://host/x?..."),
            ("https://host/x#token=hush", "https://host/x?..."),
            ("https://host:8443/x.pth", "https://host:8443/x.pth"),
            ("https://[::1]:8443/x.pth", "https://[::1]:8443/x.pth"),
            ("https://host/pkg@1.2/x.pth", "https://host/pkg@1.2/x.pth"),
            ("hf://org/model@main/x.pth", "hf://org/model@main/x.pth"),
            ("abfs://container@account/x.pth", "abfs://container@account/x.pth"),
            ("runs/epoch_1.pth", "runs/epoch_1.pth"),
        ],
    )
    def test_urls(self, url: str, shown: str) -> None:
        assert mask_url(url) == shown

    @pytest.mark.parametrize(
        ("text", "shown"),
        [
            ("401 for https://me:hu/sh@host/x?sig=hush!", "401 for https://host/x?..."),
            ("GET 'https://host/x?a=hush' failed", "GET 'https://host/x?...' failed"),
            ("Authorization: Bearer hush.hush", "Authorization: Bearer ***"),
            ("{'Authorization': 'Basic hush=='}", "{'Authorization': 'Basic ***'}"),
            ("bearer hush-1 is over", "bearer *** is over"),
            ("X-Amz-Security-Token: hush/hush+1=", "X-Amz-Security-Token: ***"),
            ('{"token":"hush","a":1}', '{"token":"***","a":1}'),
            ("aws_secret_access_key=hush key", "aws_secret_access_key=*** key"),
            ("bucket/x.pth?X-Amz-Signature=hush", "bucket/x.pth?..."),
            ("Which one? Ask.", "Which one? Ask."),
            ("Unable to locate credentials", "Unable to locate credentials"),
        ],
    )
    def test_text(self, text: str, shown: str) -> None:
        assert mask_secrets(text) == shown

    def test_it_takes_linear_time(self) -> None:
        began = time.perf_counter()
        parts = (
            "a",
            "a:",
            "?=",
            ": ",
            "token ",
            "token=",
            "authorization:",
            "://",
            "?",
            "@",
            "=",
            "http://",
            "bearer ",
        )
        for part in parts:
            mask_secrets(part * (100_000 // len(part)))
        assert time.perf_counter() - began < 5

    @pytest.mark.parametrize(
        "url",
        [
            "https://me:hu sh@host/x.pth",
            "https://me:hu/sh@host/x.pth",
            "https://me:hush",
            "https://me:1/hush@host/x.pth",
            "https://me:pw@host/hush@host/x.pth",
            "https://me:hush@host:port/x",
            "https://me:hush@host:99999/x",
            "https://me:hush@/x?hush",
            "s3://AKIA:hu/sh@bucket/x.pth",
            "ftp2://me:hush@host/x",
        ],
    )
    def test_malformed_urls(self, url: str, tmp_path: Path) -> None:
        for call in (open_layout, verify, lambda path: convert(path, tmp_path / "out"), lambda path: diff(path, path)):
            with pytest.raises(ConfigError) as caught:
                call(url)
            assert not [part for part in ("hush", "hu/", "hu sh") if part in all_of(caught.value).replace(url, "")]
            assert repr(url) not in str(caught.value)
