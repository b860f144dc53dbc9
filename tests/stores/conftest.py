"""A server of moto on this machine with an empty bucket, and checkpoints to put there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import s3fs
import torch
from moto.server import ThreadedMotoServer
from safetensors.torch import save_file
from tests.core.samples import write_samples

from mmfsdp.checkpoint import convert


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    write_samples(folder)
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layer.{i:02}": torch.randn(512 * 1024 + i, generator=generator) for i in range(25)}
    save_file(tensors, folder / "large.safetensors")
    convert(folder / "large.safetensors", folder / "large", to="dcp", ranks=2, fsync=False)
    return folder


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, value in (
        ("AWS_ENDPOINT_URL", address),
        ("AWS_ACCESS_KEY_ID", "id"),
        ("AWS_SECRET_ACCESS_KEY", "hush"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    yield client
    for key in keys(client):
        client.delete_object(Bucket="bucket", Key=key)
    for upload in client.list_multipart_uploads(Bucket="bucket").get("Uploads", []):
        client.abort_multipart_upload(Bucket="bucket", Key=upload["Key"], UploadId=upload["UploadId"])


def keys(client: Any) -> list[str]:
    return [item["Key"] for item in client.list_objects_v2(Bucket="bucket").get("Contents", [])]
