"""`local` checkpoints that FSDP1's ranks write under stock MMEngine, read offline to what torch itself gathers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.distributed.stock_local import by_name, save_local

from mmfsdp.checkpoint import convert, open_layout
from mmfsdp.errors import CorruptCheckpointError, FormatError, IncompleteCheckpointError
from mmfsdp.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # FSDP1 is deprecated


def write(directory: Path, world_size: int, kind: str, flat: bool, optimizer: str, keep: bool = True) -> Path:
    run_ranks(save_local, world_size, directory, kind, not flat, optimizer, keep)
    return directory / "local"


def same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict):
        return {*one} == {*two} and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


def assert_weights(source: Path, flat: bool, **options: Any) -> dict[str, Any]:
    """Compare every name; without a reference, files with flat parameters do not say which weights were tied."""
    directory = source.parent
    truth = torch.load(directory / "truth.pth")
    convert(source, directory / "out.pth", keep="all", overwrite=True, **options)
    convert(source, directory / "out.safetensors", overwrite=True, **options)
    found = torch.load(directory / "out.pth")
    expected = dict(truth["state_dict"])
    if flat and not options:
        del expected["head.weight"]
    assert {*found["state_dict"]} == {*expected}
    for name, tensor in expected.items():
        assert same(found["state_dict"][name], tensor), name
    assert same(load_file(directory / "out.safetensors"), expected)
    assert found["meta"] == {"epoch": 1, "iter": 2}
    return {"found": found, "truth": truth}


@pytest.mark.sample("2-plain-adamw-flat", "2-ignored-adamw-orig_params", "3-bf16-adamw-flat")
@pytest.mark.parametrize("flat", [False, True], ids=["orig_params", "flat"])
@pytest.mark.parametrize(
    ("world_size", "kind", "optimizer"),
    [(2, "plain", "adamw"), (3, "plain", "momentum"), (3, "bf16", "adamw"), (2, "ignored", "adamw")],
)
def test_with_optimizer_state_the_files_hold_everything(
    tmp_path: Path, world_size: int, kind: str, optimizer: str, flat: bool
) -> None:
    source = write(tmp_path, world_size, kind, flat, optimizer)
    layout = open_layout(source)
    assert (layout.format, layout.world_size) == ("mmengine_local", world_size)
    assert not any("flat_param" in name for name in layout.tensors)
    read = assert_weights(source, flat)
    assert same(by_name(read["found"])["optimizer"], read["truth"]["optimizer"])
    names = [name for name in read["truth"]["state_dict"] if not (flat and name == "head.weight")]
    assert [*read["found"]["state_dict"]] == names or flat


@pytest.mark.parametrize("flat", [False, True], ids=["orig_params", "flat"])
@pytest.mark.parametrize(
    ("world_size", "kind", "optimizer", "keep"),
    [(2, "plain", "sgd", True), (3, "plain", "adamw", False), (2, "frozen", "adamw", True)],
)
def test_without_optimizer_state_a_reference_is_needed(
    tmp_path: Path, world_size: int, kind: str, optimizer: str, keep: bool, flat: bool
) -> None:
    source = write(tmp_path, world_size, kind, flat, optimizer, keep)
    with pytest.raises(IncompleteCheckpointError, match=r"local does not say the shapes of '.*Give a complete"):
        open_layout(source)
    reference = tmp_path / "reference.pth"
    assert_weights(source, flat, reference=reference)
    assert len(open_layout(source, reference=open_layout(reference)).tensors) == len(
        open_layout(source, reference=str(reference)).tensors
    )


def test_a_reference_without_order(tmp_path: Path) -> None:
    """A safetensors file is sorted: with flat parameters and no optimizer the order has to come from elsewhere."""
    source = write(tmp_path, 2, "plain", True, "adamw", keep=False)
    weights = torch.load(tmp_path / "reference.pth")["state_dict"]
    del weights["head.weight"]
    save_file(weights, tmp_path / "reference.safetensors")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file(weights, folder / "model.safetensors")
    torch.save({name: weights[name] for name in sorted(weights)}, tmp_path / "sorted.pth")
    torch.save({name: weights[name] for name in reversed(weights)}, tmp_path / "reversed.pth")
    for name in ("reference.safetensors", "folder", "sorted.pth", "reversed.pth"):
        with pytest.raises(IncompleteCheckpointError, match=r"as a \.pth file, which keeps the model's order"):
            open_layout(source, reference=tmp_path / name)
    source = write(tmp_path, 2, "plain", False, "adamw", keep=False)
    weights["head.weight"] = weights["embed.weight"].clone()
    save_file(weights, tmp_path / "reference.safetensors")
    assert_weights(source, False, reference=tmp_path / "reference.safetensors")


def test_a_reference_of_another_model(tmp_path: Path) -> None:
    source = write(tmp_path, 2, "plain", False, "sgd")
    weights = torch.load(tmp_path / "reference.pth")["state_dict"]
    weights["stem.weight"] = torch.ones(4, 1, 3)
    torch.save(weights, tmp_path / "other.pth")
    message = r"'stem\.weight' has 15 elements in local \(expected 12, as its shape is \[4, 1, 3\]\)"
    with pytest.raises(CorruptCheckpointError, match=message):
        open_layout(source, reference=tmp_path / "other.pth")


@pytest.mark.parametrize("flat", [False, True], ids=["orig_params", "flat"])
def test_whole_weights_on_every_rank(tmp_path: Path, flat: bool) -> None:
    source = write(tmp_path, 2, "no_shard", flat, "adamw")
    assert_weights(source, flat, **({"reference": tmp_path / "reference.pth"} if flat else {}))


@pytest.mark.exhaustive
def test_damaged_and_mixed_directories(tmp_path: Path) -> None:
    source = write(tmp_path, 3, "plain", False, "adamw")
    files = [source / f"rank{rank}.pth" for rank in range(3)]
    data = [file.read_bytes() for file in files]

    def expect(error: type[Exception], message: str, **options: Any) -> None:
        with pytest.raises(error, match=message):
            convert(source, tmp_path / "out.pth", keep="all", **options)
        for file, content in zip(files, data, strict=True):
            file.write_bytes(content)

    files[2].unlink()
    expect(IncompleteCheckpointError, r"local was saved by 3 ranks, but rank2\.pth is missing")
    files[0].unlink()
    expect(IncompleteCheckpointError, r"rank0\.pth is missing")
    files[1].write_bytes(data[2])
    expect(CorruptCheckpointError, r"rank1\.pth holds the part of rank 2 of 3 of '.*' \(expected rank 1 of 3\)")
    (source / "rank3.pth").write_bytes(data[2])
    expect(CorruptCheckpointError, r"rank3\.pth holds the part of rank 2 of 3")
    (source / "rank3.pth").unlink()
    for changed, message in (
        ({"meta": {"epoch": 2, "iter": 2}}, r"rank1\.pth is of another save \(meta/epoch 2\) than rank0\.pth \(1\)"),
        ({"state_dict": {}}, r"The keys of 'state_dict' in rank1\.pth are not those in rank0\.pth"),
    ):
        content = run_ranks(changed_copy, 3, files[1], changed)[1]
        files[1].write_bytes(content)
        expect(CorruptCheckpointError, message)
    torch.save({"state_dict": {}, "mmfsdp": {}}, files[1])
    expect(FormatError, r"rank1\.pth is not a rank file of stock MMEngine, though others of its directory are")
    for name, entry in list(open_layout(source).tensors.items())[::5]:
        chunk = entry.chunks()[-1]
        flipped = bytearray(chunk.file.read_bytes())
        flipped[chunk.offset] ^= 1
        chunk.file.write_bytes(flipped)
        expect(CorruptCheckpointError, rf"The data of tensor '.*' in {chunk.file.name} is damaged")
        assert name in open_layout(source).tensors
    for length in range(0, len(data[1]), 1999):
        files[1].write_bytes(data[1][:length])
        expect(CorruptCheckpointError, r"rank1\.pth")
    with pytest.raises(FormatError, match=r"rank1\.pth is one rank's part of a sharded checkpoint; open its directory"):
        open_layout(files[1])


def changed_copy(rank: int, file: Path, change: dict[str, Any]) -> bytes:
    """A rank file with something replaced: unpickling sharded tensors takes the world that wrote them."""
    if rank != 1:
        return b""
    content = torch.load(file, weights_only=False)
    other = file.with_name("changed")
    torch.save({**content, **change}, other)
    data = other.read_bytes()
    other.unlink()
    return data
