"""Checkpoints in S3, read and written through s3fs, against a server of moto on this machine: `nox -s stores`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import s3fs
import torch
from safetensors.torch import load_file, save_file
from tests.stores.conftest import keys

from mmfsdp.checkpoint import (
    TargetExistsError,
    apply_delta,
    average_checkpoints,
    checkpoint_delta,
    convert,
    diff,
    open_layout,
    verify,
)
from mmfsdp.checkpoint.remote.upload_parts import UploadParts
from mmfsdp.errors import CheckpointError, CheckpointNotFoundError, ConfigError, CorruptCheckpointError

MB = 1 << 20


def put(client: Any, folder: Path, name: str) -> str:
    for file in [folder / name] if (folder / name).is_file() else (folder / name).iterdir():
        client.upload_file(str(file), "bucket", str(file.relative_to(folder)))
    return f"s3://bucket/{name}"


@pytest.mark.parametrize("name", ["zip.pth", "legacy.pth", "ours.safetensors", "index", "local", "dcp", "torch_dcp"])
def test_reads(name: str, s3: Any, folder: Path, tmp_path: Path) -> None:
    url = put(s3, folder, name)
    layout = open_layout(url)
    assert {**layout.describe(), "path": ""} == {**open_layout(folder / name).describe(), "path": ""}
    convert(layout, tmp_path / "out.safetensors", fsync=False)
    assert diff(tmp_path / "out.safetensors", folder / name, keep="model").same
    assert verify(url).ok


def test_says_what_is_missing(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"There is no checkpoint at 's3://bucket/nothing\.pth'"):
        open_layout("s3://bucket/nothing.pth")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(CheckpointError, match=r"does not let nothing\.pth be read.*the credentials"):
        open_layout("s3://bucket/nothing.pth")


@pytest.mark.parametrize("source", ["large.safetensors", "large"])
def test_a_file_is_sent_in_parts(source: str, s3: Any, folder: Path, tmp_path: Path) -> None:
    report = convert(folder / source, "s3://bucket/out.safetensors", verify_output=True)
    assert (report.path, report.verified) == ("s3://bucket/out.safetensors", True)
    s3.download_file("bucket", "out.safetensors", str(tmp_path / "there.safetensors"))
    convert(folder / source, tmp_path / "here.safetensors", fsync=False)
    assert (tmp_path / "there.safetensors").read_bytes() == (tmp_path / "here.safetensors").read_bytes()
    tag = s3.head_object(Bucket="bucket", Key="out.safetensors")["ETag"]
    assert tag.strip('"').endswith("-4"), "50 MB are four parts of 16 MB"


@pytest.mark.parametrize("settings", [{"to": "pth"}, {"to": "dcp", "ranks": 3}, {"to": "local", "ranks": 2}])
def test_every_format_is_sent_in_parts(settings: dict[str, Any], s3: Any, folder: Path, tmp_path: Path) -> None:
    """The checksums in front of each tensor follow it; what is held until then are single parts."""
    held: list[int] = []
    flush = UploadParts._flush

    def noted(upload: UploadParts) -> None:
        flush(upload)
        held.append(len(upload._held))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UploadParts, "_flush", noted)
        convert(folder / "large.safetensors", "s3://bucket/out", **settings, verify_output=True)
    assert len(held) > 4
    assert max(held) <= 2, "where the tensor begins and where it ends"
    assert verify("s3://bucket/out").ok
    for key in keys(s3):
        (tmp_path / key).parent.mkdir(exist_ok=True, parents=True)
        s3.download_file("bucket", key, str(tmp_path / key))
    assert verify(tmp_path / "out").ok
    assert diff(tmp_path / "out", folder / "large.safetensors", keep="model").same
    if settings["to"] == "pth":
        convert(folder / "large.safetensors", tmp_path / "here.pth", fsync=False)
        assert (tmp_path / "out").read_bytes() == (tmp_path / "here.pth").read_bytes()


def test_everything_else_is_sent(s3: Any, folder: Path, tmp_path: Path) -> None:
    """Optimizer, numbers and text beside the weights, empty tensors and tensors of one element."""
    for name, out, settings in (
        ("zip.pth", "a.pth", {}),
        ("local", "b", {"to": "dcp"}),
        ("torch_dcp", "c", {"to": "local"}),
    ):
        convert(folder / name, f"s3://bucket/{out}", keep="all", overwrite=True, **settings)
        convert(folder / name, tmp_path / out, keep="all", fsync=False, **settings)
        assert verify(f"s3://bucket/{out}").ok
        assert diff(f"s3://bucket/{out}", tmp_path / out).same


def test_a_quantised_folder_says_so(s3: Any, tmp_path: Path) -> None:
    (tmp_path / "like").mkdir()
    save_file({"fc.weight": torch.ones(4, 4)}, tmp_path / "like/model.safetensors", metadata={"format": "pt"})
    (tmp_path / "like/config.json").write_text('{"model_type": "llama"}')
    convert(tmp_path / "like", "s3://bucket/fp8", to="hf", quantize="fp8_tensor")
    s3.download_file("bucket", "fp8/config.json", str(tmp_path / "config.json"))
    assert "compressed-tensors" in (tmp_path / "config.json").read_text()
    convert("s3://bucket/fp8", tmp_path / "back", to="hf", like=tmp_path / "like", quantize="none")
    assert load_file(tmp_path / "back/model.safetensors")["fc.weight"].eq(1).all()


def test_from_s3_to_s3_with_a_cast(s3: Any, folder: Path, tmp_path: Path) -> None:
    convert(put(s3, folder, "large"), "s3://bucket/half.safetensors", dtype="bf16")
    s3.download_file("bucket", "half.safetensors", str(tmp_path / "half.safetensors"))
    found, expected = load_file(tmp_path / "half.safetensors"), load_file(folder / "large.safetensors")
    assert all(torch.equal(found[name], expected[name].bfloat16()) for name in expected)
    assert verify("s3://bucket/half.safetensors").ok


def test_a_folder_gets_its_index_and_its_manifest(s3: Any, folder: Path) -> None:
    convert(folder / "large.safetensors", "s3://bucket/run/out", max_shard_size=20 * MB)
    report = verify("s3://bucket/run/out")
    assert (report.ok, report.manifest, report.unchecked) == (True, True, ())
    assert diff("s3://bucket/run/out", folder / "large.safetensors").same
    times = {item["Key"]: item["LastModified"] for item in s3.list_objects_v2(Bucket="bucket")["Contents"]}
    manifest = times.pop("run/out/manifest.json")
    index = times.pop("run/out/model.safetensors.index.json")
    assert manifest >= index >= max(times.values())


class TestNothingHalfDone:
    def test_when_it_is_stopped(self, s3: Any, folder: Path) -> None:
        def stop(done: int, _: int) -> None:
            if done > 30 * MB:
                raise KeyboardInterrupt

        targets = (("out.safetensors", {}), ("out", {"max_shard_size": 20 * MB}), ("dcp", {"to": "dcp", "ranks": 2}))
        for target, settings in targets:
            with pytest.raises(KeyboardInterrupt):
                convert(folder / "large.safetensors", f"s3://bucket/{target}", progress=stop, **settings)
            assert keys(s3) == []
            assert s3.list_multipart_uploads(Bucket="bucket").get("Uploads", []) == []

    def test_when_the_source_is_damaged(self, s3: Any, folder: Path, tmp_path: Path) -> None:
        convert(folder / "large.safetensors", tmp_path / "damaged.safetensors", fsync=False)
        with (tmp_path / "damaged.safetensors").open("r+b") as file:
            file.seek(-5, 2)
            file.write(b"x")
        with pytest.raises(CorruptCheckpointError, match="is damaged"):
            convert(tmp_path / "damaged.safetensors", "s3://bucket/out.safetensors")
        assert keys(s3) == []
        assert s3.list_multipart_uploads(Bucket="bucket").get("Uploads", []) == []

    def test_when_nothing_may_be_removed(self, s3: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        call = s3fs.S3FileSystem.call_s3
        asked = []

        def refusing(store: Any, method: str, **arguments: Any) -> Any:
            if method in ("delete_object", "abort_multipart_upload"):
                asked.append(method)
                raise PermissionError("not allowed")
            return call(store, method, **arguments)

        def stop(done: int, _: int) -> None:
            if done > 45 * MB:
                raise error

        monkeypatch.setattr(s3fs.S3FileSystem, "call_s3", refusing)
        settings = {"max_shard_size": 20 * MB, "progress": stop}
        names = ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"]
        error: BaseException = CorruptCheckpointError("the cause", file="source")
        with pytest.raises(
            CorruptCheckpointError, match="the cause S3 did not remove what was written before"
        ) as caught:
            convert(folder / "large.safetensors", "s3://bucket/out", **settings)
        assert caught.value.context == {"file": "source"}
        for words in (
            "'the parts of model-00003-of-00003.safetensors'",
            "'model-00001-of-00003.safetensors', 'model-00",
        ):
            assert words in str(caught.value)
        assert asked == ["abort_multipart_upload", "delete_object"]  # once it does not answer, it is left alone
        assert keys(s3) == [f"out/{name}" for name in names]
        error = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt) as interrupted:
            convert(folder / "large.safetensors", "s3://bucket/out.safetensors", progress=stop)
        assert interrupted.value.__notes__ == [
            "S3 did not remove what was written before: 'its parts'. Remove it yourself."
        ]

    def test_a_dry_run_writes_nothing(self, s3: Any, folder: Path) -> None:
        assert convert(folder / "large.safetensors", "s3://bucket/out.safetensors", dry_run=True).dry_run
        assert keys(s3) == []


class TestRefused:
    def test_what_exists(self, s3: Any, folder: Path) -> None:
        source = folder / "ours.safetensors"
        convert(source, "s3://bucket/out.safetensors")
        with pytest.raises(TargetExistsError, match=r"exists already.*overwrite=True"):
            convert(source, "s3://bucket/out.safetensors")
        convert(folder / "large.safetensors", "s3://bucket/out.safetensors", overwrite=True)
        assert diff("s3://bucket/out.safetensors", folder / "large.safetensors").same
        convert(source, "s3://bucket/out", max_shard_size="1MB")
        with pytest.raises(TargetExistsError, match="remove it first"):
            convert(source, "s3://bucket/out", max_shard_size="1MB", overwrite=True)

    @pytest.mark.parametrize(
        ("target", "settings", "text"),
        [
            ("s3://bucket/out.safetensors", {"publish": True}, "publish: works only for targets on this machine"),
            ("https://host/out.safetensors", {}, "targets are paths on this machine, and s3://"),
        ],
    )
    def test_what_cannot_be_sent(self, target: str, settings: dict[str, Any], text: str, s3: Any, folder: Path) -> None:
        with pytest.raises(ConfigError, match=text):
            convert(folder / "large.safetensors", target, **settings)
        assert keys(s3) == []

    def test_the_source(self, s3: Any, folder: Path) -> None:
        for name, target in (
            ("torch_dcp", "torch_dcp/.metadata"),
            ("zip.pth", "zip.pth"),
            ("dcp", "dcp/manifest.json"),
        ):
            source, before = put(s3, folder, name), s3.get_object(Bucket="bucket", Key=target)["Body"].read()
            with pytest.raises(ConfigError, match=r"is part of the source\. Choose another path"):
                convert(source, f"s3://bucket/{target}", to="pth", overwrite=True)
            assert s3.get_object(Bucket="bucket", Key=target)["Body"].read() == before
        convert(source, f"{source}/out.pth", overwrite=True)

    def test_a_bucket_that_is_not_there(self, s3: Any, folder: Path) -> None:
        with pytest.raises(CheckpointError, match=r"out\.safetensors cannot be written: S3 says .*bucket") as caught:
            convert(folder / "large.safetensors", "s3://nobucket/out.safetensors")
        assert "hush" not in str(caught.value)


def test_arithmetic_is_sent_too(s3: Any, tmp_path: Path) -> None:
    paths = [tmp_path / f"{seed}.safetensors" for seed in range(2)]
    for seed, path in enumerate(paths):
        save_file({"w": torch.full((300, 5), 1.0 + seed)}, path)
    average_checkpoints(paths, "s3://bucket/mean.safetensors")
    average_checkpoints(paths, tmp_path / "mean.safetensors")
    assert diff("s3://bucket/mean.safetensors", tmp_path / "mean.safetensors").same
    checkpoint_delta(*paths, "s3://bucket/delta.safetensors")
    apply_delta(paths[0], "s3://bucket/delta.safetensors", "s3://bucket/again.safetensors")
    assert diff("s3://bucket/again.safetensors", paths[1]).same


def test_a_hugging_face_folder_from_bucket_to_bucket(s3: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    save_file({"fc.weight": torch.ones(4, 6)}, tmp_path / "in/model.safetensors")
    (tmp_path / "in/config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "in/tokenizer.json").write_text("{}")
    source = put(s3, tmp_path, "in")
    convert(source, "s3://bucket/out", to="hf", quantize="fp8")
    convert("s3://bucket/out", "s3://bucket/channel", to="hf", quantize="fp8_channel", like=source)
    convert(tmp_path / "in", tmp_path / "out", to="hf", quantize="fp8")
    convert(tmp_path / "out", tmp_path / "channel", to="hf", quantize="fp8_channel")
    for folder in ("out", "channel"):
        assert diff(f"s3://bucket/{folder}", tmp_path / folder).same
        for name in ("config.json", "tokenizer.json"):
            there = s3.get_object(Bucket="bucket", Key=f"{folder}/{name}")["Body"].read()
            assert there == (tmp_path / folder / name).read_bytes()
