"""Checkpoints on a web server, and in stores of fsspec: every format, few requests, and servers that go wrong."""

from __future__ import annotations

import json
import pickle
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file, save_file
from tests.core.samples import write_samples
from tests.core.web_server import Handler, Request, WebServer, serving

from mmfsdp.checkpoint import convert, diff, open_layout, tensor_statistics, verify
from mmfsdp.checkpoint.remote import sessions
from mmfsdp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    FormatError,
    IncompleteCheckpointError,
)

SAMPLES = (
    "zip.pth",
    "legacy.pth",
    "plain.safetensors",
    "ours.safetensors",
    "ours.pth",
    "index",
    "local",
    "dcp",
    "torch_dcp",
    "dcp_safetensors",
    "bins",
    "safetensors_ranks",
    "stock",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    assert {*write_samples(folder)} == {*SAMPLES}
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layer.{i}.weight": torch.randn(512, 300, generator=generator) for i in range(20)}
    save_file(tensors, folder / "large.safetensors")
    torch.save({"state_dict": {**tensors, "turned": tensors["layer.3.weight"].t()}}, folder / "large.pth")
    convert(folder / "large.pth", folder / "large", to="dcp", ranks=3, fsync=False)
    return folder


@pytest.fixture
def web(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    monkeypatch.setattr(sessions, "_FIRST_PAUSE", 0.002)
    with serving(folder) as web:
        yield web


def large_requests(web: WebServer) -> list[Request]:
    """The requests for more than headers."""
    return [item for item in web.requests if item.begin is not None and item.end is not None and item.begin >= 1 << 18]


@pytest.mark.sample("dcp", "legacy.pth", "plain.safetensors", "ours.safetensors")
@pytest.mark.parametrize("name", SAMPLES)
def test_every_format_is_read_as_from_the_disk(name: str, web: WebServer, folder: Path, tmp_path: Path) -> None:
    options = {"reference": f"{web.url}/zip.pth"} if name == "stock" else {}
    there, here = open_layout(f"{web.url}/{name}", **options), open_layout(folder / name, **options)
    assert str(there.path) == f"{web.url}/{name}"
    assert {**there.describe(), "path": ""} == {**here.describe(), "path": ""}
    report = convert(there, tmp_path / "there.safetensors", fsync=False, verify_output=True)
    convert(here, tmp_path / "here.safetensors", fsync=False)
    assert report.verified
    assert (tmp_path / "there.safetensors").read_bytes() == (tmp_path / "here.safetensors").read_bytes()
    found, expected = (verify(path, **options) for path in (f"{web.url}/{name}", folder / name))
    assert found.ok
    assert (found.bytes, found.manifest, found.unchecked) == (expected.bytes, expected.manifest, expected.unchecked)
    assert diff(there, here).same


@pytest.mark.exhaustive
def test_what_other_frameworks_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their directories are found by the names in them, so the server must list these."""
    monkeypatch.setattr(sessions, "_FIRST_PAUSE", 0.002)
    golden, served = Path(__file__).parents[2], tmp_path / "served"
    with tarfile.open(golden / "deepspeed/0.19.8.tar.gz") as tar:
        # As the documentation of tarfile has it for Python before 3.11.4, which knows no filter.
        tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        tar.extractall(served / "deepspeed")
    folders = {
        "zero2": served / "deepspeed/zero2_2ranks_fp16_groups",
        "zero3": served / "deepspeed/zero3_2ranks_groups/global_step2",
        "dtensors": golden / "dtensors/2.15.0",
        "torch_checkpointing": golden / "torch_checkpointing/0.1.1/fsdp-2/step_7",
        "fairscale": golden / "fairscale/0.4.13/shards",
        "megatron": golden / "megatron/0.16.1/iter_0000007",
    }
    for name, folder in folders.items():
        (served / name).symlink_to(folder)
    with serving(served) as web:
        for name, folder in folders.items():
            there, here = open_layout(f"{web.url}/{name}"), open_layout(folder)
            assert {**there.describe(), "path": ""} == {**here.describe(), "path": ""}
            convert(there, tmp_path / f"{name}.pth", keep="all", fsync=False)
            convert(here, tmp_path / f"{name}_here.pth", keep="all", fsync=False)
            assert (tmp_path / f"{name}.pth").read_bytes() == (tmp_path / f"{name}_here.pth").read_bytes()
            assert verify(there).ok


@pytest.mark.parametrize("listing", [True, False])
@pytest.mark.parametrize("name", ["dcp", "local", "index", "bins"])
def test_directories_open_where_no_page_lists_them(name: str, listing: bool, web: WebServer) -> None:
    web.listing = listing
    assert open_layout(f"{web.url}/{name}/").world_size == (2 if name in ("dcp", "local") else 1)


def test_an_index_opens_by_its_own_url(web: WebServer) -> None:
    assert len(open_layout(f"{web.url}/index/model.safetensors.index.json").tensors) == 4


def test_a_header_is_one_request_and_each_byte_is_sent_once(web: WebServer, folder: Path, tmp_path: Path) -> None:
    layout = open_layout(f"{web.url}/large.safetensors")
    assert len(web.requests) == 1
    convert(layout, tmp_path / "out.safetensors", fsync=False)
    assert web.sent <= 1.1 * (folder / "large.safetensors").stat().st_size + (1 << 18)
    assert len(web.requests) <= 8
    found, expected = load_file(tmp_path / "out.safetensors"), load_file(folder / "large.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_only_what_is_kept_is_read(web: WebServer, tmp_path: Path) -> None:
    convert(f"{web.url}/large.safetensors", tmp_path / "o.safetensors", include=["layer.7.*"], fsync=False)
    assert web.sent <= 2 * 512 * 300 * 4 + (1 << 18)


@pytest.mark.parametrize("name", ["large.pth", "large"])
def test_headers_among_the_data_are_asked_for_together(name: str, web: WebServer, tmp_path: Path) -> None:
    lock, running, most = threading.Lock(), 0, 0

    def count(handler: Handler, request: Request) -> bool:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        handler.answer(request)
        with lock:
            running -= 1
        return True

    web.fault = count
    layout = open_layout(f"{web.url}/{name}")
    convert(layout, tmp_path / "out.pth", fsync=False)
    assert most >= 4
    assert load(tmp_path / "out.pth", "layer.0.weight").shape == (512, 300)


def load(path: Path, name: str) -> torch.Tensor:
    tensor = torch.load(path, weights_only=True)["state_dict"][name]
    assert isinstance(tensor, torch.Tensor)
    return tensor


def test_turned_cast_and_cut_tensors(web: WebServer, folder: Path, tmp_path: Path) -> None:
    turned = load(folder / "large.pth", "turned")
    convert(f"{web.url}/large.pth", tmp_path / "same.safetensors", fsync=False)
    assert torch.equal(load_file(tmp_path / "same.safetensors")["turned"], turned)
    convert(f"{web.url}/large.pth", tmp_path / "half.safetensors", dtype="bf16", fsync=False)
    assert torch.equal(load_file(tmp_path / "half.safetensors")["turned"], turned.bfloat16())
    convert(f"{web.url}/large.pth", tmp_path / "local", to="local", ranks=3, keep="all", fsync=False)
    assert diff(tmp_path / "local", folder / "large.pth").same


def test_statistics(web: WebServer, folder: Path) -> None:
    found, expected = (
        tensor_statistics(open_layout(place), "layer.2.weight")
        for place in (f"{web.url}/large.safetensors", folder / "large.safetensors")
    )
    assert found == expected


def test_paths_survive_pickling_and_pathlib(web: WebServer, folder: Path, tmp_path: Path) -> None:
    layout = pickle.loads(pickle.dumps(open_layout(Path(f"{web.url}/zip.pth"))))
    convert(layout, tmp_path / "out.safetensors", fsync=False)
    assert diff(tmp_path / "out.safetensors", folder / "zip.pth", keep="model").same


class TestBadServers:
    def test_what_passes_is_tried_again(self, web: WebServer, folder: Path, tmp_path: Path) -> None:
        seen: dict[object, int] = {}

        def stumble(handler: Handler, request: Request) -> bool:
            key = request.end  # of what is asked for again, the beginning moves
            seen[key] = seen.get(key, 0) + 1
            if seen[key] == 1:
                handler.reply(503, b"busy", {"Retry-After": "0"})
            elif seen[key] == 2:
                handler.answer(request, stop=1000)
            elif seen[key] == 3:
                handler.close_connection = True
            else:
                return False
            return True

        web.fault = stumble
        convert(f"{web.url}/large.safetensors", tmp_path / "out.safetensors", fsync=False)
        web.fault = lambda *_: False
        assert diff(tmp_path / "out.safetensors", folder / "large.safetensors").same

    @pytest.mark.parametrize(
        ("fault", "kind", "text"),
        [
            (lambda h, r: h.reply(500, b""), CheckpointError, "the server answers 500, in 5 attempts"),
            (lambda h, r: h.answer(r, stop=1000), CheckpointError, "bytes early, in 5 attempts"),
            (lambda h, r: h.reply(404, b""), CorruptCheckpointError, "changed while it was read"),
            (lambda h, r: h.reply(403, b""), CheckpointError, "does not let large.safetensors be read"),
            (lambda h, r: h.reply(418, b""), CheckpointError, "its server answers 418"),
            (lambda h, r: h.reply(200, b"x" * 300_000), FormatError, "ignores ranges"),
            (lambda h, r: h.answer(r, ETag='"other"'), CorruptCheckpointError, "changed while it was read"),
            (lambda h, r: h.answer(r, **{"Content-Range": "bytes 5-9/77"}), CorruptCheckpointError, "is broken"),
            (lambda h, r: h.answer(r, **{"Content-Range": ""}), CorruptCheckpointError, "is broken"),
            (lambda h, r: h.answer(r, **{"Content-Encoding": "gzip"}), FormatError, r"sends it compressed \(gzip\)"),
            (
                lambda h, r: h.answer(r, **{"Content-Range": f"bytes {r.begin}-{r.end - 1}/999999999"}),
                CorruptCheckpointError,
                "changed while it was read",
            ),
            (lambda h, r: h.reply(302, b"", {"Location": r.path}), CheckpointError, "redirects 10 times"),
            (lambda h, r: h.reply(302, b"", {"Location": "ftp://x/y"}), CheckpointError, "redirects to 'ftp://x/y'"),
        ],
    )
    def test_what_does_not_pass_ends_the_conversion(
        self, fault: object, kind: type[CheckpointError], text: str, web: WebServer, tmp_path: Path
    ) -> None:
        layout = open_layout(f"{web.url}/large.safetensors")
        web.fault = lambda handler, request: fault(handler, request) or True  # type: ignore[operator]
        with pytest.raises(kind, match=text) as caught:
            convert(layout, tmp_path / "out.safetensors", fsync=False)
        assert caught.value.context["file"] == f"{web.url}/large.safetensors"
        assert [*tmp_path.iterdir()] == []

    def test_a_server_that_sends_other_amounts_or_falls_silent(
        self, web: WebServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It may send less than it is asked for if it says so; what is too much is ignored."""
        monkeypatch.setenv("MMFSDP_REMOTE_TIMEOUT", "0.5")
        silent = iter([True])
        size = (folder / "large.safetensors").stat().st_size

        def deal(handler: Handler, request: Request) -> bool:
            if request.begin is None or request.begin < 1 << 20:
                return False
            if next(silent, False):
                time.sleep(1)
                handler.close_connection = True
            elif request.begin < 8 << 20:
                handler.answer(replace(request, end=min(request.end, request.begin + 300_000)))
            else:
                handler.answer(replace(request, end=size))
            return True

        web.fault = deal
        convert(f"{web.url}/large.safetensors", tmp_path / "out.safetensors", fsync=False)
        web.fault = lambda *_: False
        assert diff(tmp_path / "out.safetensors", folder / "large.safetensors").same

    @pytest.mark.exhaustive
    def test_a_server_that_never_sends_much(self, web: WebServer, folder: Path, tmp_path: Path) -> None:
        web.fault = lambda handler, request: (
            request.begin is not None and not handler.answer(replace(request, end=request.begin + 1000))
        )
        for name in ("plain.safetensors", "dcp"):
            convert(f"{web.url}/{name}", tmp_path / f"{name}.pth", fsync=False)
            assert diff(tmp_path / f"{name}.pth", folder / name, keep="model").same

    def test_a_server_that_ignores_ranges_sends_no_large_file(self, web: WebServer) -> None:
        web.fault = lambda handler, request: handler.answer(Request(request.path, None, None, {})) or True
        with pytest.raises(FormatError, match="Download the checkpoint first"):
            open_layout(f"{web.url}/large.safetensors")
        assert len(web.requests) == 1
        assert len(open_layout(f"{web.url}/plain.safetensors").tensors) == 4

    def test_redirects_are_followed_and_an_address_that_expires_is_asked_for_again(
        self, web: WebServer, folder: Path, tmp_path: Path
    ) -> None:
        signatures = 0

        def lead(handler: Handler, request: Request) -> bool:
            nonlocal signatures
            path, _, query = request.path.partition("?")
            if not query:
                signatures += 1
                handler.reply(302, b"", {"Location": f"{path}?sig={signatures}"})
            elif query == "sig=1" and request.begin:
                handler.reply(403, b"expired")
            else:
                return False
            return True

        web.fault = lead
        convert(f"{web.url}/large.safetensors", tmp_path / "out.safetensors", fsync=False)
        assert diff(tmp_path / "out.safetensors", folder / "large.safetensors").same

    def test_a_truncated_file_is_corrupt(self, web: WebServer, folder: Path) -> None:
        (folder / "short.safetensors").write_bytes((folder / "large.safetensors").read_bytes()[:-100])
        (folder / "short.pth").write_bytes((folder / "large.pth").read_bytes()[:-100])
        (folder / "none.pth").write_bytes(b"")
        for name, text in (("short.safetensors", "truncated"), ("short.pth", "truncated"), ("none.pth", "empty")):
            with pytest.raises(CorruptCheckpointError, match=text):
                open_layout(f"{web.url}/{name}")

    def test_names_that_leave_the_folder(self, web: WebServer, folder: Path) -> None:
        for name in ("../large.safetensors", "/etc/passwd", "http://elsewhere/x"):
            text = json.dumps({"weight_map": {"layer.0.weight": name}})
            (folder / "leaving.index.json").write_text(text)
            with pytest.raises((FormatError, IncompleteCheckpointError)):
                open_layout(f"{web.url}/leaving.index.json")
        assert all(request.path.startswith("/leaving") for request in web.requests[:1])
        assert not any("passwd" in request.path or ".." in request.path for request in web.requests)

    def test_missing(self, web: WebServer) -> None:
        with pytest.raises(CheckpointNotFoundError, match="There is no checkpoint at"):
            open_layout(f"{web.url}/nothing.pth")
        web.fault = lambda handler, request: handler.reply(401, b"") or True
        with pytest.raises(CheckpointError, match="answers 401") as caught:
            open_layout(f"{web.url}/zip.pth")
        assert "https://user:password@host" in caught.value.message

    def test_no_server(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sessions, "_FIRST_PAUSE", 0.002)
        with pytest.raises(CheckpointError, match=r"does not answer \(Connection refused\), in 5 attempts"):
            open_layout("http://127.0.0.1:9/x.pth")

    @pytest.mark.parametrize("url", ["http://", "https:///x.pth", "http://ho st/x.pth"])
    def test_malformed(self, url: str) -> None:
        with pytest.raises(ConfigError, match="is not a URL"):
            open_layout(url)


@pytest.mark.sample("True")
@pytest.mark.parametrize("listing", [True, False])
def test_hugging_face_folders_with_what_lies_beside_the_weights(listing: bool, tmp_path: Path) -> None:
    (served := tmp_path / "served").mkdir()
    save_file({"fc.weight": torch.ones(4, 6), "norm.weight": torch.ones(4)}, served / "model.safetensors")
    (served / "config.json").write_text('{"model_type": "llama"}')
    (served / "tokenizer.json").write_text("{}")
    (served / "vocab.txt").write_bytes(bytes(range(256)))
    convert(served, tmp_path / "here", to="hf", quantize="fp8", fsync=False)
    with serving(tmp_path) as web:
        web.listing = listing
        url = f"{web.url}/served?token=hush"
        report = convert(url, tmp_path / "there", to="hf", quantize="fp8", fsync=False)
        assert "hush" not in repr(report)
        convert(served / "model.safetensors", tmp_path / "like", to="hf", quantize="fp8", like=url, fsync=False)
        with pytest.raises(ConfigError, match=r"/nothing', which holds no config\.json"):
            convert(served, tmp_path / "out", to="hf", like=f"{web.url}/nothing")
    for name in ("there", "like"):
        assert sorted(file.name for file in (tmp_path / name).iterdir()) == [
            *("config.json", "manifest.json", "model.safetensors", "tokenizer.json", "vocab.txt")
        ]
        for file in (tmp_path / name).iterdir():
            if file.name != "manifest.json":  # which has an id of its own
                assert file.read_bytes() == (tmp_path / "here" / file.name).read_bytes()


class TestSecrets:
    def test_logins_and_signatures_are_sent_and_not_shown(self, web: WebServer, tmp_path: Path) -> None:
        host = web.url.removeprefix("http://")
        url = f"http://me:hush%40@{host}/index/model.safetensors.index.json?token=hush"
        layout = open_layout(url)
        convert(layout, tmp_path / "index", to="safetensors_index", fsync=False)
        assert all(request.path.endswith("?token=hush") for request in web.requests)
        assert {request.headers["Authorization"] for request in web.requests} == {"Basic bWU6aHVzaEA="}
        told = [str(layout.path), repr(layout), json.dumps(layout.describe()), repr(verify(url)), repr(diff(url, url))]
        told += [file.read_text("latin-1") for file in (tmp_path / "index").iterdir()]
        web.fault = lambda handler, request: handler.reply(500, b"") or True
        for given in (url, f"http://me:hush@{host}/x.pth?token=hush"):
            with pytest.raises(CheckpointError) as caught:
                open_layout(given)
            told += [str(caught.value), repr(caught.value.__cause__)]
        assert not [text for text in told if "hush" in text]

    def test_a_login_is_for_its_server_only(self, web: WebServer, folder: Path) -> None:
        with serving(folder) as other:
            web.fault = lambda handler, request: (
                handler.reply(307, b"", {"Location": f"{other.url}{request.path}"}) or True
            )
            open_layout(f"http://me:hush@{web.url.removeprefix('http://')}/zip.pth")
            assert "Authorization" in web.requests[0].headers
            assert [request for request in other.requests if "Authorization" in request.headers] == []
            assert other.requests


class TestStores:
    @pytest.fixture
    def store(self, folder: Path) -> Iterator[MemoryFileSystem]:
        store = fsspec.filesystem("memory")
        for name in ("zip.pth", "large.safetensors"):
            store.pipe(f"/bucket/{name}", (folder / name).read_bytes())
        for file in (folder / "dcp").iterdir():
            store.pipe(f"/bucket/dcp/{file.name}", file.read_bytes())
        yield store
        store.rm("/bucket", recursive=True)

    @pytest.mark.parametrize("name", ["zip.pth", "large.safetensors", "dcp"])
    def test_is_read_through_fsspec(self, name: str, store: MemoryFileSystem, folder: Path, tmp_path: Path) -> None:
        url = f"memory://bucket/{name}"
        convert(url, tmp_path / "out.safetensors", fsync=False)
        assert diff(tmp_path / "out.safetensors", folder / name, keep="model").same
        assert verify(url).ok
        with pytest.raises(CheckpointNotFoundError):
            open_layout("memory://bucket/nothing")

    def test_a_file_that_is_replaced_while_it_is_read(
        self, store: MemoryFileSystem, folder: Path, tmp_path: Path
    ) -> None:
        layout = open_layout("memory://bucket/large.safetensors")
        store.pipe("/bucket/large.safetensors", (folder / "large.safetensors").read_bytes())
        with pytest.raises(CorruptCheckpointError, match=r"large\.safetensors changed while it was read"):
            convert(layout, tmp_path / "out.safetensors", fsync=False)
        assert [*tmp_path.iterdir()] == []

    def test_a_driver_that_is_not_installed(self) -> None:
        fsspec.register_implementation("nodriver", "no_such_package.Store", clobber=True, errtxt="install no-such")
        with pytest.raises(ConfigError, match=r"nodriver:// needs a driver of fsspec.*install no-such"):
            open_layout("nodriver://bucket/x.pth")
        with pytest.raises(ConfigError, match="nonsense:// is not a scheme that can be read"):
            open_layout("nonsense://bucket/x.pth")
