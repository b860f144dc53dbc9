"""What a failed download or a lost file leaves in place of a checkpoint is named, wherever it is read."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.core.samples import write_samples
from tests.core.web_server import serving

from mmfsdp.checkpoint import convert, merge_lora, open_layout, verify
from mmfsdp.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    FormatError,
    IncompleteCheckpointError,
)

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%064d\nsize 4976698672\n" % 7
SAID = r"is a pointer of git-lfs and not the file itself: its 4\.63 GiB were not downloaded. Run `git lfs pull`"


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_samples(tmp_path_factory.mktemp("samples"))


def located(path: Path, *, look_up: bool) -> None:
    for entry in open_layout(path, look_up=look_up).tensors.values():
        entry.chunks()


def test_pointers_in_place_of_each_file(samples: dict[str, Path], tmp_path: Path) -> None:
    """Of every format, each file in turn; those that a manifest lists, too."""
    tried = 0
    for name, sample in samples.items():
        whole = [sample] if sample.is_file() else [path for path in sample.rglob("*") if path.is_file()]
        for number, file in enumerate(sorted(whole)[:4]):
            if file.name == "latest":  # of DeepSpeed: a text of its own
                continue
            copy = tmp_path / f"{name}-{number}" / sample.name
            copy.parent.mkdir()
            shutil.copy(sample, copy) if sample.is_file() else shutil.copytree(sample, copy)
            (copy / file.relative_to(sample)).write_bytes(POINTER)
            assert any("git lfs pull" in problem.message for problem in verify(copy).problems), file
            if file.name == "manifest.json":  # which only `verify` and whole reads look at
                continue
            needed = (True, False) if (name, file.name) != ("dcp", ".metadata") else (True,)
            for look_up in needed:
                with pytest.raises(CheckpointError, match=rf"{re.escape(file.name)} {SAID}"):
                    located(copy, look_up=look_up)
            tried += 1
    assert tried > len(samples)


def test_a_pointer_beside_weights(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / "tokenizer.json").write_bytes(POINTER)
    report = convert(tmp_path, tmp_path.with_name("out"), to="hf", fsync=False)
    note = f"'tokenizer.json' in {str(tmp_path)!r} is a pointer of git-lfs and copied as such: run `git lfs pull` there"
    assert note in report.notes
    (tmp_path / "config.json").write_bytes(POINTER)
    with pytest.raises(ConfigError, match=rf"config\.json {SAID}"):
        convert(tmp_path, tmp_path.with_name("again"), to="hf", fsync=False)
    (tmp_path / "adapter_model.safetensors").write_bytes(POINTER)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes(POINTER)
        with pytest.raises(IncompleteCheckpointError, match=rf"{name} {SAID}"):
            merge_lora(tmp_path, tmp_path, tmp_path.with_name("merged.safetensors"))
        (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))


@pytest.mark.parametrize(
    ("content", "error", "said"),
    [
        (
            b"<!DOCTYPE html><html><head><title>404</title></head></html>",
            FormatError,
            r"is a web page \('404'\), and not",
        ),
        (b"\xef\xbb\xbf \n<!-- x --><HTML lang='en'>", FormatError, "is a web page, and not a checkpoint"),
        (
            b"<?xml version='1.0'?><Error><Message>Access Denied</Message></Error>",
            FormatError,
            r"XML \('Access Denied'\)",
        ),
        (
            b'{"error":"Repository not found"}',
            FormatError,
            r"is a server's answer, '{\"error\":\"Repository not found\"}'",
        ),
        (b"Entry not found", FormatError, "is a short text, 'Entry not found', and not a checkpoint"),
        (bytes(4096), CorruptCheckpointError, "begins with zeros only"),
        (b"\x01\x02\x03\x04\x05\x06\x07\x08\x09", FormatError, "is not a checkpoint of a known format: it begins with"),
        (b"", CorruptCheckpointError, "is empty"),
    ],
)
@pytest.mark.parametrize("name", ["m.safetensors", "m.pth"])
def test_other_content(tmp_path: Path, name: str, content: bytes, error: type[Exception], said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=rf"{name} {said}" if said[0] == "i" else said):
        open_layout(tmp_path / name)


def test_a_text_of_its_own_is_no_answer(samples: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("global_step5")
    with pytest.raises(CheckpointError, match="global_step5") as caught:
        open_layout(tmp_path)
    assert "short text" not in str(caught.value)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_lost_index(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    parts = {number: {f"layer{number}.w": torch.full((2,), float(number))} for number in (1, 2, 3)}
    stem = "model" if kind == "safetensors" else "pytorch_model"
    files = {number: folder / f"{stem}-{number:05d}-of-00003.{kind}" for number in parts}

    def write(number: int, content: dict[str, torch.Tensor]) -> None:
        save_file(content, files[number]) if kind == "safetensors" else torch.save(content, files[number])

    for number, content in parts.items():
        write(number, content)
    report = convert(folder, tmp_path.joinpath("out.safetensors"), fsync=False)
    assert report.notes == ("in has no index: all 3 files that their names tell of were read together",)
    assert sorted(load_file(tmp_path.joinpath("out.safetensors"))) == sorted(
        name for part in parts.values() for name in part
    )
    write(2, parts[1])
    with pytest.raises(CorruptCheckpointError, match=r"both hold tensor 'layer1\.w', and there is no index"):
        open_layout(folder)
    files[2].unlink()
    said = r"It lacks 'model-00002-of-00003\.safetensors'\." if kind == "safetensors" else "no index .* and not all"
    with pytest.raises(CheckpointError, match=said):
        open_layout(folder)


def test_targets_named_like_something_else(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "in.safetensors")
    for target, to, said in (
        ("y.safetensors", "dcp", r"'dcp' writes a directory, and 'y\.safetensors' is named like a file"),
        ("y.pth", "local", r"Leave out '\.pth', or 'to'\."),
        ("y.bin", "local", r"Leave out '\.bin'\.$"),
        ("y.pth", "safetensors", r"'y\.pth' is named like a file of torch\.save, and 'safetensors' is not that"),
        ("-", None, "'-' does not stand for standard output"),
        ("-", "pth", "'-' does not stand for standard output"),
    ):
        with pytest.raises(ConfigError, match=said):
            convert(tmp_path / "in.safetensors", target if target == "-" else tmp_path / target, to=to)
    assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]
    convert(tmp_path / "in.safetensors", tmp_path / "y.v2", to="dcp", fsync=False)
    with pytest.raises(CheckpointError, match="Standard input is not read"):
        open_layout("-")


def test_a_page_of_a_server(tmp_path: Path) -> None:
    (tmp_path / "m.pth").write_bytes(b"<html><title>Sign in</title></html>")
    with serving(tmp_path) as web, pytest.raises(FormatError, match=r"m\.pth is a web page \('Sign in'\)"):
        open_layout(f"{web.url}/m.pth")
