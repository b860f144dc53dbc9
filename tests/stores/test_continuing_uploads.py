"""Uploads to S3 that were interrupted or killed go on: what S3 has of them is not sent again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from moto.s3.exceptions import S3ClientError
from moto.s3.models import S3Backend
from tests.stores.conftest import keys

from mmfsdp.checkpoint import TargetExistsError, convert, diff, verify
from mmfsdp.checkpoint.remote import s3_uploads
from mmfsdp.errors import CheckpointError

MB = 1 << 20
PART = 5 * MB  # the least that S3 takes


class Received:
    """What the server has received: how often each part of each file, by its number."""

    def __init__(self) -> None:
        self.parts: Counter[tuple[str, int]] = Counter()
        self.most = 0
        """How many parts the server takes before it is `full`; then it holds the next ones until it is `released`."""
        self.full, self.released = threading.Event(), threading.Event()

    @property
    def twice(self) -> list[tuple[str, int]]:
        return sorted(part for part, times in self.parts.items() if times > 1)


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[Received]:
    received, lock = Received(), threading.Lock()
    upload_part = S3Backend.upload_part

    def counting(backend: S3Backend, bucket_name: str, multipart_id: str, part_id: int, value: bytes) -> Any:
        key = backend.get_bucket(bucket_name).multiparts[multipart_id].key_name
        with lock:
            full = received.most and received.parts.total() >= received.most
            if not full:
                received.parts[key, part_id] += 1
        if full:
            received.full.set()
            received.released.wait()
            raise S3ClientError("AccessDenied", "the credentials have expired")  # nobody tries again
        return upload_part(backend, bucket_name, multipart_id, part_id, value)

    monkeypatch.setattr(S3Backend, "upload_part", counting)
    monkeypatch.setattr(s3_uploads, "_PART", PART)
    yield received
    received.released.set()


class StopError(Exception):
    pass


def stop_at(count: int) -> Any:
    def progress(done: int, _: int) -> None:
        if done >= count:
            raise StopError

    return progress


def uploads(client: Any) -> list[str]:
    return [item["Key"] for item in client.list_multipart_uploads(Bucket="bucket").get("Uploads", [])]


def content(client: Any) -> dict[str, bytes]:
    return {key: client.get_object(Bucket="bucket", Key=key)["Body"].read() for key in keys(client)}


KILLED = """
import json, sys
from mmfsdp.checkpoint import convert
from mmfsdp.checkpoint.remote import s3_uploads
s3_uploads._PART = 5 << 20
convert(sys.argv[1], sys.argv[2], resume=True, **json.loads(sys.argv[3]))
"""


@pytest.mark.parametrize(
    ("target", "settings"),
    [
        ("out.safetensors", {}),
        ("out.pth", {"dtype": "bf16"}),
        ("out", {"max_shard_size": 20 * MB}),
        ("local", {"to": "local", "ranks": 2}),
    ],
)
def test_after_a_kill_no_part_is_sent_again(
    target: str, settings: dict[str, Any], s3: Any, received: Received, folder: Path, tmp_path: Path
) -> None:
    source = str(folder / "large.safetensors")
    received.most = 4 if "dtype" in settings else 7  # of 6 and 11
    command = [sys.executable, "-c", KILLED, source, f"s3://bucket/{target}", json.dumps(settings)]
    with subprocess.Popen(command) as process:
        assert received.full.wait(120)
        process.send_signal(signal.SIGKILL)
    received.released.set()
    assert (len(uploads(s3)), received.parts.total()) == (1, received.most)
    received.most = 0
    convert(source, f"s3://bucket/{target}", resume=True, verify_output=True, **settings)
    assert received.twice == []
    assert uploads(s3) == []
    assert verify(f"s3://bucket/{target}").ok
    there = content(s3)
    convert(source, tmp_path / target, resume=True, fsync=False, **settings)  # the same id of the save
    local = [tmp_path / target] if (tmp_path / target).is_file() else [*(tmp_path / target).iterdir()]
    assert there == {str(path.relative_to(tmp_path)): path.read_bytes() for path in local}


def test_an_error_of_the_server_loses_nothing(s3: Any, received: Received, folder: Path) -> None:
    received.most = 5
    received.released.set()
    with pytest.raises(CheckpointError, match="the credentials have expired"):
        convert(folder / "large.safetensors", "s3://bucket/out.safetensors", resume=True)
    assert keys(s3) == []
    received.most = 0
    convert(folder / "large.safetensors", "s3://bucket/out.safetensors", resume=True)
    assert received.twice == []
    assert diff("s3://bucket/out.safetensors", folder / "large.safetensors").same


def test_other_settings_or_another_source_replace_what_differs(s3: Any, received: Received, folder: Path) -> None:
    target = "s3://bucket/out.safetensors"
    for settings in ({}, {"dtype": "bf16"}):  # the second has fewer parts, and all of them differ
        with pytest.raises(StopError):
            convert(folder / "large.safetensors", target, resume=True, progress=stop_at(24 * MB), **settings)
    convert(folder / "large.safetensors", target, resume=True, dtype="fp16", verify_output=True)
    assert uploads(s3) == []


def test_several_unfinished_uploads_are_given_up_but_the_longest(s3: Any, received: Received, folder: Path) -> None:
    target = "out.safetensors"
    with pytest.raises(StopError):
        convert(folder / "large.safetensors", f"s3://bucket/{target}", resume=True, progress=stop_at(40 * MB))
    sent = received.parts.total()
    s3.create_multipart_upload(Bucket="bucket", Key=target)
    s3.create_multipart_upload(Bucket="bucket", Key=f"{target}.of_another")
    convert(folder / "large.safetensors", f"s3://bucket/{target}", resume=True)
    assert (received.twice, sent >= 4) == ([], True)
    assert uploads(s3) == [f"{target}.of_another"]


def test_a_folder_that_is_not_what_was_left(s3: Any, received: Received, folder: Path) -> None:
    source, settings = folder / "large.safetensors", {"max_shard_size": 20 * MB, "resume": True}
    s3.put_object(Bucket="bucket", Key="out/notes.txt", Body=b"mine")
    with pytest.raises(TargetExistsError, match="remove it first"):
        convert(source, "s3://bucket/out", **settings)
    convert(source, "s3://bucket/new", **settings)
    with pytest.raises(TargetExistsError, match="remove it first"):  # it has its manifest, so it is complete
        convert(source, "s3://bucket/new", **settings)
    s3.delete_object(Bucket="bucket", Key="new/manifest.json")
    [first, *_] = [key for key in keys(s3) if key.startswith("new/") and key.endswith(".safetensors")]
    s3.put_object(Bucket="bucket", Key=first, Body=b"x" * s3.head_object(Bucket="bucket", Key=first)["ContentLength"])
    convert(source, "s3://bucket/new", **settings)
    assert verify("s3://bucket/new").ok
    assert {key for key, _ in received.twice} == {first}
