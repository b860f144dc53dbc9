"""Running functions on several ranks: real processes over gloo, for tests and for trying things on a laptop."""

from __future__ import annotations

import atexit
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mmfsdp.errors import MmfsdpError

__all__ = ["RankError", "close_ranks", "run_ranks", "single_rank"]

_pools: dict[int, _Pool] = {}


class RankError(MmfsdpError):
    """A function failed on some rank; ``errors`` holds each rank's exception, or None."""

    errors: list[BaseException | None]


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call ``function(rank, *args)`` on every rank of a gloo world and return the results by rank.

    The processes are kept for the next call with the same ``world_size``; one that fails or hangs ends them all.

    Args:
        function: Defined at the top of a module, so that other processes can import it.
        world_size: Number of ranks.
        *args: Picklable arguments. Results must be picklable too.
        timeout: Seconds to wait for all ranks.

    Raises:
        RankError: A rank raised or did not answer; its traceback is in the message.
    """
    pool = _pools.get(world_size)
    if pool is None:
        pool = _pools[world_size] = _Pool(world_size)
    try:
        answers = pool.call(function, args, timeout)
    except BaseException:
        _drop(world_size)
        raise
    errors = [error for error, _, _ in answers]
    if any(errors):
        _drop(world_size)
        rank, (_, _, trace) = next((rank, answer) for rank, answer in enumerate(answers) if answer[0] is not None)
        failure = RankError(f"{function.__name__} failed on rank {rank}:\n{trace}")
        failure.errors = errors
        raise failure
    return [result for _, result, _ in answers]


def close_ranks() -> None:
    """End all processes that `run_ranks` keeps."""
    for world_size in list(_pools):
        _drop(world_size)


@contextmanager
def single_rank() -> Iterator[None]:
    """A gloo world of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


class _Pool:
    def __init__(self, world_size: int) -> None:
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, self._folder.name, there), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(timeout):
                raise RankError(f"{function.__name__} did not end on rank {rank} within {timeout:.0f} s.", rank=rank)
            try:
                answers.append(pipe.recv())
            except EOFError:
                raise RankError(f"{function.__name__}: rank {rank} died.", rank=rank) from None
        return answers

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _drop(world_size: int) -> None:
    pool = _pools.pop(world_size, None)
    if pool is not None:
        pool.close()


def _serve(rank: int, world_size: int, folder: str, pipe: Connection) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size)
    )
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=timedelta(seconds=90)
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            answer = (None, function(rank, *args), "")
        except Exception as error:
            answer = (_portable(error), None, traceback.format_exc())
        pipe.send(answer)


def _portable(error: Exception) -> Exception:
    """The error if it can be sent to the parent, else one like it."""
    import pickle

    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


atexit.register(close_ranks)
