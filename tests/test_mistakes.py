"""The table of mistakes in docs/explanation/why.md is what torch, accelerate and mmfsdp do."""

import pytest
from benchmarks.mistakes import PAGE, table
from tests.console_blocks import IS_PINNED


@pytest.mark.skipif(not IS_PINNED, reason="the table shows what the pinned torch does")
@pytest.mark.timeout(300)
def test_the_table_is_up_to_date() -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), "run: python -m benchmarks.mistakes"
