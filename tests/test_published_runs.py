"""The pages of published runs are what their script writes, and their forecasts are those of the code."""

from __future__ import annotations

import json
import statistics

import pytest
from benchmarks.bench_published import FORECASTS, forecast, summary
from benchmarks.published.forecasting import memory_of, retries_of
from benchmarks.published.rebuilding import UnknownRunError, rebuild, runs
from tools.published_runs import PAGES, error_of, pages

FOUND = json.loads(FORECASTS.read_text(encoding="utf-8"))
SMALL = 69, 159
"""MPT-125m on A100, for its time; LitGPT's StableLM of 16 layers, for its memory."""
RECOMPUTED_FROM_OUTSIDE = 181
"""SantaCoder of transformers, with FSDP1."""
PACKED = 205
"""Llama 2 7B with weights of 4 bits and adapters, wrapped by FSDP1."""
SHORT_OF_MEMORY = 76
"""MPT-13b on 8 A100 of 40 GB."""


def test_the_pages_are_up_to_date() -> None:
    for name, text in pages().items():
        assert text == PAGES[name].read_text(encoding="utf-8"), "run: python tools/published_runs.py"


def test_every_record_has_a_source_and_is_forecast_or_refused() -> None:
    known, refused = {row["run"] for row in FOUND["runs"]}, {int(number) for number in FOUND["refused"]}
    for number, run in enumerate(runs()):
        assert run["source"]
        assert run["date"]
        try:
            rebuild(run)
        except UnknownRunError:
            assert number in refused - known
        else:
            assert number in known - refused


@pytest.mark.sample("69")
@pytest.mark.parametrize("number", SMALL)
def test_forecasts_are_those_of_the_code(number: int) -> None:
    run = runs()[number]
    again, before = forecast(number, run, rebuild(run)), next(row for row in FOUND["runs"] if row["run"] == number)
    assert {*again} == {*before}
    for kind in {*again} - {"run", "half"}:
        assert again[kind] == pytest.approx(before[kind], rel=0.005), "run: python -m benchmarks.bench_published"


@pytest.mark.exhaustive
def test_memory_with_caches_and_with_recomputation_around_units_is_that_of_the_code() -> None:
    before = next(row for row in FOUND["runs"] if row["run"] == RECOMPUTED_FROM_OUTSIDE)["allocated"]
    assert memory_of(rebuild(runs()[RECOMPUTED_FROM_OUTSIDE])).allocated == pytest.approx(before[1:], rel=0.005)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_memory_of_packed_weights_that_fsdp1_wraps_is_that_of_the_code() -> None:
    before = next(row for row in FOUND["runs"] if row["run"] == PACKED)["reserved"]
    assert memory_of(rebuild(runs()[PACKED])).reserved == pytest.approx(before[1:], rel=0.005)


def test_steps_of_the_half_that_fitted_nothing_are_forecast_well() -> None:
    found = summary(FOUND["runs"])["seconds, test"]
    assert found["count"] >= 30
    assert found["median"] <= 0.1
    assert found["worst"] <= 0.2
    assert found["inside"] >= 0.9 * found["count"]
    assert found["widest"] <= 1.3


def test_memory_is_forecast_well() -> None:
    sources = {
        runs()[row["run"]]["source"].partition(":")[0] for row in FOUND["runs"] if "allocated" in row or "active" in row
    }
    assert len(sources) >= 4
    kinds = [(kind, row) for row in FOUND["runs"] for kind in ("allocated", "active") if kind in row]
    errors = [abs(error_of(kind, row[kind])) for kind, row in kinds]
    assert len(errors) >= 40
    assert statistics.median(errors) <= 0.02
    assert max(errors) <= 0.05
    taken = [row["reserved"] for row in FOUND["runs"] if "reserved" in row]
    assert len(taken) >= 16
    assert max(abs(error_of("reserved", figure)) for figure in taken) <= 0.03  # of the nearest end of the interval
    assert sum(low <= real <= high for real, low, high in taken) >= 0.9 * len(taken)


def test_steps_for_which_memory_suffices_are_forecast_well() -> None:
    timed = [row for row in FOUND["runs"] if "seconds" in row]
    short = [row for row in timed if "retries" in row]
    assert max(abs(error_of("seconds", row["seconds"])) for row in timed if row not in short) <= 0.2
    assert len(short) <= 0.1 * len(timed)
    # Those that are most off lack most memory.
    assert max(short, key=lambda row: abs(error_of("seconds", row["seconds"])))["retries"] > 5


@pytest.mark.exhaustive
@pytest.mark.slow
def test_retries_are_those_of_the_code() -> None:
    before = next(row for row in FOUND["runs"] if row["run"] == SHORT_OF_MEMORY)["retries"]
    assert retries_of(rebuild(runs()[SHORT_OF_MEMORY])) == before
    assert retries_of(rebuild(runs()[SMALL[0]])) == 0
