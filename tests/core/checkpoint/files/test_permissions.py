"""What the user of a process may not read or write is said to be that, and not to be missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.permissions import without_override

import mmfsdp
from mmfsdp.checkpoint import convert, latest_checkpoint, open_layout, verify
from mmfsdp.errors import CheckpointError, CheckpointPermissionError, IncompleteCheckpointError
from mmfsdp.saving import read_checkpoint
from mmfsdp.testing import single_rank


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A directory with a file, of a user who has no rights that others lack."""
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    convert(tmp_path / "m.safetensors", tmp_path / "dcp", to="dcp", fsync=False)
    with without_override():
        yield tmp_path
        for path in (tmp_path, *tmp_path.rglob("*")):
            path.chmod(0o755)


def test_reading(folder: Path) -> None:
    closed = folder / "closed"
    closed.mkdir()
    (folder / "m.safetensors").rename(closed / "m.safetensors")
    (folder / "dcp" / "__0_0.distcp").chmod(0)
    closed.chmod(0)
    reads = (open_layout, read_checkpoint, verify, lambda path: convert(path, folder / "out.pth"))
    for path in (closed / "m.safetensors", closed / "not-there", folder / "dcp"):
        for read in reads if path.name != "dcp" else reads[3:]:  # the others open no file with data
            with pytest.raises(CheckpointPermissionError, match="cannot be read: this process has no permission for"):
                read(path)
    assert verify(folder / "dcp").problems[0].message.startswith("__0_0.distcp cannot be read: this process has no per")
    with pytest.raises(PermissionError, match="no permission for"):
        latest_checkpoint(closed)
    with pytest.raises(PermissionError, match="no permission for"):
        latest_checkpoint(closed / "run")
    assert latest_checkpoint(folder / "nothing") is None


def test_a_checkpoint_that_may_not_be_read_is_not_passed_over(folder: Path) -> None:
    """To go on from the one before it would lose steps; another directory is none."""
    for step in (4, 12):
        (folder / "dcp").rename(folder / f"step_{step}")
        convert(folder / "m.safetensors", folder / "dcp", to="dcp", fsync=False)
    (folder / "lost+found").mkdir(mode=0)
    assert latest_checkpoint(folder, pattern="[sl]*") == folder / "step_12"
    (folder / "step_4").chmod(0)
    assert latest_checkpoint(folder, pattern="[sl]*") == folder / "step_12"
    (folder / "step_4").chmod(0o755)
    (folder / "step_12").chmod(0)
    with pytest.raises(CheckpointPermissionError, match=r"step_12 cannot be read"):
        latest_checkpoint(folder, pattern="[sl]*")


def test_writing(folder: Path) -> None:
    readonly = folder / "readonly"
    readonly.mkdir(mode=0o555)
    said = r"cannot be written: Permission denied\. Choose a directory that you may write to"
    for target, to in (("x.safetensors", None), ("x", "dcp")):
        with pytest.raises(CheckpointPermissionError, match=said):
            convert(folder / "m.safetensors", readonly / target, to=to)
    with single_rank():
        model = mmfsdp.shard(torch.nn.Linear(2, 2), wrap="none")
        for kind in ("sharded", "local", "full"):
            with pytest.raises(PermissionError, match=said):
                mmfsdp.save_checkpoint(readonly / "x", model, kind=kind)
        optimizer = torch.optim.SGD(model.parameters())
        with pytest.raises(CheckpointError, match=said):
            mmfsdp.CheckpointManager(readonly, model, optimizer).resume()
        run = folder / "run"
        for step in (4, 12):
            with mmfsdp.CheckpointManager(run, model, optimizer) as manager:
                manager.resume()
                manager.save(step)
        (run / "step_12").chmod(0)
        with mmfsdp.CheckpointManager(run, model, optimizer) as manager, pytest.raises(CheckpointPermissionError):
            manager.resume()
    assert [*readonly.iterdir()] == []


def test_a_missing_file_is_still_missing(folder: Path) -> None:
    (folder / "dcp" / "__0_0.distcp").unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"__0_0\.distcp"):
        open_layout(folder / "dcp")
