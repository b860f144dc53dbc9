"""A sample of the campaign: runs through some faults end as ones without any. `nox -s campaign` has a thousand."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.campaign.faults import FAULTS
from tests.distributed.hosts import hosts_or_skip
from tests.forked_scripts import run_script

ROOT = Path(__file__).parents[2]
SLOW = ("SIGSTOP", "SIGSTOP and SIGCONT", "no file may grow", "no file may be opened", "full disk", "read-only disk")


def results_of(folder: Path, *words: str) -> list[dict[str, Any]]:
    """Run a campaign, all of whose runs must end as ones without faults, and return its results."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(ROOT)])}
    given = ["--out", str(folder), "--steps", "14", "--jobs", "2", *words]
    program = ROOT / "tests" / "campaign" / "campaign.py"
    done = run_script(program, folder, {**environ, "OMP_NUM_THREADS": "1"}, 550, given)
    results = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert done.returncode == 0, (results, done.stderr)
    return results


@pytest.mark.sample("same")
@pytest.mark.timeout(600)  # for a busy machine
@pytest.mark.parametrize(
    ("kinds", "faults", "per_run", "least", "phases"),
    [(["same"], 2, 2, 1, 1), (["same", "elastic"], 10, 5, 6, 3)],
    ids=["same", "all"],
)
def test_runs_through_faults_end_as_ones_without(
    kinds: list[str], faults: int, per_run: int, least: int, phases: int, tmp_path: Path
) -> None:
    words = ["--faults", str(faults), "--per-run", str(per_run), "--kinds", *kinds]
    results = results_of(tmp_path, *words, "--faults-of", *(name for name in FAULTS if name not in SLOW))
    struck = [fault for result in results for fault in result["faults"]]
    assert len(struck) >= least
    assert len({phase for phase, _ in struck}) >= phases
    assert max(result["longest"] for result in results) < 60


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_run_under_mmengine_gets_the_files_of_a_lost_host_from_the_other_one(tmp_path: Path) -> None:
    (tmp_path / "hosts").mkdir()
    with hosts_or_skip(tmp_path / "hosts"):
        pass
    [result] = results_of(
        tmp_path, "--faults", "2", "--per-run", "2", "--kinds", "mmengine_hosts", "--faults-of", "lost node and disk"
    )
    assert {name for _, name in result["faults"]} == {"lost node and disk"}
