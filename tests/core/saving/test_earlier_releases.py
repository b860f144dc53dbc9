"""What earlier releases of mmfsdp wrote is verified, read, resumed and converted: docs/reference/stability.md."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.core.ours.make import HERE, KINDS, STEPS, build, train

import mmfsdp
from mmfsdp.checkpoint import convert, verify
from mmfsdp.testing import single_rank

RELEASES = sorted(path.name for path in HERE.iterdir() if path.name[0].isdigit())


@pytest.mark.parametrize("release", RELEASES)
def test_every_kind_is_read(release: str, tmp_path: Path) -> None:
    losses = json.loads((HERE / release / "losses.json").read_text())
    with single_rank():
        for kind, name in KINDS.items():
            path = HERE / release / name
            assert verify(path).ok, path
            model, optimizer, scheduler = build()
            mmfsdp.load_checkpoint(path, model, None if kind == "safetensors" else optimizer)
            assert train(model, optimizer, scheduler) == pytest.approx(losses[0], rel=1e-6), path
            convert(path, tmp_path / f"{kind}.safetensors")
    read = [load_file(tmp_path / f"{kind}.safetensors") for kind in KINDS]
    for weights in read:
        assert weights.keys() == read[0].keys()
        assert all(torch.equal(weights[key], read[0][key]) for key in weights)


@pytest.mark.parametrize("release", RELEASES)
def test_a_run_is_resumed(release: str, tmp_path: Path) -> None:
    shutil.copytree(HERE / release / "run", tmp_path / "run")
    with single_rank():
        model, optimizer, scheduler = build()
        manager = mmfsdp.CheckpointManager(tmp_path / "run", model, optimizer, schedulers=scheduler, every_steps=STEPS)
        assert manager.resume() == STEPS
        losses = [train(model, optimizer, scheduler) for _ in range(2)]
        manager.close()
    assert losses == pytest.approx(json.loads((HERE / release / "losses.json").read_text()), rel=1e-6)
