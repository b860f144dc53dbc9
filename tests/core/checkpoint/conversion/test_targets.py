"""Odd targets of a conversion mean what they mean to the operating system, or are an error before any byte."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from tests.core.samples import write_samples

from mmfsdp import save_checkpoint, shard
from mmfsdp.checkpoint import convert, diff, open_layout, verify
from mmfsdp.errors import CheckpointError, CheckpointNotFoundError, ConfigError, FormatError, MmfsdpError
from mmfsdp.testing import single_rank


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.pth"
    torch.save({"state_dict": {"w": torch.arange(6.0)}, "optimizer": {"x": torch.ones(2)}}, path)
    return path


def test_a_pipe_is_not_replaced(source: Path) -> None:
    pipe = source.with_name("out.pth")
    os.mkfifo(pipe)
    for overwrite in (True, False):
        with pytest.raises(FormatError, match=r"out\.pth is a pipe, a device or a socket, and not a file"):
            convert(source, pipe, overwrite=overwrite)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert sorted(os.listdir(source.parent)) == ["in.pth", "out.pth"]


def test_the_source_by_another_name(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source.parent)
    before = source.read_bytes()
    with pytest.raises(CheckpointNotFoundError, match=r"the directory 'x/\.\.' does not exist"):
        convert(source, "x/../in.pth", overwrite=True)
    Path("link.pth").symlink_to("in.pth")
    Path("same").symlink_to(".")
    for name in ("./in.pth", "link.pth", "same/in.pth", "same/same/link.pth"):
        with pytest.raises(ConfigError, match=r"is part of the source\. Choose another path"):
            convert(source, name, overwrite=True)
    assert source.read_bytes() == before


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("torch_dcp", ".metadata"),
        ("dcp", "manifest.json"),
        ("index", "model.safetensors.index.json"),
        ("bins", "pytorch_model.bin.index.json"),
    ],
)
def test_metadata_of_the_source_is_part_of_it(tmp_path: Path, kind: str, name: str) -> None:
    path = write_samples(tmp_path)[kind]
    before = (path / name).read_bytes()
    with pytest.raises(ConfigError, match=r"is part of the source\. Choose another path"):
        convert(path, path / name, to="safetensors", overwrite=True, fsync=False)
    assert (path / name).read_bytes() == before


@pytest.mark.parametrize(
    "name", ["training_args.bin", "adapter_model.safetensors", "optimizer.bin", "faiss.index.json"]
)
@pytest.mark.parametrize("to", ["dcp", "hf", "safetensors_index"])
def test_what_is_no_part_of_a_checkpoint_is_not_replaced(source: Path, name: str, to: str) -> None:
    target = source.with_name("out")
    target.mkdir()
    (target / name).write_text("precious")
    settings = {}
    if to == "hf":
        (target / "config.json").write_text("{}")
        settings = {"like": target}
    with pytest.raises(CheckpointError, match=rf"is not replaced: it also holds '{name}', which is not part of a"):
        convert(source, target, to=to, overwrite=True, **settings)
    assert (target / name).read_text() == "precious"


@pytest.mark.parametrize("kind", ["sharded", "local", "full", "hf"])
def test_a_save_replaces_no_run(tmp_path: Path, kind: str) -> None:
    run, like = tmp_path / "run", tmp_path / "like"
    (run / "epoch_1").mkdir(parents=True)
    like.mkdir()
    (like / "config.json").write_text("{}")
    given = {"kind": kind, "overwrite": True, **({"like": like} if kind == "hf" else {})}
    with single_rank():
        model = shard(torch.nn.Linear(4, 4), {"wrap": {"kind": "none"}})
        with pytest.raises(MmfsdpError, match=r"is not replaced: it also holds .*'epoch_1'"):
            save_checkpoint(run, model, **given)
        (run / "epoch_1").rmdir()
        (run / "training_args.bin").touch()
        with pytest.raises(CheckpointError, match=r"is not replaced: it also holds 'training_args\.bin'"):
            save_checkpoint(run, model, **given)
        (run / "training_args.bin").unlink()
        assert os.listdir(run) == []
        for _ in range(2):  # what it wrote itself is replaced
            save_checkpoint(run, model, **given)
    assert len(open_layout(run).tensors) == 2


def test_an_empty_path(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_samples(tmp_path)["dcp"])
    for arguments in (("", source.with_name("out")), (source, "")):
        with pytest.raises(ConfigError, match=r"The path is empty.*write '\.'"):
            convert(*arguments, to="dcp", overwrite=True)
    convert(".", source.with_name("out.pth"))


def test_a_character_that_no_name_holds(source: Path) -> None:
    for name in ("out\0.pth", "out\0/out.pth"):
        with pytest.raises(ConfigError, match="it holds a NUL character"):
            convert(source, f"{source.parent}/{name}")
    assert os.listdir(source.parent) == ["in.pth"]


def test_a_file_in_place_of_a_directory(source: Path) -> None:
    with pytest.raises(ConfigError, match=r"in\.pth' is a file, and not a directory"):
        convert(source, source / "out.pth")


def test_a_link_before_two_dots(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a/b")
    monkeypatch.chdir(tmp_path)
    convert(source, "link/../out.pth", fsync=False)
    assert sorted(os.listdir("a")) == ["b", "out.pth"]
    assert not os.path.exists("out.pth")


@pytest.mark.parametrize("name", ["n" * 250 + ".pth", "é" * 125 + ".pth", "a b\nc😀.pth", "-.pth"])
def test_names(source: Path, name: str) -> None:
    target = source.with_name(name)
    for _ in range(2):
        convert(source, target, overwrite=True, keep="all", fsync=False)
    assert sorted(os.listdir(source.parent)) == sorted(["in.pth", name])
    assert diff(target, source).same


def test_a_name_that_is_too_long(source: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be written: File name too long\. Choose a shorter name"):
        convert(source, source.with_name("n" * 300 + ".pth"))


def test_nothing_to_convert(source: Path) -> None:
    torch.save({}, source)
    with pytest.raises(FormatError, match=r"in\.pth holds nothing: it has no weights"):
        convert(source, source.with_name("out.safetensors"))


def test_more_threads_than_work(source: Path) -> None:
    convert(source, source.with_name("out.pth"), keep="all", jobs=1_000_000, fsync=False)
    assert diff(source.with_name("out.pth"), source).same


def test_too_many_ranks(source: Path) -> None:
    with pytest.raises(ConfigError, match=r"Write a number from 1 to 65536"):
        convert(source, source.with_name("out"), to="dcp", ranks=1_000_000)


def test_errors_of_content_name_the_file(tmp_path: Path) -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    torch.save({"state_dict": {"w": torch.ones(1)}, "odd": cycle}, tmp_path / "in.pth")
    with pytest.raises(FormatError, match=r"What is at 'odd/0' holds itself") as caught:
        convert(tmp_path / "in.pth", tmp_path / "out.pth")
    assert caught.value.context == {"file": str(tmp_path / "in.pth")}
    with single_rank():
        model = shard(torch.nn.Linear(2, 2))
        for kind in ("full", "local"):
            with pytest.raises(FormatError, match=r"What is at 'odd/0' holds itself") as caught:
                save_checkpoint(tmp_path / "new", model, kind=kind, extra={"odd": cycle})
            assert str(caught.value.context["file"]).startswith(str(tmp_path / "new"))
    assert os.listdir(tmp_path) == ["in.pth"]


def test_a_home_directory_that_no_shell_put_in(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source.parent)
    monkeypatch.setenv("HOME", "/at/home")
    hint = r"'~' is a name here, as only a shell replaces it\. Write '/at/home/model'\."
    for given, target in (("~/model", "out.pth"), (source, "~/model")):
        with pytest.raises(CheckpointNotFoundError, match=hint):
            convert(given, target, to="pth")
    with pytest.raises(ConfigError, match=hint):
        convert(source, "out", to="hf", like="~/model")
    assert sorted(os.listdir()) == ["in.pth"]
    Path("~").mkdir()
    convert(source, "~/model", to="pth")
    assert diff("~/model", source, keep="model").same


@pytest.mark.parametrize("keep", ["model", "all"])
def test_what_a_bare_directory_lacks_is_reported(source: Path, keep: str) -> None:
    torch.save({"state_dict": {"w": torch.arange(6.0)}, "meta": {"epoch": 1}}, source)
    report = convert(source, source.with_name("dcp"), to="dcp", keep=keep)
    assert report.dropped == (("meta",) if keep == "model" else ())
    assert ("meta" in open_layout(source.with_name("dcp")).tree) == (keep == "all")


def test_a_part_without_tensors(tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.ones(2)}, "meta": {"epoch": 1}}, tmp_path / "in.pth")
    with pytest.raises(ConfigError, match=r"keep='meta' holds no tensor, and a safetensors file holds nothing else\."):
        convert(tmp_path / "in.pth", tmp_path / "out.safetensors", keep="meta")
    convert(tmp_path / "in.pth", tmp_path / "out.pth", keep="meta")
    assert torch.load(tmp_path / "out.pth", weights_only=True) == {"meta": {"epoch": 1}}


def test_a_file_in_a_dcp_directory_is_not_left_out_in_silence(source: Path) -> None:
    """Lightning puts everything but tensors there."""
    convert(source, folder := source.with_name("dcp"), to="dcp")
    assert convert(folder, source.with_name("before.pth"), keep="all").notes == ()
    torch.save({"epoch": 3}, folder / "meta.pt")
    report = convert(folder, source.with_name("after.pth"), keep="all")
    assert report.notes == ("not read, as no part of the DCP directory: 'meta.pt'; convert such a file by itself",)
    assert "what is no part of the DCP directory: 'meta.pt'" in verify(folder).unchecked
    assert verify(folder).ok
