"""Ranks that stop: all others name the rank, its host, step, unit and stack, and end; whoever is only slow goes on."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.forked_scripts import run_script
from torch import nn

import mmfsdp
from mmfsdp import errors
from mmfsdp.runtime.ranks.stalled_ranks import Judge, Whereabouts
from mmfsdp.runtime.ranks.thread_stacks import stack_of, takes_long
from mmfsdp.testing import single_rank

PROGRAM = Path(__file__).parents[1].joinpath("stalling.py")
RANKS = {"hang": 3, "hang in fsdp1": 3, "stopped first": 3, "stopped last": 3, "dead": 3}
RANKS |= {"hang in checkpoint": 2, "evaluation": 2, "compile": 2, "save": 2}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int | None, str]]]:
    """The exit code of each rank in each scenario and what it printed; a rank that was stopped has no code."""
    folder = tmp_path_factory.mktemp("stalls")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    done = run_script(PROGRAM, folder, environ, 150, [json.dumps(RANKS)])
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.splitlines()[-1])  # before torch 2.10, gloo prints who is connected
    return {
        what: [(codes[what][rank], (folder / what / f"{rank}.log").read_text()) for rank in range(ranks)]
        for what, ranks in RANKS.items()
    }


@pytest.mark.parametrize(
    ("what", "rank", "said"),
    [
        ("hang", 1, ["forget_the_others", "between an optimizer step and the next shard unit, after 2 steps"]),
        ("hang in checkpoint", 1, ["forget_the_others", "after 2 steps"]),
        ("hang in fsdp1", 1, ["forget_the_others", "computing the shard unit '2', after 2 steps"]),
        ("stopped first", 0, ["It answers to nothing: it is stopped", "after 2 steps"]),
        ("stopped last", 2, ["It answers to nothing: it is stopped", "after 2 steps"]),
        ("dead", 1, ["It has ended, or failed.", "after 2 steps"]),
    ],
)
def test_all_others_name_the_rank_that_stops(
    what: str, rank: int, said: list[str], outcomes: dict[str, list[tuple[int | None, str]]]
) -> None:
    for other, (code, text) in enumerate(outcomes[what]):
        if other == rank and "hang" not in what:
            continue
        assert code == 75, (other, code, text)
        assert f"Rank {rank} on host {os.uname().nodename!r} is" in text, text
        assert all(part in text for part in said), text
        assert f"Stacks of rank {other} on host" in text
        assert "stalling.py" in text.partition("Stacks of")[2], text


@pytest.mark.parametrize("what", ["evaluation", "compile", "save"])
def test_what_is_healthy_but_slow_is_no_stall(what: str, outcomes: dict[str, list[tuple[int | None, str]]]) -> None:
    for code, text in outcomes[what]:
        assert (code, "done" in text) == (0, True), text


def at(progress: int, *, busy: bool = False) -> Whereabouts:
    return Whereabouts("host", progress, 0, "computing", busy)


def test_only_who_holds_up_others_is_stalled() -> None:
    judge = Judge(3, 10.0, 0.0)
    for now in range(0, 30):
        for rank in range(3):
            judge.hear(rank, at(5), now)  # all wait for an evaluation, say
        assert judge.stalled(now) == []
    for now in range(30, 70):
        judge.hear(0, at(7), now)
        judge.hear(1, at(6), now)  # waits for 2, as 0 does
        judge.hear(2, at(5, busy=40 <= now < 55), now)
        # Neither the time before the others were further counts, nor that in which it did what may take long.
        assert judge.stalled(now) == ([2] if now >= 65 else []), now
    assert judge.stalled(81.0) == [0, 1, 2]  # nobody has told anything since
    judge.hear(0, at(7), 81.0)
    judge.hear(1, at(6), 81.0)
    assert judge.stalled(81.0) == [2]


def test_a_slow_rank_is_named_once_per_window() -> None:
    judge, named = Judge(2, 1e9, 0.0), []
    for now in range(200):
        judge.hear(0, at(now), now)
        judge.hear(1, at(now if now % 4 == 0 else now - 1), now)
        named.append(judge.slow())
    assert [now for now, rank in enumerate(named) if rank is not None] == [59, 119, 179]
    assert set(named) == {None, 1}


def test_wrong_limits_are_refused() -> None:
    with single_rank():
        model = mmfsdp.shard(nn.Linear(2, 2))
        for wrong in (0, -1.0, float("inf"), True):
            with pytest.raises(errors.ConfigError, match="is not a positive number of seconds"):
                mmfsdp.watch_ranks(model, wrong)
        with mmfsdp.watch_ranks(model, 0.5):
            time.sleep(1.2)


def seen_by_another_thread() -> list[traceback.StackSummary | None]:
    main, found = threading.get_ident(), list[traceback.StackSummary | None]()
    other = threading.Thread(target=lambda: found.append(stack_of(main)), name='x] (most "\n\n  File "y", line 1 in z')
    other.start()
    other.join()
    return found


def down(calls: int) -> list[traceback.StackSummary | None]:
    return down(calls - 1) if calls else seen_by_another_thread()


def test_the_stack_of_a_thread_is_read_from_another_one() -> None:
    for calls in (5, 300):
        (stack,) = down(calls)
        assert stack is not None
        names = [call.name for call in stack]
        assert "seen_by_another_thread" in names
        assert names.count("down") == 6 if calls == 5 else len(names) == 100
        assert not takes_long(stack)
    stop = threading.Event()
    many = [threading.Thread(target=stop.wait) for _ in range(120)]
    for thread in many:
        thread.start()
    assert seen_by_another_thread() == [None], "of more than 100 threads, not all are shown"
    stop.set()
    for thread in many:
        thread.join()
    assert seen_by_another_thread() != [None]


def test_only_a_unit_that_is_compiled_takes_long_not_one_that_runs_compiled() -> None:
    compiling, running = [], []

    def backend(graph: Any, _: Any) -> Any:
        compiling.append(traceback.extract_stack())
        return graph.forward

    @torch.compiler.disable
    def look(x: torch.Tensor) -> torch.Tensor:
        running.append(traceback.extract_stack())
        return x

    torch.compile(lambda x: look(x.sin()).cos(), backend=backend)(torch.ones(2))
    assert [*map(takes_long, compiling)] == [True, True]
    assert [*map(takes_long, running)] == [False]
    assert any("_dynamo" in call.filename for call in running[0])


def test_an_error_of_the_watch_itself_is_no_stall(caplog: pytest.LogCaptureFixture) -> None:
    with single_rank():
        model = mmfsdp.shard(nn.Linear(2, 2))
        with mmfsdp.watch_ranks(model, 0.5) as watch:
            watch._points.doing = object()  # type: ignore[assignment] # cannot be sent
            watch._thread.join(10)
            assert not watch._thread.is_alive()
    assert "no rank is watched any more" in caplog.text
