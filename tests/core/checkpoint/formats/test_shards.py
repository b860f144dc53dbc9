"""Checkpoints in several files with an index, and per-rank safetensors files: read whole, or refused by name."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from mmfsdp.checkpoint import convert, open_layout, verify
from mmfsdp.errors import CorruptCheckpointError, FormatError, IncompleteCheckpointError
from mmfsdp.saving.reading.contents import read_checkpoint

SAFETENSORS, TORCH = "model.safetensors.index.json", "pytorch_model.bin.index.json"


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "a.weight": torch.randn(5, 3),
        "a.bias": torch.randn(5).to(torch.bfloat16),
        "b.weight": torch.randn(2, 5),
        "b.count": torch.tensor(3),
    }


def write_shards(directory: Path, kind: str) -> dict[str, torch.Tensor]:
    directory.mkdir()
    tensors = weights()
    names = list(tensors)
    weight_map = {}
    for number, part in enumerate((names[:2], names[2:]), start=1):
        held = {name: tensors[name] for name in part}
        stem = f"{number:05d}-of-00002"
        if kind == "safetensors":
            file = f"model-{stem}.safetensors"
            save_file(held, directory / file)
        else:
            file = f"pytorch_model-{stem}.bin"
            torch.save(held, directory / file, _use_new_zipfile_serialization=kind == "zip")
        weight_map.update(dict.fromkeys(part, file))
    index = SAFETENSORS if kind == "safetensors" else TORCH
    (directory / index).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return tensors


def change_index(directory: Path, index: str, **weight_map: Any) -> None:
    content = json.loads((directory / index).read_text())
    content["weight_map"].update({name.replace("__", "."): file for name, file in weight_map.items()})
    (directory / index).write_text(json.dumps(content))


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert {*found} == {*expected}
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("kind", ["safetensors", "zip", "legacy"])
def test_shards_with_an_index(tmp_path: Path, kind: str) -> None:
    tensors = write_shards(tmp_path / "in", kind)
    index = SAFETENSORS if kind == "safetensors" else TORCH
    for source in (tmp_path / "in", tmp_path / "in" / index):
        layout = open_layout(source)
        assert layout.format == ("safetensors_index" if kind == "safetensors" else "torch_index")
        assert list(layout.tensors) == list(tensors)
        convert(source, tmp_path / "out.safetensors", overwrite=True)
        assert_equal(load_file(tmp_path / "out.safetensors"), tensors)
        convert(source, tmp_path / "out.pth", overwrite=True)
        assert_equal(torch.load(tmp_path / "out.pth")["state_dict"], tensors)


def test_safetensors_are_preferred_where_both_are(tmp_path: Path) -> None:
    write_shards(tmp_path / "in", "safetensors")
    write_shards(tmp_path / "other", "zip")
    for file in (tmp_path / "other").iterdir():
        file.rename(tmp_path / "in" / file.name)
    assert open_layout(tmp_path / "in").format == "safetensors_index"
    (tmp_path / "in" / "ema.safetensors.index.json").write_text("{}")
    with pytest.raises(FormatError, match=r"in holds several checkpoints: ema\.safetensors\.index\.json, model"):
        open_layout(tmp_path / "in")


def test_a_single_file_in_a_directory(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert (open_layout(tmp_path).format, len(open_layout(tmp_path).tensors)) == ("huggingface", 4)
    save_file(weights(), tmp_path / "more.safetensors")
    assert open_layout(tmp_path).format == "huggingface"  # transformers loads that file alone
    (tmp_path / "config.json").unlink()
    with pytest.raises(FormatError, match=r"one of several safetensors files without an index"):
        open_layout(tmp_path)


@pytest.mark.parametrize("kind", ["safetensors", "zip"])
def test_loading_into_a_model(tmp_path: Path, kind: str) -> None:
    tensors = write_shards(tmp_path / "in", kind)
    assert {*read_checkpoint(tmp_path / "in")["state_dict"]} == {*tensors}


@pytest.mark.parametrize("kind", ["safetensors", "zip"])
def test_missing_and_misplaced_shards(tmp_path: Path, kind: str) -> None:
    directory = tmp_path / "in"
    write_shards(directory, kind)
    index = SAFETENSORS if kind == "safetensors" else TORCH
    one, two = sorted(file for file in directory.iterdir() if file.name != index)
    change_index(directory, index, c=two.name)
    with pytest.raises(IncompleteCheckpointError, match=f"{re.escape(two.name)} lacks tensor 'c'"):
        open_layout(directory)
    change_index(directory, index, c="gone.bin")
    with pytest.raises(IncompleteCheckpointError, match=r"gone\.bin, which holds tensor 'c' by .*, is missing"):
        open_layout(directory)
    content = json.loads((directory / index).read_text())
    del content["weight_map"]["c"], content["weight_map"]["b.count"]
    (directory / index).write_text(json.dumps(content))
    with pytest.raises(CorruptCheckpointError, match=f"{re.escape(two.name)} holds tensor 'b.count', which the index"):
        open_layout(directory)
    kept = one.read_bytes()
    one.write_bytes(b"")  # as a full disk leaves it
    with pytest.raises(CorruptCheckpointError, match=rf"{re.escape(one.name)} is (empty|truncated)"):
        open_layout(directory)
    one.write_bytes(kept)
    two.write_bytes(one.read_bytes())  # a shard of another save, or twice the same
    with pytest.raises(
        IncompleteCheckpointError, match=rf"{re.escape(two.name)} lacks tensor 'b\.weight', which the index expects"
    ):
        open_layout(directory)


@pytest.mark.parametrize("kind", ["safetensors", "zip", "legacy"])
@pytest.mark.parametrize("name", ["z", "a"])
def test_the_index_decides_where_files_hold_a_tensor_twice(
    tmp_path: Path, kind: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory, new = tmp_path / "in", torch.full((4, 5), 7.0)  # of another shape, too
    tensors = write_shards(directory, kind)
    if kind == "safetensors":
        save_file({"b.weight": new}, directory / f"{name}.safetensors")
    else:
        torch.save({"b.weight": new}, directory / f"{name}.bin", _use_new_zipfile_serialization=kind == "zip")
    file = f"{name}.{'safetensors' if kind == 'safetensors' else 'bin'}"
    index = SAFETENSORS if kind == "safetensors" else TORCH
    change_index(directory, index, b__weight=file)
    old = next(path.name for path in directory.iterdir() if "00002-of" in path.name)
    note = f"{old} also holds tensor 'b.weight', which the index maps to {file}: only what is there is read"
    if file < old:  # as test_transformers_reads_every_file_in_order shows
        note += f"; transformers would load the copy in {old}"
    for source in (directory, directory / index):
        report = convert(source, tmp_path / "out.safetensors", overwrite=True)
        assert note in report.notes
        assert_equal(load_file(tmp_path / "out.safetensors"), {**tensors, "b.weight": new})
    assert note in verify(directory).unchecked
    assert open_layout(directory).describe()["notes"] == [note]
    read_checkpoint(directory)
    assert f"Reading {str(directory)!r}: {note}." in caplog.text
    (directory / file).write_bytes((directory / old.replace("00002-of", "00001-of")).read_bytes())
    with pytest.raises(IncompleteCheckpointError, match=f"lacks tensor 'b.weight'.*; {re.escape(old)} holds it, so"):
        open_layout(directory)


@pytest.mark.parametrize("name", ["z", "a"])
def test_transformers_reads_every_file_in_order(tmp_path: Path, name: str) -> None:
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    LlamaForCausalLM(config).save_pretrained(tmp_path, max_shard_size="1kB")
    index = json.loads((tmp_path / SAFETENSORS).read_text())
    key = "model.norm.weight"
    stale = index["weight_map"][key]
    index["weight_map"][key] = f"{name}.safetensors"
    save_file({key: torch.full((8,), 7.0)}, tmp_path / f"{name}.safetensors", {"format": "pt"})
    (tmp_path / SAFETENSORS).write_text(json.dumps(index))
    found = LlamaForCausalLM.from_pretrained(tmp_path).state_dict()[key]
    [note] = open_layout(tmp_path).notes
    assert note.endswith(f"; transformers would load the copy in {stale}") is bool((found != 7).all())


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "", ".", "a/../../b", "a\0b"])
def test_names_that_lead_out_of_the_directory(tmp_path: Path, name: str) -> None:
    write_shards(tmp_path / "in", "safetensors")
    save_file(weights(), tmp_path / "secret.safetensors")
    change_index(tmp_path / "in", SAFETENSORS, a__weight=name)
    with pytest.raises(FormatError, match=r"which is not in its directory"):
        open_layout(tmp_path / "in")


def test_links_out_of_the_directory(tmp_path: Path) -> None:
    write_shards(tmp_path / "in", "safetensors")
    shard = tmp_path / "in" / "model-00001-of-00002.safetensors"
    shard.rename(tmp_path / "elsewhere.safetensors")
    shard.symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(FormatError, match=r"'model-00001-of-00002\.safetensors', which is a link out of its directory"):
        open_layout(tmp_path / "in")
    shard.unlink()
    shard.symlink_to(shard.name)
    with pytest.raises((FormatError, IncompleteCheckpointError), match=r"model-00001-of-00002\.safetensors"):
        open_layout(tmp_path / "in")


def test_snapshots_of_the_hugging_face_cache_are_links(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    (repository / "blobs").mkdir(parents=True)
    (repository / "snapshots").mkdir()
    tensors = write_shards(repository / "snapshots" / "rev", "safetensors")
    for number, file in enumerate(sorted((repository / "snapshots" / "rev").iterdir())):
        file.rename(repository / "blobs" / str(number))
        file.symlink_to(Path("..", "..", "blobs", str(number)))
    assert {*open_layout(repository / "snapshots" / "rev").tensors} == {*tensors}
    (repository / "snapshots").rename(repository / "elsewhere")
    with pytest.raises(FormatError, match="is a link out of its directory"):
        open_layout(repository / "elsewhere" / "rev")


@pytest.mark.parametrize("text", ['{"a": 1}', "{", '{"weight_map": {"a": 1}}', '{"weight_map": []}', "{" * 100_000])
def test_what_is_not_an_index(tmp_path: Path, text: str) -> None:
    (tmp_path / SAFETENSORS).write_text(text)
    for path in (tmp_path, tmp_path / SAFETENSORS):
        with pytest.raises((FormatError, CorruptCheckpointError), match=r"model\.safetensors\.index\.json"):
            open_layout(path)


def write_ranks(directory: Path, world_size: int = 3) -> dict[str, torch.Tensor]:
    """Write what HuggingFaceStorageWriter(save_distributed=True) writes."""
    directory.mkdir()
    tensors = {"w": torch.arange(14.0).reshape(7, 2), "v": torch.arange(12.0).reshape(2, 6), "s": torch.tensor(3)}
    for rank in range(world_size):
        rows, columns = tensors["w"][rank * 3 : rank * 3 + 3], tensors["v"][:, rank * 2 : rank * 2 + 2]
        held = {"w": rows.contiguous(), "v": columns.contiguous()}
        offsets = {"w": [min(rank * 3, 7), 0], "v": [0, rank * 2]}
        if rank == 0:
            held["s"], offsets["s"] = tensors["s"], []
        info = json.dumps({name: {"saved_offsets": value} for name, value in offsets.items()})
        file = directory / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        save_file(held, file, metadata={"DCP_SHARDING_INFO": info, "DCP_VERSION": "1.0", "format": "pt"})
    return tensors


def test_files_of_ranks(tmp_path: Path) -> None:
    tensors = write_ranks(tmp_path / "in")
    layout = open_layout(tmp_path / "in")
    assert (layout.format, layout.world_size) == ("safetensors_ranks", 3)
    convert(tmp_path / "in", tmp_path / "out.safetensors")
    assert_equal(load_file(tmp_path / "out.safetensors"), tensors)


def test_missing_files_of_ranks(tmp_path: Path) -> None:
    write_ranks(tmp_path / "in")
    (tmp_path / "in" / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"but no file of shard 00002"):
        open_layout(tmp_path / "in")
    (tmp_path / "in" / "shard-00001-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"but no file of shard 00001"):
        open_layout(tmp_path / "in")
    save_file(weights(), tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(IncompleteCheckpointError, match=r"one of 2 files, and no index\. It lacks 'model-00002-of"):
        open_layout(tmp_path)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ("{", "is damaged: JSONDecodeError"),
        ('{"w": {"saved_offsets": [-1, 0]}}', "offsets are not numbers"),
        ('{"w": {"saved_offsets": ["0", 0]}}', "offsets are not numbers"),
        ('{"w": {"saved_offsets": [0]}}', "does not say where in tensor 'w' its box begins"),
        ('{"v": {"saved_offsets": [0, 0]}}', "does not say where in tensor 'w' its box begins"),
        ("[]", "is damaged"),
    ],
)
def test_damaged_offsets(tmp_path: Path, info: str, message: str) -> None:
    write_ranks(tmp_path / "in")
    file = tmp_path / "in" / "shard-00002-model-00001-of-00001.safetensors"
    save_file({"w": torch.ones(3, 2)}, file, metadata={"DCP_SHARDING_INFO": info})
    with pytest.raises(CorruptCheckpointError, match=message):
        open_layout(tmp_path / "in")


def test_one_file_and_an_index_in_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    torch.save({"w": torch.arange(6.0), "v": torch.ones(9)}, tmp_path / "a.pth")
    convert(tmp_path / "a.pth", folder, to="safetensors_index", max_shard_size=30, fsync=False)
    (folder / "manifest.json").unlink()
    assert convert(folder, tmp_path / "out.pth", dry_run=True).notes == ()
    save_file({"w": torch.zeros(6), "v": torch.zeros(9)}, folder / "model.safetensors")
    for config, other in ((False, "model.safetensors"), (True, "model.safetensors.index.json")):
        if config:  # then it is a folder of Hugging Face's, whose libraries prefer the one file
            (folder / "config.json").write_text("{}")
        report = convert(folder, tmp_path / "out.pth", overwrite=True, fsync=False)
        assert report.notes == (f"not read: {other} of in, which may hold other weights than those that were read",)
        assert (torch.load(tmp_path / "out.pth")["state_dict"]["w"].sum() == 0) == config


def test_a_file_of_a_rank_twice(tmp_path: Path) -> None:
    write_ranks(tmp_path / "in")
    one, two, three = sorted((tmp_path / "in").iterdir())[:3]
    data = three.read_bytes()
    three.write_bytes(two.read_bytes())
    message = rf"{three.name} and {two.name} hold the same part of tensor .* part once: one is a copy of the other"
    with pytest.raises(CorruptCheckpointError, match=message):
        open_layout(tmp_path / "in")
    three.write_bytes(data)
    report = convert(tmp_path / "in", tmp_path / "out.pth", fsync=False)
    assert report.notes == ("read: files of 3 ranks of in; how many there were is not written anywhere",)
    three.unlink()
    report = convert(tmp_path / "in", tmp_path / "out.pth", fsync=False, dry_run=True, overwrite=True)
    assert report.notes[0].startswith("read: files of 2 ranks of in")
    two.unlink()
    report = convert(tmp_path / "in", tmp_path / "out.pth", fsync=False, dry_run=True, overwrite=True)
    assert report.notes[0].startswith("read: the file of one rank of in")
    assert one.exists()


def test_boxes_of_another_save(tmp_path: Path) -> None:
    write_ranks(tmp_path / "in")
    file = tmp_path / "in" / "shard-00003-model-00001-of-00001.safetensors"
    info = json.dumps({"w": {"saved_offsets": [5, 0]}})
    save_file({"w": torch.ones(2, 2)}, file, metadata={"DCP_SHARDING_INFO": info})
    with pytest.raises(CorruptCheckpointError, match=r"'w': the boxes in .* overlap"):
        convert(tmp_path / "in", tmp_path / "out.safetensors")
    save_file({"w": torch.ones(2, 2).half()}, file, metadata={"DCP_SHARDING_INFO": info})
    with pytest.raises(CorruptCheckpointError, match=r"Tensor 'w' is float32 of 2 dimensions in .* but float16"):
        open_layout(tmp_path / "in")
    info = json.dumps({"w": {"saved_offsets": [1 << 40, 0]}})
    save_file({"w": torch.ones(2, 2)}, file, metadata={"DCP_SHARDING_INFO": info})
    with pytest.raises(IncompleteCheckpointError, match=r"Tensor 'w' of shape \[1099511627778, 2\] is incomplete"):
        convert(tmp_path / "in", tmp_path / "out.safetensors")
    assert os.listdir(tmp_path) == ["in"]


def test_safetensors_that_overlap_or_leave_holes(tmp_path: Path) -> None:
    for begin in (0, 4, 12):
        header = {
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [begin, begin + 8]},
        }
        text = json.dumps(header).encode()
        (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(begin + 8))
        with pytest.raises(CorruptCheckpointError, match=r"Tensor 'b' of x\.safetensors begins at byte"):
            open_layout(tmp_path / "x.safetensors")


def test_a_file_of_one_rank_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    """Neither by its name, nor by what it says of its boxes."""
    write_ranks(tmp_path / "in", 2)
    first, second = sorted((tmp_path / "in").iterdir())
    second.rename(tmp_path / "renamed.safetensors")
    for file in (first, tmp_path / "renamed.safetensors"):
        with pytest.raises(FormatError, match=r"is one rank's part of a sharded checkpoint; open its directory"):
            convert(file, tmp_path / "out.safetensors")
    boxes = {"w": {"saved_offsets": [0, 0]}}  # of a whole tensor, as the same writer stores it without sharding
    save_file(
        {"w": torch.ones(2, 2)}, tmp_path / "whole.safetensors", metadata={"DCP_SHARDING_INFO": json.dumps(boxes)}
    )
    assert convert(tmp_path / "whole.safetensors", tmp_path / "out.safetensors").notes == ()


@pytest.mark.parametrize("kind", ["safetensors", "zip"])
def test_one_of_several_files_says_so(tmp_path: Path, kind: str) -> None:
    write_shards(tmp_path / "in", kind)
    file = next(path for path in (tmp_path / "in").iterdir() if "00001-of" in path.name)
    notes = convert(file, tmp_path / "out.safetensors").notes
    assert notes == (f"{file.name} is one of 2 files: give the directory or the index for all tensors",)
    assert convert(tmp_path / "in", tmp_path / "all.safetensors").notes == ()
