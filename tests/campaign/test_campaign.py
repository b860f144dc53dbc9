"""A sample of the campaign: a run through some faults ends as one without any. `nox -s campaign` runs more."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.campaign.campaign import compare, launch, run

STEPS = 40
# Those that need no restart, and some that do; the rest takes longer.
QUICK = ["no file may grow", "lost directory", "SIGTERM to all ranks", "a step raises", "flipped bit", "kill a rank"]


@pytest.mark.slow
def test_a_run_through_faults_ends_as_one_without(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    assert launch(whole, STEPS, 2, True).wait() == 0, (whole / "log").read_text()[-4000:]
    result = run(tmp_path / "faulty", 1, steps=STEPS, count=6, gap=0.7, names=QUICK, share=0.0)
    assert "error" not in result, (result, (tmp_path / "faulty" / "log").read_text()[-4000:])
    assert len(result["faults"]) >= 3
    assert compare(whole, tmp_path / "faulty", steps=STEPS, elastic=False) == ""
