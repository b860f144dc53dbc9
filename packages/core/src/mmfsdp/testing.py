"""Runs functions on several ranks, as real processes over gloo: for tests, and for experiments on a laptop."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from mmfsdp.basics.torch_version import require_torch
from mmfsdp.errors import MmfsdpError

require_torch("mmfsdp.testing")

# isort: split
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

__all__ = ["RankError", "close_ranks", "preload", "run_alone", "run_ranks", "single_rank"]

_Answer = tuple[BaseException | None, Any, str]
_CALLS = 40  # then processes are replaced, or
_THREADS = 60  # once they have as many threads: gloo keeps busy ones for each group that was ever made
_MEMORY = "/dev/shm"  # on Linux
_GRACE = 5.0  # seconds that the other ranks get to end once one has failed
_WAIT = timedelta(minutes=10)  # longer than calls may take: gloo's error would say where one rank waits, not all
_DUMP = 0.5  # seconds that a rank gets to write where it is
_pools: dict[int, list[_Pool]] = {}
_preloaded = [__name__, "torch.distributed.fsdp", "torch.distributed.tensor"]
_preloaded += ["torch._dynamo", "torch.distributed.checkpoint"]  # torch itself imports these on first use
_preloaded += ["mmfsdp.torch_style.wrapper", "mmfsdp.saving.reading.load", "mmfsdp.saving.writing.save"]


class RankError(MmfsdpError):
    """A function failed on some rank; ``errors`` holds the exception of each rank, or None."""

    errors: list[BaseException | None]


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 240.0) -> list[Any]:
    """Call ``function(rank, *args)`` on every rank of a gloo world and return the results by rank.

    The processes serve several calls with the same ``world_size``. If one fails or hangs, all are ended.

    Args:
        function: A function at the top level of a module, which other processes can import.
        world_size: Number of ranks.
        *args: Picklable arguments. Results must be picklable too.
        timeout: Seconds to wait for all ranks; a disk that is busy may hold them up for a minute.

    Raises:
        RankError: A rank raised or did not answer; the message contains its traceback, and (not on Windows) where the
            ranks are that did not answer.
    """
    [pool] = _kept(world_size, 1)
    try:
        found = pool.results(function, args, timeout)
    except BaseException:
        _drop(world_size)
        raise
    if pool.is_worn():
        _drop(world_size)
    return found


def run_alone(
    function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], *, at_once: int = 2, timeout: float = 240.0
) -> list[Any]:
    """Call ``function(0, *job)`` for each job, each in a gloo world of one process, and return the results in order.

    Like the processes of `run_ranks`, these serve several calls.

    Args:
        function: A function at the top level of a module, which other processes can import.
        jobs: Picklable arguments of each call. Results must be picklable too.
        at_once: How many processes share the jobs among them.
        timeout: Seconds to wait for a call.

    Raises:
        RankError: A call raised or did not end; the message contains its traceback.
    """
    pools = _kept(1, min(at_once, len(jobs)))

    def share(index: int) -> list[Any]:
        return [pools[index].results(function, job, timeout)[0] for job in jobs[index :: len(pools)]]

    try:
        with ThreadPoolExecutor(max(len(pools), 1)) as threads:
            shares = [*threads.map(share, range(len(pools)))]
    except BaseException:
        _drop(1)
        raise
    if any(pool.is_worn() for pool in pools):
        _drop(1)
    return [shares[index % len(pools)][index // len(pools)] for index in range(len(jobs))]


def preload(*modules: str) -> None:
    """Import modules once for all ranks, so that starting ranks takes less time. Not collective.

    The process that ranks are forked from imports them; they must not start threads. Call this before the first
    `run_ranks`; it has an effect on Linux only.
    """
    _preloaded.extend(modules)


def close_ranks() -> None:
    """End all processes that `run_ranks` keeps."""
    for world_size in list(_pools):
        _drop(world_size)


@contextmanager
def single_rank() -> Iterator[None]:
    """Initialise a gloo world that contains only this process."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


class _Pool:
    def __init__(self, world_size: int) -> None:
        context = _context()
        self.calls = 0
        self.silent = ""  # where the ranks are that have not answered the last call
        self._idle = True
        # In memory if it can be: ranks that want to meet would wait for a disk that is busy.
        self._folder = tempfile.TemporaryDirectory(dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            here, there = context.Pipe()
            settings = (rank, world_size, self._folder.name, {**os.environ})
            process = context.Process(target=_serve, args=(*settings, there), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)
        # Paused ranks do not notice that this process was killed; one that is never paused does.
        self._life, theirs = context.Pipe()
        pids = [process.pid for process in self._processes]
        self._waker = context.Process(target=_wake_orphans, args=(pids, theirs), daemon=True)
        self._waker.start()
        # Not atexit: a child of multiprocessing runs none of it, or what was registered after the fork, and would then
        # wait for paused ranks. A finalizer runs before that wait, once, and in this process only.
        self.close = Finalize(None, self._close, exitpriority=1)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[_Answer]:
        self._idle = False
        self._signal("SIGCONT")
        try:
            answers = self._call(function, args, timeout)
            self._idle = len(answers) == len(self._pipes)
            return [answers.get(pipe, (None, None, "")) for pipe in self._pipes]
        finally:
            self._signal("SIGSTOP")  # an idle gloo thread takes up to 5 % of a core

    def results(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        answers = self.call(function, args, timeout)
        self.calls += 1
        errors = [error for error, _, _ in answers]
        if any(errors):
            rank, (_, _, trace) = next((rank, answer) for rank, answer in enumerate(answers) if answer[0] is not None)
            failure = RankError(f"{function.__name__} failed on rank {rank}:\n{trace}{self.silent}")
            failure.errors = errors
            raise failure
        return [result for _, result, _ in answers]

    def is_worn(self) -> bool:
        """Whether new processes would be faster."""
        try:
            threads = len(os.listdir(f"/proc/{self._processes[0].pid}/task"))
        except OSError:  # only Linux tells
            threads = 0
        return self.calls >= _CALLS or threads > _THREADS

    def _signal(self, name: str) -> None:
        number = getattr(signal, name, None)  # not on Windows
        for process in self._processes:
            if number is not None and process.is_alive():
                with contextlib.suppress(ProcessLookupError):  # it has died in between
                    os.kill(process.pid, number)

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> dict[Connection, _Answer]:
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # the rank has died; its silence is noticed below
                pipe.send((function, args))
        answers: dict[Connection, _Answer] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(self._pipes):
            waiting = [pipe for pipe in self._pipes if pipe not in answers]
            ready = wait(waiting, max(deadline - time.monotonic(), 0))
            if not ready:
                break
            for pipe in self._pipes:
                if pipe in ready:
                    answers[pipe] = self._receive(pipe, function)
            if any(error for error, _, _ in answers.values()):
                # The others may wait in a collective for the rank that failed.
                deadline = min(deadline, time.monotonic() + _GRACE)
        late = [rank for rank, pipe in enumerate(self._pipes) if pipe not in answers]
        self.silent = "".join(map(self._whereabouts, late))
        if late and not any(error for error, _, _ in answers.values()):
            raise RankError(
                f"{function.__name__} did not end on rank {late[0]} within {timeout:.0f} s.{self.silent}", rank=late[0]
            )
        return answers

    def _whereabouts(self, rank: int) -> str:
        """Return the stacks of a rank that does not answer."""
        self._processes[rank].join(timeout=0)  # one that has died is no longer alive
        number = getattr(signal, "SIGUSR1", None)
        path = _stacks(self._folder.name, rank)
        if number is None or not self._processes[rank].is_alive() or not path.exists():
            return ""
        os.kill(self._processes[rank].pid, number)
        time.sleep(_DUMP)
        return f"\nRank {rank} does not answer. It is here:\n{path.read_text()}"

    def _receive(self, pipe: Connection, function: Callable[..., Any]) -> _Answer:
        try:
            answer: _Answer = pipe.recv()
        except (EOFError, ConnectionResetError):
            rank = self._pipes.index(pipe)
            raise RankError(f"{function.__name__}: rank {rank} {self._death(rank)}", rank=rank) from None
        return answer

    def _death(self, rank: int) -> str:
        """Return how a rank died, and its stacks if it could write them: on a segmentation fault, for example."""
        process, path = self._processes[rank], _stacks(self._folder.name, rank)
        process.join(timeout=_GRACE)
        code = process.exitcode
        if code is None:
            return "died, or closed its connection."
        if code >= 0:
            return f"died with exit code {code}."
        name = signal.Signals(-code).name if -code in [*signal.Signals] else f"signal {-code}"
        hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
        stacks = path.read_text(errors="replace") if path.exists() else ""
        return f"died of {name}{hint}." + (f" It was here:\n{stacks}" if stacks else "")

    def _close(self) -> None:
        """Ask idle ranks to end, so that coverage can save its data, and kill the others."""
        if self._idle:
            self._signal("SIGCONT")
            for pipe in self._pipes:
                with contextlib.suppress(OSError):  # the rank has died
                    pipe.send(None)
        for process in self._processes:
            if self._idle:
                process.join(timeout=_GRACE)
            process.kill()
            process.join()
        self._life.close()
        self._waker.join()
        self._folder.cleanup()


def _context() -> Any:
    """Return how ranks are started: forked from a server process that has imported torch but has no threads or groups.

    The server starts with the first ranks and lives as long as this process. Importing torch only once saves one to two
    seconds per rank.
    """
    if sys.platform != "linux":
        return mp.get_context("spawn")  # elsewhere system libraries do not survive a fork
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_preloaded)
    return context


def _kept(world_size: int, count: int) -> list[_Pool]:
    """Return worlds of a size that are kept, and new ones if there are fewer."""
    found = _pools.setdefault(world_size, [])
    found.extend(_Pool(world_size) for _ in range(count - len(found)))
    return found[:count]


def _drop(world_size: int) -> None:
    for pool in _pools.pop(world_size, []):
        pool.close()


def _serve(rank: int, world_size: int, folder: str, environ: dict[str, str], pipe: Connection) -> None:
    os.environ.clear()  # the server's environment is as old as the server
    os.environ.update(
        environ, RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size)
    )
    if hasattr(signal, "SIGUSR1"):
        stacks = _stacks(folder, rank).open("w")  # as long as the process lives
        faulthandler.register(signal.SIGUSR1, stacks)
        faulthandler.enable(stacks)
    gc.freeze()  # what the server has imported is never garbage, and looking through it takes long
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=_WAIT
    )
    while True:
        try:
            call = pipe.recv()
        except EOFError:  # the process that started this one was killed
            call = None
        if call is None:
            os._exit(0)  # gloo's threads may fail to end in order
        function, args = call
        try:
            torch.manual_seed(0)
            answer: _Answer = (None, function(rank, *args), "")
        except BaseException as error:  # test tools raise errors that are not Exceptions
            answer = (_portable(error), None, traceback.format_exc())
        pipe.send(answer)


def _wake_orphans(pids: list[int], life: Connection) -> None:
    """Let ranks go on, and so end, once the process that paused them has ended."""
    with contextlib.suppress(EOFError):
        life.recv()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, and may be another's by now
            os.kill(pid, signal.SIGCONT)


def _stacks(folder: str, rank: int) -> Path:
    return Path(folder, f"stacks-{rank}")


def _portable(error: BaseException) -> BaseException:
    """Return the error if it can be sent to the parent, else a RuntimeError with its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
