"""Tables that fit a width, and names of equal layers joined into one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfsdp.basics.tables import Column, display_width, format_table, wrap_cell
from mmfsdp.planning.tables.repeats import join_ranges, join_repeated

COLUMNS = (
    Column("tensor", wraps=True),
    Column("dtype", once=True, rank=1),
    Column("bytes", right=True),
    Column("where it lies", wraps=True, rank=2),
)
ROWS = [
    ("model.layers.0.self_attention.query.weight", "float32", "64.00 MiB", "model-00001-of-00002.safetensors"),
    ("head", "float32", "1 B", "x"),
]


def test_as_wide_as_it_needs() -> None:
    lines = format_table(COLUMNS, ROWS)
    assert lines[0].split() == ["tensor", "dtype", "bytes", "where", "it", "lies"]
    assert {*lines[1]} == {"-", " "}
    assert lines[3].split() == ["head", "float32", "1", "B", "x"]
    assert lines[2].index("64.00 MiB") + len("64.00 MiB") == lines[3].index("1 B") + len("1 B")


def test_what_is_the_same_everywhere_is_said_once_then_cells_are_wrapped_then_columns_left_out() -> None:
    assert "(in every row: dtype float32)" in format_table(COLUMNS, ROWS, 95)
    lines = format_table(COLUMNS, ROWS, 60)
    assert [line.split()[0] for line in lines[2:4]] == ["model.layers.0.self_", "attention.query.weight"]
    assert format_table(COLUMNS, ROWS, 24)[-1] == "(not shown in 24 columns: where it lies)"


@settings(deadline=None)
@given(st.integers(21, 120), st.lists(st.tuples(*[st.text("ab./_ 漢", max_size=40)] * 4), max_size=4))
def test_no_line_is_wider_and_nothing_is_lost(width: int, rows: list[tuple[str, ...]]) -> None:
    columns = [Column("tensor", wraps=True), *(Column("c", wraps=True, rank=rank) for rank in (1, 2, 3))]
    lines = format_table(columns, rows, width)
    notes = [line for line in lines if line.startswith("(")]
    assert max(map(display_width, lines[: len(lines) - len(notes)])) <= width
    first = "".join("".join(line) for row in rows for line in wrap_cell(row[0], 10))
    assert first.replace(" ", "") == "".join(row[0] for row in rows).replace(" ", "")


def test_an_empty_table() -> None:
    assert format_table(COLUMNS[:2], []) == ["tensor  dtype", "------  -----"]


@pytest.mark.parametrize(
    ("names", "joined"),
    [
        (["blocks.0", "blocks.1", "blocks.2", "head"], ["blocks.{0..2}", "head"]),
        (["a.0.x", "a.0.y", "a.1.x", "a.1.y"], ["a.{0..1}.x", "a.{0..1}.y"]),
        ([f"l.{i}.e.{j}" for i in range(3) for j in range(2)], ["l.{0..2}.e.{0..1}"]),
        (["0", "2", "3"], ["{0,2..3}"]),
        (["conv1", "conv2", "1x.0"], ["conv1", "conv2", "1x.0"]),
        (["a.0", "a.0.b", "a.1"], ["a.{0..1}", "a.0.b"]),
        ([], []),
    ],
)
def test_names_are_joined(names: list[str], joined: list[str]) -> None:
    found = join_repeated([(name, None) for name in names])
    assert [item.name for item in found] == joined
    assert sorted(member for item in found for member in item.members) == [*range(len(names))]


def test_only_equal_things_are_joined() -> None:
    found = join_repeated([("a.0", 1), ("a.1", 2), ("a.2", 1)])
    assert [(item.name, item.members) for item in found] == [("a.{0,2}", [0, 2]), ("a.1", [1])]


def test_ranges() -> None:
    assert join_ranges([5]) == "5"
    assert join_ranges([3, 1, 2, 9, 11, 10]) == "{1..3,9..11}"
