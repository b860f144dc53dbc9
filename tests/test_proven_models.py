"""docs/proven_models.md is the page that the last sweep wrote: with every family and plan, and without false alarms."""

from __future__ import annotations

from tests.parity.false_alarms import PAGE, PLANS, PRECISIONS
from tests.parity.families import FAMILIES


def test_the_table_is_whole_and_has_no_false_alarm() -> None:
    header, _, *rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    plans = [f"{plan}, {precision}" for precision in PRECISIONS for plan in PLANS]
    assert [cell.strip() for cell in header.strip("|").split("|")] == ["family", *plans], (
        "run: python -m tests.parity.false_alarms"
    )
    cells = {name.strip(): shares for name, *shares in (row.strip("|").split("|") for row in rows)}
    assert [*cells] == [*FAMILIES]
    for family, shares in cells.items():
        assert len(shares) == len(plans), family
        assert all(0 <= int(share.strip().removesuffix("%")) < 100 for share in shares), family
