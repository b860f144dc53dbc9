"""A sample of the campaign: runs through some faults end as ones without any. `nox -s campaign` has a thousand."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from tests.campaign.faults import FAULTS
from tests.forked_scripts import run_script

ROOT = Path(__file__).parents[2]
SLOW = ("SIGSTOP", "SIGSTOP and SIGCONT", "no file may grow", "no file may be opened", "full disk", "read-only disk")


@pytest.mark.timeout(600)  # for a busy machine
def test_runs_through_faults_end_as_ones_without(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(ROOT)])}
    words = ["--out", str(tmp_path), "--faults", "10", "--per-run", "5", "--steps", "14", "--jobs", "2"]
    words += ["--kinds", "same", "elastic", "--faults-of", *(name for name in FAULTS if name not in SLOW)]
    program = ROOT / "tests" / "campaign" / "campaign.py"
    done = run_script(program, tmp_path, {**environ, "OMP_NUM_THREADS": "1"}, 550, words)
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert done.returncode == 0, (results, done.stderr)
    struck = [fault for result in results for fault in result["faults"]]
    assert len(struck) >= 6
    assert len({phase for phase, _ in struck}) >= 3
    assert max(result["longest"] for result in results) < 60
