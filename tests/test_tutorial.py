"""The tutorials: their commands run, and a run that stopped and resumed trains as one that did not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.console_blocks import IS_PINNED, walk
from tests.doc_pages import ROOT, blocks
from tests.forked_scripts import environ_alone, run_script

PAGE = ROOT / "docs" / "tutorials" / "train_a_model.md"
LOSS = re.compile(r"step (\d+): loss ([\d.]+)")


def losses_of(printed: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in LOSS.findall(printed)}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tutorial(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = walk([block.text for block in blocks(PAGE) if block.runs], tmp_path)
    stopped, resumed = (losses_of(printed) for command, printed in done if "train.py --dir" in command)
    assert sorted(stopped) == [1, 2, 3, 4, 5, 6, 7]
    assert sorted(resumed) == [8, 9, 10, 11, 12]
    script = ROOT / "examples" / "hf_loop" / "train.py"
    whole = run_script(script, tmp_path, environ_alone(), 120, ["--dir", "runs/whole"])
    assert whole.returncode == 0, whole.stderr
    assert {**stopped, **resumed} == pytest.approx(losses_of(whole.stdout), rel=1e-5)
    [exported] = [float(loss) for _, printed in done for loss in re.findall(r"parameters, loss ([\d.]+)", printed)]
    assert exported < stopped[7]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gpus_are_rented(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    page = ROOT / "docs" / "tutorials" / "rent_gpus.md"
    texts = [block.text for block in blocks(page) if block.runs]
    if not IS_PINNED:  # with other releases of torch steps take other times, and other settings may be fastest
        joined = (re.sub(r"\\\n\s*", " ", text) for text in texts)
        texts = ["".join(re.findall(r"^\$ .*\n", text, flags=re.MULTILINE)) for text in joined]
    done = dict(walk(texts, tmp_path))
    if IS_PINNED:
        [found] = [printed for command, printed in done.items() if " fit " in command]
        [each] = re.findall(r"([\d.]+) per hour, ([\d.]+) per billion tokens", found)
        said = " ".join(page.read_text(encoding="utf-8").split())
        assert f"100 billion tokens costs {100 * float(each[1]):,.0f}, " in said
        assert f"/ {float(each[0]):.0f} = {100 * float(each[1]) / float(each[0]):.0f} hours" in said
    assert (tmp_path / "runs" / "tiny" / "step_2").is_dir()
