"""Saves in the background without room, or whose directory is lost: all ranks learn of it, and the next one works."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.distributed.models import BLOCKS, build, train
from tests.distributed.saving.test_checkpoints_online import told
from tests.distributed.state.test_state_dicts import optimizer_of

import mmfsdp
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.saving.writing import publishing
from mmfsdp.saving.writing.background import saver_of
from mmfsdp.testing import run_ranks

Kind = Literal["sharded", "local", "full", "hf"]
KINDS: tuple[Kind, ...] = ("sharded", "local", "full", "hf")


def save_without_room(rank: int, folder: str, without: int) -> list[tuple[type, str]]:
    """Save in every way while one rank may write no large file, as on a full disk; and once more with room."""
    model = mmfsdp.shard(build(), {"wrap": BLOCKS})
    optimizer = optimizer_of(model, "adamw")
    train(model, optimizer, steps=1)
    saver_of(find_sharded_model(model).mesh)  # ranks of tests meet by a file
    found, limits = [], resource.getrlimit(resource.RLIMIT_FSIZE)
    for kind in KINDS:
        given: dict[str, Any] = {"like": f"{folder}/like"} if kind == "hf" else {"optimizer": optimizer}
        path = f"{folder}/{kind}.pth" if kind == "full" else f"{folder}/{kind}"

        def save(path: str = path, kind: Kind = kind, given: dict[str, Any] = given) -> None:
            mmfsdp.save_checkpoint(path, model, kind=kind, blocking=False, **given).result()

        if kind == "full" and without:
            continue  # the first rank writes alone
        if rank == without:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
        try:
            found.append(told(save))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert not Path(path).exists()
        save()
    return found


@pytest.mark.sample("1")
@pytest.mark.parametrize("without", [0, 1])
def test_every_kind_fails_on_all_ranks_and_works_with_room(without: int, tmp_path: Path) -> None:
    (tmp_path / "like").mkdir()
    (tmp_path / "like/config.json").write_text(json.dumps({"model_type": "own", "tie_word_embeddings": False}))
    for found in run_ranks(save_without_room, 2, str(tmp_path), without):
        assert [error for error, _ in found] == [mmfsdp.errors.CheckpointError] * (3 if without else 4)
        assert all("cannot be written: File too large." in message for _, message in found), found
    names = ["hf", "like", "local", "sharded"] if without else ["full.pth", "hf", "like", "local", "sharded"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def lose_the_directory(rank: int, folder: str) -> tuple[int, list[str]]:
    """Remove the directory of the run while its first save is written."""
    model = mmfsdp.shard(build(), {"wrap": BLOCKS})
    finish = publishing.DirectorySave.finish

    def lose(save: publishing.DirectorySave, *given: Any) -> None:
        if rank == 0 and save.target.name == "step_1":
            shutil.rmtree(save.temporary)
        finish(save, *given)

    publishing.DirectorySave.finish = lose  # type: ignore[method-assign]
    with mmfsdp.CheckpointManager(folder, model, every_steps=1) as manager:
        for step in range(1, 4):
            manager.step(step)
            manager.wait()
        failed = manager.failed_saves
    publishing.DirectorySave.finish = finish  # type: ignore[method-assign]
    return failed, sorted(path.name for path in Path(folder).glob("step_*"))


def test_a_directory_that_is_lost_meanwhile(tmp_path: Path) -> None:
    for failed, kept in run_ranks(lose_the_directory, 2, str(tmp_path / "run")):
        assert failed == 1
        assert kept == ["step_2", "step_3"]
    assert mmfsdp.checkpoint.verify(tmp_path / "run" / "step_3").ok
