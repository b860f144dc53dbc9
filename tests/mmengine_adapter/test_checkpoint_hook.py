"""CheckpointHook on files and directories: what it keeps, removes, publishes, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from mmengine.registry import HOOKS, MODELS
from tests.mmengine_adapter.toy import config, run, runner_of, strategy, train

from mmfsdp.checkpoint import open_layout
from mmfsdp.testing import run_ranks, single_rank
from mmfsdp_mmengine import CheckpointHook
from mmfsdp_mmengine.checkpoints.live_content import read_content, safe_globals

KINDS = ["full", "local", "sharded"]
FILE_OR_DIRECTORY = ["full", "sharded"]


def run_with(kind: str, folder: Path, hook: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
    hooks = {"checkpoint": {"type": "CheckpointHook", **hook}}
    return run_ranks(train, 2, folder, 2, {"strategy": strategy(kind), "default_hooks": hooks, **changes})


def names(folder: Path) -> list[str]:
    return sorted(place.name for place in folder.iterdir() if place.suffix in (".pth", ".ckpt"))


def meta(place: Path) -> tuple[int, int]:
    found = read_content(str(place))["meta"]
    return found["epoch"], found["iter"]


@HOOKS.register_module(force=True)
class NotesWhatIsThere(CheckpointHook):
    """Notes the checkpoints that exist whenever one was saved."""

    seen: ClassVar[list[list[str]]] = []

    def _save_checkpoint_with_step(self, runner: Any, step: int, meta: dict[str, Any]) -> None:
        save = runner.save_checkpoint

        def noting(*args: Any, **kwargs: Any) -> None:
            before = names(Path(self.out_dir))
            save(*args, **kwargs)
            self.seen.append([*before, "|", *names(Path(self.out_dir))])

        runner.save_checkpoint = noting
        super()._save_checkpoint_with_step(runner, step, meta)
        runner.save_checkpoint = save


def note(rank: int, folder: Path, kind: str) -> list[list[str]]:
    NotesWhatIsThere.seen = []
    hook = {"type": "NotesWhatIsThere", "interval": 2, "by_epoch": False, "max_keep_ckpts": 1}
    run(config(folder, 2, strategy=strategy(kind), default_hooks={"checkpoint": hook}))
    return NotesWhatIsThere.seen


class TestKeeping:
    @pytest.mark.sample("sharded")
    @pytest.mark.parametrize("kind", FILE_OR_DIRECTORY)
    def test_the_old_one_is_there_until_the_new_one_is(self, tmp_path: Path, kind: str) -> None:
        seen = run_ranks(note, 2, tmp_path, kind)[0]
        assert seen[1] == ["iter_2.pth", "|", "iter_2.pth", "iter_4.pth"]
        assert seen[3] == ["iter_6.pth", "|", "iter_6.pth", "iter_8.pth"]
        assert names(tmp_path) == ["iter_8.pth"]
        assert read_content(str(tmp_path / "iter_8.pth"))["message_hub"]["runtime_info"]["keep_ckpt_ids"] == [8]

    @pytest.mark.sample("full")
    @pytest.mark.parametrize("kind", KINDS)
    def test_best_and_last_in_a_folder_of_their_own(self, tmp_path: Path, kind: str) -> None:
        hook = {
            "interval": 1,
            "save_best": "accuracy",
            "out_dir": str(tmp_path / "out"),
            "filename_tmpl": "e{}.pth",
            "max_keep_ckpts": 2,
            "save_optimizer": False,
        }
        three = {"train_cfg": {"by_epoch": True, "max_epochs": 3, "val_interval": 1}}
        results = run_with(kind, tmp_path / "work", hook, **three)
        scores = [result["accuracy"] for result in results[0]["metrics"]]
        best = scores.index(max(scores)) + 1
        out = tmp_path / "out" / "work"
        assert names(out) == sorted([f"best_accuracy_e{best}.pth", "e2.pth", "e3.pth"])
        # Each says which epoch it is of, though the last was saved again after its validation.
        assert meta(out / "e2.pth") == (2, 8)
        assert meta(out / "e3.pth") == (3, 12)
        assert meta(out / f"best_accuracy_e{best}.pth") == (best, 4 * best)
        assert (tmp_path / "work" / "last_checkpoint").read_text() == str(out / "e3.pth")
        for place in out.iterdir():
            assert place.is_dir() == (kind != "full")
            assert "optimizer" not in open_layout(place, trust=True).top_level

    @pytest.mark.sample("sharded")
    @pytest.mark.parametrize("kind", FILE_OR_DIRECTORY)
    def test_resuming_from_one_that_was_saved_again(self, tmp_path: Path, kind: str) -> None:
        hook = {"interval": 1, "save_best": "accuracy", "save_last": False}
        [whole, _] = run_with(kind, tmp_path / "whole", hook)
        again = {"load_from": str(tmp_path / "whole" / "epoch_1.pth"), "resume": True}
        [resumed, _] = run_with(kind, tmp_path / "again", hook, **again)
        assert resumed["losses"] == whole["losses"][4:]
        assert len(resumed["losses"]) == 4


class TestPublishing:
    @pytest.mark.sample("local")
    @pytest.mark.parametrize("kind", KINDS)
    def test_one_file_with_the_keys(self, tmp_path: Path, kind: str) -> None:
        other = [("a", ["meta", "state_dict"])] if kind == "full" else []
        for folder, keys in (*other, ("b", ["state_dict", "message_hub"])):
            run_with(kind, tmp_path / folder, {"interval": 2, "published_keys": keys})
            [published] = [path for path in (tmp_path / folder).glob("*.pth") if "-" in path.name]
            assert published.name.startswith("epoch_2-")
            with torch.serialization.safe_globals(safe_globals()):
                content = torch.load(published, weights_only=True)
            assert sorted(content) == sorted(keys)
            MODELS.build({"type": "ToyModel"}).load_state_dict(content["state_dict"])
        # What was published loads where it came from.
        run_with(kind, tmp_path / "c", {"interval": 2}, load_from=str(published))


def logged(folder: Path, counts: int, length: int) -> str:
    """What a run logs that saves after every iteration."""
    settings = config(folder, 1, param_scheduler=None)
    settings["optim_wrapper"]["accumulative_counts"] = counts
    settings["train_cfg"] = {"by_epoch": False, "max_iters": length}
    settings["default_hooks"] = {"checkpoint": {"type": "CheckpointHook", "interval": 1, "by_epoch": False}}
    settings |= {"val_dataloader": None, "val_evaluator": None, "val_cfg": None}
    with single_rank():
        runner = runner_of(settings)
        runner.train()
    return Path(runner.logger.handlers[-1].baseFilename).read_text()


class TestInTheMiddleOfAccumulation:
    @pytest.mark.exhaustive
    def test_is_told_once(self, tmp_path: Path) -> None:
        text = logged(tmp_path, 3, 5)
        assert text.count("Accumulated gradients are not saved") == 1
        assert "iter_1.pth is saved after 1 of accumulative_counts=3 iterations." in text
        assert "Save at multiples of 3 iterations." in text

    def test_is_not_told_of_steps(self, tmp_path: Path) -> None:
        # The last iteration makes a step, whatever waits.
        assert "Gradients that wait" not in logged(tmp_path / "1", 1, 2)
        assert "Gradients that wait" not in logged(tmp_path / "2", 2, 1)


def by_epoch(rank: int, folder: str, engine: str) -> list[str]:
    """Epochs end in the middle of an accumulation."""
    settings = config(f"{folder}/{engine}", 2, strategy=strategy(engine=engine), param_scheduler=None)
    settings["optim_wrapper"]["accumulative_counts"] = 3
    settings["default_hooks"] = {"checkpoint": {"type": "CheckpointHook", "interval": 1}}
    runner = runner_of(settings)
    runner.train()
    return sorted(path.name for path in Path(runner.work_dir).glob("epoch_*"))


@pytest.mark.sample("fsdp1")
@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_epochs_that_end_while_gradients_accumulate(tmp_path: Path, engine: str) -> None:
    """Fails with fsdp1 if core does not put whole gradients back: "attempting to assign a gradient of size"."""
    assert run_ranks(by_epoch, 2, str(tmp_path), engine) == [["epoch_1.pth", "epoch_2.pth"]] * 2
