"""docs/appendix/proven_models.md is what the last sweep wrote: every family and plan, no false alarm."""

from __future__ import annotations

from tests.parity.false_alarms import PAGE, PLANS, PRECISIONS
from tests.parity.families import FAMILIES


def test_the_tables_are_whole_and_have_no_false_alarm() -> None:
    _, *parts = PAGE.read_text(encoding="utf-8").split("## In ")
    assert [part.partition("\n")[0] for part in parts] == [*PRECISIONS], "run: python -m tests.parity.false_alarms"
    for part in parts:
        header, _, *rows = [line for line in part.splitlines() if line.startswith("|")]
        assert [cell.strip() for cell in header.strip("|").split("|")] == ["family", *PLANS]
        cells = {name.strip(): shares for name, *shares in (row.strip("|").split("|") for row in rows)}
        assert [*cells] == [*FAMILIES]
        for family, shares in cells.items():
            assert len(shares) == len(PLANS), family
            assert all(0 <= int(share.strip().removesuffix("%")) < 100 for share in shares), family
