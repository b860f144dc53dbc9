"""CheckpointHook saves to stores as it does to disks, and one job at a time writes to a directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mmengine.hooks import Hook
from tests.distributed.shelf import url_of
from tests.mmengine_adapter.test_kept_runs import alone, end_of, settings_of
from tests.mmengine_adapter.toy import runner_of, strategy

from mmfsdp import errors
from mmfsdp.collective import scope_of
from mmfsdp.saving import HeldDirectory
from mmfsdp.saving.loop import step_messages
from mmfsdp.testing import close_ranks, run_ranks, single_rank


@pytest.fixture(autouse=True, scope="module")
def fresh_ranks() -> Iterator[None]:
    """End the ranks that are about to leave as soon as their time is over."""
    yield
    close_ranks()


def names(folder: Path) -> list[str]:
    """What has files; a store has no directories."""
    return sorted({path.relative_to(folder).parts[0] for path in folder.rglob("*") if path.is_file()})


def in_store(rank: int, folder: Path, kind: str) -> list[Any]:
    """The ends of a run on a disk; of one in a store that the ranks leave; and of one that goes on, on another disk."""
    step_messages._OFTEN = 0.0
    ends = []
    for name, moment in (("whole", ""), ("one/run", "step"), ("two/run", "")):
        hook = {"out_dir": None if name == "whole" else url_of(folder / "store"), "background": True}
        settings = settings_of(folder / name, 2, "epoch", moment, exit_code=76, grace_seconds=600, **hook)
        runner = runner_of({**settings, "strategy": strategy(kind)})
        if moment:
            with pytest.raises(SystemExit, match="76"):
                runner.train()
        else:
            runner.train()
        ends.append((*end_of(runner), runner.iter))
    return ends


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["local", "full"])
def test_a_run_in_a_store_goes_on_without_its_disk(tmp_path: Path, kind: str) -> None:
    for whole, left, rest in run_ranks(in_store, 2, tmp_path, kind):
        assert left[3] in (6, 7)  # within the second epoch
        assert left[0] + rest[0] == whole[0]
        assert left[1] + rest[1] == whole[1]
        assert rest[2] == whole[2]
    kept = names(tmp_path / "store" / "run")
    # A directory in a store is not replaced: what a validation adds is written beside it.
    assert [name for name in kept if name != "epoch_2-again.pth"] == [
        *[name for name in names(tmp_path / "whole") if name.endswith(".pth")],
        "holder.json",
    ]
    is_best = any(name.startswith("best_accuracy_epoch_2") for name in kept)
    assert ("epoch_2-again.pth" in kept) == (kind == "local" and is_best)


class Thief(Hook):
    """Opens the directory as another job does, after the third iteration."""

    def __init__(self, url: str) -> None:
        self.url = url

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == 3:
            HeldDirectory(self.url, scope_of(None))


@pytest.mark.exhaustive
def test_one_job_at_a_time(tmp_path: Path) -> None:
    with single_rank():
        held = HeldDirectory(tmp_path, scope_of(None))
        with pytest.raises(errors.RunDirectoryError, match="is using the directory of this run"):
            runner_of(alone(tmp_path, interval=2)).train()
        assert not [*tmp_path.glob("*.pth")]
        held.close()
        url = url_of(tmp_path / "store")
        runner = runner_of(alone(tmp_path, interval=2, out_dir=url))
        runner.register_hook(Thief(f"{url}/{tmp_path.name}"))
        with pytest.raises(errors.RunDirectoryError, match="has opened the directory of this run"):
            runner.train()
        assert names(tmp_path / "store" / tmp_path.name) == ["holder.json", "iter_2.pth"]
        # What a killed save has left there goes, and what the other job would have saved is not replaced.
        (tmp_path / "store" / tmp_path.name / "iter_3.pth").mkdir()
        (tmp_path / "store" / tmp_path.name / "iter_3.pth" / "rank0.pth").touch()
        runner_of(alone(tmp_path, interval=4, out_dir=url, save_last=False, max_keep_ckpts=2)).train()
        assert names(tmp_path / "store" / tmp_path.name) == ["holder.json", "iter_2.pth", "iter_4.pth", "iter_8.pth"]


@pytest.mark.exhaustive
def test_a_run_of_another_model_is_refused_and_nothing_is_overwritten(tmp_path: Path) -> None:
    with single_rank():
        runner_of(alone(tmp_path, interval=4)).train()
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.suffix != ".log"}
        settings = alone(tmp_path, interval=4)
        settings["model"] = {"type": "ToyModel", "width": 8}
        with pytest.raises(errors.StateDictError, match="shape"):
            runner_of(settings).train()
        kept = {path: path.stat().st_mtime_ns for path in before if path.suffix == ".pth" or "iter_" in str(path)}
        assert kept.items() <= before.items()


@pytest.mark.parametrize("setting", [{"published_keys": ["meta"]}, {"backend_args": {"backend": "petrel"}}])
def test_settings_that_a_store_does_not_take_are_named(setting: dict[str, Any], tmp_path: Path) -> None:
    said = f"{next(iter(setting))} of CheckpointHook has no effect"
    with single_rank(), pytest.raises(errors.ConfigError, match=said):
        runner_of(alone(tmp_path / "run", interval=2, out_dir=url_of(tmp_path), **setting)).train()
