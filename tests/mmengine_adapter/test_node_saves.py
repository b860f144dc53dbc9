"""CheckpointHook saves to the nodes' own disks between the regular checkpoints, and resumes from whichever is newer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mmengine.hooks import Hook
from tests.mmengine_adapter.test_kept_runs import end_of, settings_of
from tests.mmengine_adapter.toy import runner_of

from mmfsdp import errors
from mmfsdp.testing import run_ranks, single_rank


class Fails(Hook):
    """Ends training before the seventh iteration, as a rank that is lost does."""

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == 6:
            raise KeyError


def settings(folder: Path, ranks: int, loop: str) -> dict[str, Any]:
    fast = {"fast_directory": str(folder / "fast"), "fast_interval": 1, "background": False}
    return settings_of(folder / "run", ranks, loop, **fast)


def fail(rank: int, folder: Path, loop: str) -> tuple[Any, Any]:
    """The end of a run that nothing stops, and that of one that fails."""
    whole = runner_of(settings_of(folder / "whole", 2, loop))
    whole.train()
    runner = runner_of(settings(folder, 2, loop))
    runner.register_hook(Fails())
    with pytest.raises(KeyError):
        runner.train()
    return end_of(whole), end_of(runner)


def go_on(rank: int, folder: Path, ranks: int, loop: str) -> Any:
    runner = runner_of(settings(folder, ranks, loop))
    runner.train()
    return end_of(runner)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("loop", "ranks"), [("epoch", 2), ("iter", 1)])
def test_the_newest_of_both_tiers_is_resumed(tmp_path: Path, loop: str, ranks: int) -> None:
    ends = run_ranks(fail, 2, tmp_path, loop)
    for (whole, failed), rest in zip(ends, run_ranks(go_on, ranks, tmp_path, ranks, loop), strict=False):
        assert len(failed[0]) == 6  # the fourth is saved where all runs are, the sixth on the nodes
        if ranks == 2:
            assert failed[0] + rest[0] == whole[0]
            assert failed[1] + rest[1] == whole[1]
            assert rest[2] == whole[2]
        else:
            assert failed[0] + rest[0] == pytest.approx(whole[0], rel=1e-5)


@pytest.mark.exhaustive
def test_a_new_run_forgets_what_is_on_the_nodes_and_another_one_is_refused(tmp_path: Path) -> None:
    with single_rank():
        for resume in (False, False, True):
            runner = runner_of({**settings(tmp_path, 1, "iter"), "resume": resume})
            runner.register_hook(Fails())
            with pytest.raises(KeyError):
                runner.train()
            assert len(end_of(runner)[0]) == (0 if resume else 6)
        other = {**settings(tmp_path, 1, "iter"), "work_dir": str(tmp_path / "other"), "resume": True}
        with pytest.raises(errors.RunDirectoryError, match=f"of run '{tmp_path}/run' or of another model"):
            runner_of(other).train()
        with pytest.raises(errors.ConfigError, match="fast_directory and fast_interval belong together"):
            runner_of(settings_of(tmp_path, 1, "iter", fast_interval=1))
