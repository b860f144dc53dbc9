"""The latest complete checkpoint of a directory, and the removal of old ones, while others save and die."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.core.samples import content, write_samples

from mmfsdp.checkpoint import convert, latest_checkpoint, open_layout, remove_old_checkpoints, verify
from mmfsdp.checkpoint.files.atomic import discard, temporary_sibling
from mmfsdp.errors import ConfigError


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_samples(tmp_path_factory.mktemp("samples"))


def save(directory: Path, *names: str) -> None:
    for name in names:
        torch.save(content(), directory / name)


def test_the_order_is_that_of_the_numbers_in_names(tmp_path: Path) -> None:
    save(tmp_path, "epoch_10.pth", "epoch_9.pth", "epoch_100.pth", "epoch_1.pth")
    assert latest_checkpoint(tmp_path) == tmp_path / "epoch_100.pth"
    assert latest_checkpoint(str(tmp_path), pattern="epoch_?.pth") == tmp_path / "epoch_9.pth"
    save(tmp_path, "last.pth")
    assert latest_checkpoint(tmp_path) == tmp_path / "epoch_100.pth"
    save(tmp_path, "best.pth")
    os.utime(tmp_path / "last.pth", (time.time() + 60,) * 2)
    assert latest_checkpoint(tmp_path, pattern="[bl]*") == tmp_path / "last.pth"
    save(tmp_path, "run_2_step_3.pth", "run_2_step_20.pth", "run_1_step_99.pth")
    assert latest_checkpoint(tmp_path, pattern="run_*") == tmp_path / "run_2_step_20.pth"


def test_nothing_to_go_on_from(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "missing") is None
    (tmp_path / "notes_3.txt").write_text("not a checkpoint")
    (tmp_path / "logs_4").mkdir()
    (tmp_path / "settings_5.json").write_text("{}")
    (tmp_path / "epoch_6.pth").touch()
    assert latest_checkpoint(tmp_path) is None
    assert remove_old_checkpoints(tmp_path, keep=1) == ()
    assert remove_old_checkpoints(tmp_path / "missing", keep=1) == ()
    assert len(os.listdir(tmp_path)) == 4


def test_every_kind_counts_while_it_is_complete(tmp_path: Path, samples: dict[str, Path]) -> None:
    save(tmp_path, "step_1.pth")
    for name, path in samples.items():
        target = tmp_path / f"step_2{path.suffix}"
        shutil.copytree(path, target) if path.is_dir() else shutil.copy(path, target)
        assert latest_checkpoint(tmp_path) == target, name
        if path.is_file():
            os.truncate(target, target.stat().st_size - 7)
        else:
            victims = [
                entry for entry in target.iterdir() if entry.suffix in (".pth", ".distcp", ".safetensors", ".bin")
            ]
            min(victims).unlink()
        if name == "safetensors_ranks":  # nothing says how many there were
            shutil.rmtree(target)
            continue
        assert latest_checkpoint(tmp_path) == tmp_path / "step_1.pth", name
        shutil.rmtree(target) if target.is_dir() else target.unlink()


def test_sizes_count_where_there_is_a_manifest(tmp_path: Path, samples: dict[str, Path]) -> None:
    for number in (1, 2):
        shutil.copytree(samples["local"], tmp_path / f"step_{number}")
    os.truncate(tmp_path / "step_2" / "rank1.pth", 100)
    assert latest_checkpoint(tmp_path) == tmp_path / "step_1"


def test_the_last_few_are_kept(tmp_path: Path) -> None:
    save(tmp_path, *(f"epoch_{number}.pth" for number in (1, 2, 3, 9, 10, 11)))
    save(tmp_path, "best.pth", "best_epoch_3.pth", "epoch_2.pt")
    (tmp_path / "epoch_8.pth").write_bytes((tmp_path / "epoch_3.pth").read_bytes()[:-9])  # whoever writes it
    removed = remove_old_checkpoints(tmp_path, keep=2)
    assert [path.name for path in removed] == ["epoch_9.pth", "epoch_3.pth", "epoch_2.pth", "epoch_1.pth"]
    kept = ["best.pth", "best_epoch_3.pth", "epoch_10.pth", "epoch_11.pth", "epoch_2.pt", "epoch_8.pth"]
    assert sorted(os.listdir(tmp_path)) == kept
    assert remove_old_checkpoints(tmp_path, keep=2) == ()
    assert remove_old_checkpoints(tmp_path, keep=1, pattern="*.pt") == ()
    assert [path.name for path in remove_old_checkpoints(tmp_path, keep=1, pattern="best*")] == ["best.pth"]
    for wrong in (0, -1):
        with pytest.raises(ConfigError, match=f"keep={wrong} would remove the latest"):
            remove_old_checkpoints(tmp_path, keep=wrong)
    assert latest_checkpoint(tmp_path) == tmp_path / "epoch_11.pth"


def test_names_without_numbers_are_removed_on_request_only(tmp_path: Path) -> None:
    save(tmp_path, "a.pth", "b.pth")
    assert remove_old_checkpoints(tmp_path, keep=1) == ()
    assert len(remove_old_checkpoints(tmp_path, keep=1, pattern="?.pth")) == 1


def test_a_save_under_way_is_left_alone(tmp_path: Path, samples: dict[str, Path]) -> None:
    for number in (1, 2, 3):
        shutil.copytree(samples["local"], tmp_path / f"step_{number}")
    again, new = temporary_sibling(tmp_path / "step_1"), temporary_sibling(tmp_path / "step_4", exclusive=True)
    shutil.copytree(samples["local"], new)
    assert latest_checkpoint(tmp_path) == tmp_path / "step_3"
    removed = remove_old_checkpoints(tmp_path, keep=1)
    assert removed == (tmp_path / "step_2",)
    assert verify(new).ok
    discard(again)
    discard(new)
    assert sorted(os.listdir(tmp_path)) == ["step_1", "step_3"]


def test_what_a_killed_replacement_left_counts(tmp_path: Path, samples: dict[str, Path]) -> None:
    shutil.copytree(samples["local"], tmp_path / "step_1")
    shutil.copytree(samples["local"], tmp_path / ".step_2.0123456789abcdef.mmfsdp-replaced")
    shutil.copytree(samples["local"], tmp_path / ".step_3.0123456789abcdef.mmfsdp-partial")
    found = latest_checkpoint(tmp_path)
    assert found == tmp_path / "step_2"
    assert open_layout(found).world_size == 2
    remove_old_checkpoints(tmp_path, keep=1)
    assert open_layout(found).world_size == 2


def test_a_killed_removal_is_finished_by_the_next(tmp_path: Path, samples: dict[str, Path]) -> None:
    for number in range(4):
        shutil.copytree(samples["local"], tmp_path / f"step_{number}")
    program = (
        "import os, signal, sys; from mmfsdp.checkpoint import remove_old_checkpoints\n"
        "sys.addaudithook(lambda event, _: event == 'os.remove' and 'rank' in str(_[0]) and os.kill(os.getpid(), 9))\n"
        "remove_old_checkpoints(sys.argv[1], keep=1)"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path], check=False)
    assert done.returncode == -9
    assert latest_checkpoint(tmp_path) == tmp_path / "step_3"
    assert any(name.endswith("mmfsdp-removed") for name in os.listdir(tmp_path))
    for name in os.listdir(tmp_path):
        assert name.startswith(".") or verify(tmp_path / name).ok, "there whole, or not at all"
    remove_old_checkpoints(tmp_path, keep=1)
    assert os.listdir(tmp_path) == ["step_3"]


def test_savers_and_removers_at_the_same_time(tmp_path: Path, samples: dict[str, Path]) -> None:
    shutil.copy(samples["zip.pth"], tmp_path / "in.pth")
    (tmp_path / "saved").mkdir()
    save_all = (
        "import sys; from mmfsdp.checkpoint import convert\n"
        "for step in range(12): convert(sys.argv[1] + '/in.pth', f'{sys.argv[1]}/saved/step_{step}', to='local', "
        "ranks=2, fsync=False)"
    )
    remove_all = (
        "import sys, time; from mmfsdp.checkpoint import latest_checkpoint, remove_old_checkpoints, verify\n"
        "last = -1\n"
        "while last < 11:\n"
        "    remove_old_checkpoints(sys.argv[1] + '/saved', keep=2)\n"
        "    found = latest_checkpoint(sys.argv[1] + '/saved')\n"
        "    step = -1 if found is None else int(found.name.partition('_')[2])\n"
        "    assert step >= last, (step, last)\n"
        "    last = step\n"
        "    time.sleep(0.01)\n"
        "remove_old_checkpoints(sys.argv[1] + '/saved', keep=2)"
    )
    workers = [
        subprocess.Popen([sys.executable, "-c", program, tmp_path], stderr=subprocess.PIPE, text=True)
        for program in (save_all, remove_all, remove_all)
    ]
    for worker in workers:
        _, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors
    assert sorted(os.listdir(tmp_path / "saved")) == ["step_10", "step_11"]
    assert all(verify(tmp_path / "saved" / name).ok for name in os.listdir(tmp_path / "saved"))
    convert(tmp_path / "saved" / "step_11", tmp_path / "out.pth")


def test_an_empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(3):
        torch.save({"w": torch.ones(1)}, tmp_path / f"step_{step}.pth")
    monkeypatch.chdir(tmp_path)
    for call in (latest_checkpoint, lambda path: remove_old_checkpoints(path, keep=1)):
        with pytest.raises(ConfigError, match="The path is empty"):
            call("")
    assert len(list(tmp_path.iterdir())) == 3
    assert len(remove_old_checkpoints(".", keep=1)) == 2
