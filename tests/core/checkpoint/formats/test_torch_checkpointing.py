"""Directories that torch_checkpointing wrote: read to what its own loader reads, or refused with what is wrong."""

from __future__ import annotations

import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.core.dtensors.make import Model
from tests.distributed.loading.test_reading_mmengine_local import same

import mmfsdp
from mmfsdp.checkpoint import convert, open_layout, verify
from mmfsdp.errors import CorruptCheckpointError, FormatError, IncompleteCheckpointError, MmfsdpError, UnsafePickleError
from mmfsdp.testing import single_rank

GOLDEN = Path(__file__).parents[2] / "torch_checkpointing" / "0.1.1"


@pytest.mark.parametrize(("name", "ranks"), [("fsdp-1", 1), ("fsdp-2", 2), ("tp-4", 4)])
def test_equals_what_its_own_loader_reads(tmp_path: Path, name: str, ranks: int) -> None:
    source = GOLDEN / name / "step_7"
    layout = open_layout(source)
    assert (layout.format, layout.world_size) == ("torch_checkpointing", ranks)
    assert verify(source).ok
    convert(source, tmp_path / "out.pth", keep="all", fsync=False)
    found, expected = torch.load(tmp_path / "out.pth"), torch.load(GOLDEN / name / "full.pth")
    assert same(found, expected)
    late = pickle.loads(pickle.dumps(open_layout(source, look_up=False)))  # as another rank gets it
    for path, entry in late.tensors.items():
        assert {*entry.chunks()} >= {*layout.tensors[path].chunks()}


def test_loads_into_a_sharded_model() -> None:
    with single_rank():
        model = mmfsdp.shard(Model().float(), {"wrap": {"kind": "none"}})
        mmfsdp.load_checkpoint(GOLDEN / "tp-4" / "step_7", model)
        found = mmfsdp.model_state_dict(model)
    for name, tensor in torch.load(GOLDEN / "tp-4" / "full.pth")["model"].items():
        assert torch.equal(found[name], tensor.to(found[name].dtype))


def test_without_metadata(tmp_path: Path) -> None:
    """The library writes none if no item can be resharded; DTensors still say where they lie."""
    source = tmp_path / "step_7"
    shutil.copytree(GOLDEN / "tp-4" / "step_7", source)
    (source / "metadata.pkl").unlink()
    convert(source, tmp_path / "out.pth", fsync=False)
    assert same(torch.load(tmp_path / "out.pth")["state_dict"], torch.load(GOLDEN / "tp-4" / "full.pth")["model"])
    (source / "model_2.pt").unlink()
    check(source, IncompleteCheckpointError, "Item 'model'", "saved by 4 ranks, but 'model_2.pt' is missing")
    (source / "model_3.pt").unlink()
    check(source, IncompleteCheckpointError, "sharded over 4 ranks, but model_2.pt, model_3.pt are missing")


def check(source: Path, kind: type[MmfsdpError], *words: str) -> None:
    with pytest.raises(kind) as caught:
        open_layout(source)
    for word in words:
        assert word in str(caught.value)


def missing(source: Path) -> None:
    (source / "optimizer_1.pt").unlink()


def left_over(source: Path) -> None:
    shutil.copy(source / "model_1.pt", source / "model_4.pt")


def of_another_rank(source: Path) -> None:
    shutil.copy(source / "model_1.pt", source / "model_0.pt")


def of_another_save(source: Path) -> None:
    shutil.copy(GOLDEN / "fsdp-2" / "step_7" / "model_1.pt", source / "model_1.pt")


def truncated(source: Path) -> None:
    data = (source / "model_1.pt").read_bytes()
    (source / "model_1.pt").write_bytes(data[: len(data) // 2])


def no_step_of_a_rank(source: Path) -> None:
    (source / "step_2.pt").unlink()


def of_another_step(source: Path) -> None:
    torch.save(9, source / "step_3.pt")


def optimizer_of_another_step(source: Path) -> None:
    # A step of Adam is stored as it is in the others, but for its value.
    path = source / "optimizer_2.pt"
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, np.float32(9).tobytes() if data == np.float32(1).tobytes() else data)


def without_that_of_the_first_rank(source: Path) -> None:
    for rank in (0, 2, 3):
        (source / f"rng_{rank}.pt").unlink()


@pytest.mark.parametrize(
    ("damage", "kind", "words"),
    [
        (missing, IncompleteCheckpointError, ["saved by 4 ranks, but 'optimizer_1.pt' is missing"]),
        (no_step_of_a_rank, IncompleteCheckpointError, ["saved by 4 ranks, but 'step_2.pt' is missing"]),
        (left_over, CorruptCheckpointError, ["model_4.pt is left over from another save", "Remove it"]),
        (of_another_rank, CorruptCheckpointError, ["model_0.pt was written by rank 1 of 4 (expected rank 0 of 4)"]),
        (of_another_save, CorruptCheckpointError, ["model_1.pt was written by rank 1 of 2", "of another save"]),
        (truncated, CorruptCheckpointError, ["model_1.pt"]),
        (of_another_step, CorruptCheckpointError, ["step_3.pt is of another save (step 9) than step_0.pt (7)"]),
        (
            optimizer_of_another_step,
            CorruptCheckpointError,
            ["optimizer_2.pt is of another save (state/0/step another) than optimizer_0.pt"],
        ),
        (
            without_that_of_the_first_rank,
            IncompleteCheckpointError,
            ["saved by 4 ranks, but 'rng_0.pt', 'rng_2.pt', 'rng_3.pt' are missing"],
        ),
    ],
)
def test_wrong_files(tmp_path: Path, damage: Callable[[Path], None], kind: type[MmfsdpError], words: list[str]) -> None:
    source = tmp_path / "step_7"
    shutil.copytree(GOLDEN / "tp-4" / "step_7", source)
    damage(source)
    check(source, kind, *words)


def edited(source: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    path = source / "metadata.pkl"
    content = pickle.loads(path.read_bytes())
    edit(content)
    path.write_bytes(pickle.dumps(content))


@pytest.mark.parametrize(
    ("edit", "kind", "words"),
    [
        (lambda content: content.update(version="1.0"), FormatError, "of version '1.0' (expected '2.0')"),
        (lambda content: content.update(world_size=10**9), CorruptCheckpointError, "has files of other ranks"),
        (lambda content: content.update(world_size="4"), CorruptCheckpointError, "written by '4' ranks"),
        (lambda content: content.pop("metadata"), CorruptCheckpointError, "metadata.pkl is damaged"),
        (
            lambda content: content["metadata"]["model"]["rank_to_layout_info"].update(
                {0: {"file_path": "model_0.safetensors", "serialization_format": {"type": "SafetensorsSerialization"}}}
            ),
            FormatError,
            "is stored with SafetensorsSerialization",
        ),
        (
            lambda content: content["metadata"]["model"]["rank_to_layout_info"].update(
                {0: {"file_path": "../model_0.pt", "serialization_format": {"type": "TorchSerialization"}}}
            ),
            FormatError,
            "which is not in its directory",
        ),
        (
            lambda content: content["metadata"]["model"]["nested_path_to_metadata"]['["steps"]'][0].update(
                sharding_metadata={"type": "default_tensor_v1", "data": {}}
            ),
            FormatError,
            "described as default_tensor_v1",
        ),
        (lambda content: content.update(more=print), UnsafePickleError, "not on the list of safe names"),
    ],
)
def test_wrong_metadata(
    tmp_path: Path, edit: Callable[[dict[str, Any]], Any], kind: type[MmfsdpError], words: str
) -> None:
    source = tmp_path / "step_7"
    shutil.copytree(GOLDEN / "tp-4" / "step_7", source)
    shutil.copy(source / "model_0.pt", tmp_path / "model_0.pt")
    edited(source, edit)
    check(source, kind, words)


def test_checkpoints_side_by_side_are_not_ranks(tmp_path: Path) -> None:
    for epoch in range(2):
        torch.save({"w": torch.full((2,), epoch)}, tmp_path / f"epoch_{epoch}.pt")
    check(tmp_path, FormatError, "If each is a checkpoint of its own, open one of them")
