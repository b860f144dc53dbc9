"""Signals that end a job: whenever one comes, all ranks save after the same step, leave in time, and resume exactly."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.forked_scripts import environ_alone, python
from torch import nn

import mmfsdp
from mmfsdp import errors
from mmfsdp.collective import scope_of
from mmfsdp.saving.loop import step_messages
from mmfsdp.saving.loop.step_messages import Notice, StepMessages
from mmfsdp.testing import close_ranks, run_ranks, single_rank

STEPS = 12
AT = 6  # the step at which a signal comes
MOMENTS = ["start-up", "loading", "step", "compiling", "collective", "saving", "evaluation", "on all ranks", "request"]


@pytest.fixture(autouse=True, scope="module")
def fresh_ranks() -> Iterator[None]:
    """End the ranks that are about to leave as soon as their time is over."""
    yield
    close_ranks()


def come(number: int = signal.SIGTERM, after: float = 0.0) -> None:
    """Send this process a signal, as a scheduler would."""
    threading.Timer(after, os.kill, (os.getpid(), number)).start()


class Loop:
    """A training loop, to which a signal may come at some moment of step `AT`, on the second of two ranks."""

    def __init__(self, rank: int, moment: str) -> None:
        torch.manual_seed(0)
        self.model = mmfsdp.shard(nn.Sequential(nn.Linear(16, 32), nn.Dropout(), nn.Linear(32, 4)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        torch.manual_seed(rank)
        self.rank, self.moment = rank, moment

    def comes(self, moment: str, step: int) -> bool:
        hit = self.rank == 1 or self.moment == "on all ranks"
        return hit and self.moment == moment and step == AT

    def step(self, step: int) -> None:
        if self.comes("loading", step):
            come(after=0.05)
            time.sleep(0.2)
        if self.comes("step", step) or self.comes("on all ranks", step):
            os.kill(os.getpid(), signal.SIGUSR1 if self.rank else signal.SIGTERM)
        if self.comes("collective", step):
            come(after=0.05)  # Python's own handler would have to wait for the rank that is late
        if self.moment == "collective" and self.rank == 0 and step == AT:
            time.sleep(0.3)
        if self.comes("compiling", step):
            come(after=0.05)
            torch.compile(lambda x: torch.sin(x) * 2 + x, backend="aot_eager")(torch.ones(3))
        self.model(torch.randn(4, 16)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, folder: str | None) -> int:
        """Train to the end, and return the step at which the run was left, or `STEPS`."""
        if folder is None:
            for step in range(1, STEPS + 1):
                self.step(step)
            return STEPS
        with mmfsdp.CheckpointManager(
            folder, self.model, self.optimizer, max_to_keep=1, grace_seconds=600, exit_code=76
        ) as manager:
            if self.moment == "start-up" and self.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            step = first = manager.resume()
            try:
                for step in range(first + 1, STEPS + 1):
                    self.step(step)
                    if self.comes("saving", step):
                        come()
                    if self.comes("request", step):
                        manager.request_stop()
                    if self.moment == "saving" and step == AT:
                        manager.save(step)  # in the background
                    if self.moment == "evaluation" and step == AT:
                        for batch in range(100):
                            if batch == 3 and self.rank == 1:
                                come()
                            time.sleep(0.01)
                            manager.leave_if_asked(step)
                        return -1
                    manager.step(step)
            except SystemExit as left:
                return step if left.code == 76 else -1
        return step

    def state(self) -> Any:
        weights = mmfsdp.model_state_dict(self.model, rank0_only=False)
        return weights, mmfsdp.optim_state_dict(self.model, self.optimizer, rank0_only=False), torch.rand(4)


def leave_and_resume(rank: int, folder: str) -> dict[str, tuple[int, bool, Any]]:
    """For each moment the step of leaving, whether a checkpoint of it was complete then, and the state at the end."""
    step_messages._OFTEN = 0.0  # a message per step, however fast
    loop = Loop(rank, "")
    loop.run(None)
    found: dict[str, tuple[int, bool, Any]] = {"whole": (STEPS, True, loop.state())}
    for moment in MOMENTS:
        left = Loop(rank, moment).run(f"{folder}/{moment}")
        complete = Path(folder, moment, f"step_{left}").is_dir()
        dist.barrier()
        loop = Loop(rank, "")
        assert loop.run(f"{folder}/{moment}") == STEPS
        found[moment] = left, complete, loop.state()
    return found


@pytest.mark.exhaustive
def test_whenever_a_signal_comes_ranks_leave_at_one_step_and_resume_exactly(tmp_path: Path) -> None:
    first, second = run_ranks(leave_and_resume, 2, str(tmp_path))
    for moment in MOMENTS:
        for own, other in ((first, second), (second, first)):
            left, complete, state = own[moment]
            assert left == other[moment][0], moment
            assert complete, moment
            torch.testing.assert_close(state, own["whole"][2], rtol=0, atol=0)
        # One step later at most; at start-up the first step is the earliest.
        expected = {"start-up": (1, 2), "evaluation": (AT,)}.get(moment, (AT, AT + 1))
        assert first[moment][0] in expected, (moment, first[moment][0])


SLOW_STEP = """
import logging, os, signal, sys, time, torch, torch.distributed as dist, mmfsdp
former = os.dup2(os.pipe()[1], 200, inheritable=False)  # an event loop's, which has ended when the signals come
os.set_blocking(former, False)
signal.set_wakeup_fd(former)
logging.basicConfig(format="%(message)s")
dist.init_process_group("gloo")
model = mmfsdp.shard(torch.nn.Linear(4, 4))
with mmfsdp.CheckpointManager(sys.argv[1], model, grace_seconds=1.0, exit_code=int(sys.argv[2])) as manager:
    manager.save(3)
    manager.step(5)
    while not manager._loop.ledger.pending[1].done():  # saved in the background, while the step goes on
        time.sleep(0.05)
    os.close(former)
    print("training", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("code", [75, 0])
def test_a_step_that_takes_too_long_is_left_with_the_code_that_was_asked_for(code: int, tmp_path: Path) -> None:
    command = [python(), "-c", SLOW_STEP, str(tmp_path), str(code)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environ_alone(), **pipes) as job:  # type: ignore[call-overload]
        while (line := job.stdout.readline()) != "training\n":
            assert line.startswith("[Gloo]")  # which prints who is connected, before torch 2.10
        begun = time.monotonic()
        job.send_signal(signal.SIGTERM)
        said = job.stderr.readline()  # it has heard of the first signal, however busy the machine is
        job.send_signal(signal.SIGTERM)
        said += job.stderr.read()
        assert job.wait(60) == code
    assert 0.8 < time.monotonic() - begun < 30  # the step takes 60
    kept = "Step 3 is complete on disk; 2 steps done since."
    assert "SIGTERM: this rank saves after its step, and leaves within 1 s." in said
    assert f"SIGTERM, again: this rank is about to leave. {kept}" in said
    assert f"the step or save did not end within 1 s of the signal. {kept}" in said


PEER_DIES = """
import os, signal, sys, torch, torch.distributed as dist, mmfsdp
rank = int(os.fork() == 0)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=2)
model = mmfsdp.shard(torch.nn.Linear(4, 4))
with mmfsdp.CheckpointManager(f"{sys.argv[1]}/run", model, grace_seconds=600) as manager:
    for step in range(1, 1000):
        if step == 3:
            # The second rank dies; the launcher notices it, and sends the signal to the one that is left.
            os.kill(os.getpid(), signal.SIGKILL if rank else signal.SIGTERM)
        if sys.argv[2] == "collective":
            model(torch.ones(1, 4))
        manager.step(step)
"""


@pytest.mark.sample("collective")
@pytest.mark.parametrize("where", ["collective", "manager"])
def test_a_signal_that_means_a_dead_peer_waits_for_nobody(where: str, tmp_path: Path) -> None:
    begun = time.monotonic()
    command = [python(), "-c", PEER_DIES, str(tmp_path), where]
    ended = subprocess.run(command, env=environ_alone(), capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, time.monotonic() - begun < 100) == (1, True), ended.stderr
    assert ("LostRankError" if where == "manager" else "Error") in ended.stderr, ended.stderr


def test_signals_that_the_program_handles_are_left_to_it(tmp_path: Path) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    try:
        with single_rank():
            model = mmfsdp.shard(nn.Linear(4, 4))
            with mmfsdp.CheckpointManager(tmp_path, model) as manager:
                os.kill(os.getpid(), signal.SIGUSR1)
                manager.step(1)
                assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            assert signal.set_wakeup_fd(-1) == -1
            with mmfsdp.CheckpointManager(tmp_path, model, grace_seconds=None) as manager:
                assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
                with pytest.raises(errors.ConfigError, match="needs grace_seconds"):
                    manager.request_stop()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert came == [signal.SIGUSR1]


def test_leaving_does_not_wait_for_processes_that_were_forked(tmp_path: Path) -> None:
    with single_rank():
        model = mmfsdp.shard(nn.Linear(4, 4))
        with mmfsdp.watch_ranks(model, 60.0), mmfsdp.CheckpointManager(tmp_path, model):
            worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            worker.start()
            begun = time.monotonic()
        assert time.monotonic() - begun < 20
        worker.kill()
        worker.join()
        worker.close()


def outside_the_main_thread(folder: str, lines: list[str]) -> None:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Handler(logging.WARNING)
    logging.getLogger("mmfsdp.saving").addHandler(handler)
    with single_rank():
        mmfsdp.CheckpointManager(folder, mmfsdp.shard(nn.Linear(4, 4))).close()
    logging.getLogger("mmfsdp.saving").removeHandler(handler)


def test_a_manager_outside_of_the_main_thread_says_that_it_gets_no_signals(tmp_path: Path) -> None:
    lines: list[str] = []
    thread = threading.Thread(target=outside_the_main_thread, args=(str(tmp_path), lines))
    thread.start()
    thread.join()
    assert any("made outside of the main thread" in line for line in lines), lines


class _Clock:
    """A clock of which each rank has its own."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def count_messages(rank: int, seconds: float, steps: int) -> tuple[int, list[int]]:
    """Exchange notices after steps that take so long; rank 1 is asked to stop after half of them."""
    clock = _Clock()
    real, step_messages.time = step_messages.time, clock  # type: ignore[attr-defined, assignment]
    try:
        messages, sent, heard = StepMessages(scope_of(None)), [], []

        def own() -> Notice:
            sent.append(step)
            return Notice(stop=rank == 1 and step >= steps // 2)

        for step in range(steps):
            clock.now += seconds * (1 + rank)
            notice = messages.read(own)
            if notice is not None and notice.stop:
                assert notice.sender == 1
                heard.append(step)
            messages.send(own)
        messages.receive()
    finally:
        step_messages.time = real  # type: ignore[attr-defined]
    return len(sent), heard


@pytest.mark.parametrize(
    ("seconds", "number", "delay"),
    [(2.0, 40, 0), (0.3, 40, 1), (0.01, 5, 13), (1e-5, 2, None)],
)
def test_fast_steps_send_few_messages_and_slow_ones_wait_for_theirs(
    seconds: float, number: int, delay: int | None
) -> None:
    first, second = run_ranks(count_messages, 2, seconds, 40)
    assert first == second
    sent, heard = first
    assert sent <= number + 1
    if delay is not None:
        assert heard[0] - 20 <= delay


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"grace_seconds": 0}, "grace_seconds=0 is not a positive number"),
        ({"exit_code": 256}, "exit_code=256 is not a whole number from 0 to 255"),
        ({"exit_code": True}, "exit_code=True is not"),
    ],
)
def test_wrong_settings_are_named(setting: dict[str, Any], message: str, tmp_path: Path) -> None:
    with single_rank(), pytest.raises(errors.ConfigError, match=message):
        mmfsdp.CheckpointManager(tmp_path, mmfsdp.shard(nn.Linear(2, 2)), **setting)
