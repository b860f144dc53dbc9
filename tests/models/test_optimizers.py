"""Every row of docs/explanation/optimizers.md about optimizers of other packages is what happens."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.distributed.optimizer_rows import WHOLE, rows, words_of

ROWS = rows("torchao|schedulefree|lion_pytorch|pytorch_optimizer|transformers")


@pytest.mark.parametrize("name", ROWS)
def test_the_row_is_what_happens(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name.partition(".")[0])
    assert words_of(name, tmp_path) == ROWS[name]


WAYS_OUT = {name: ("yes", "yes") for name, words in ROWS.items() if words[0] == "fails"}
WAYS_OUT["pytorch_optimizer.Shampoo"] = ("yes", "refused")  # its preconditioners have shapes of their own
del WAYS_OUT["pytorch_optimizer.SOAP"]  # a difference of 1e-7 is one of 0.2 after three steps


@pytest.mark.parametrize("name", WAYS_OUT)
def test_whole_parameters_are_the_way_out(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name.partition(".")[0])
    assert words_of(name, tmp_path, WHOLE) == WAYS_OUT[name]
