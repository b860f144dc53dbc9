"""Runs functions in process groups of several sizes, on new processes or on those that torchrun has started."""

from __future__ import annotations

import json
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mmfsdp.errors import ConfigError, ShardStateError
from mmfsdp.sharding.devices import device_index
from mmfsdp.testing import RankError, run_alone, run_ranks

__all__ = ["Launched", "Local", "are_launched"]

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PATIENCE = timedelta(hours=12)  # for ranks that train alone meanwhile; a launcher ends all when one has failed

T = TypeVar("T")


def are_launched() -> bool:
    """Return whether a launcher such as torchrun has started this process as one of several."""
    return all(name in os.environ for name in _NEEDED) and int(os.environ["WORLD_SIZE"]) > 1


class Local:
    """New processes on this machine, which compute on the CPU and communicate over gloo."""

    device = "cpu"
    rank = 0

    def alone(self, function: Callable[..., T], jobs: Sequence[tuple[Any, ...]], at_once: int) -> list[T]:
        """Call ``function(0, *job)`` for each job in a world of one process, on as many cores or ``at_once``."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return run_alone(function, jobs, at_once=min(cores, at_once), timeout=_PATIENCE.total_seconds())

    def together(self, function: Callable[..., T], count: int, *args: Any) -> list[T]:
        """Call ``function(rank, *args)`` in a world of ``count`` processes, and return the results by rank."""
        return run_ranks(function, count, *args, timeout=_PATIENCE.total_seconds())

    def decide(self, function: Callable[[], T]) -> T:
        """Return the result of a function that one process calls."""
        return function()

    @contextmanager
    def folder(self, given: str | Path | None) -> Iterator[Path]:
        """Yield the folder that was given, or one that is removed at the end."""
        if given is not None:
            yield Path(given)
            return
        with tempfile.TemporaryDirectory() as made:
            yield Path(made)


class Launched:
    """The processes of a launcher, on the accelerators if there are any. Every process makes one and calls the same.

    Each method makes process groups of its own and ends them. Results must be plain values that JSON holds.

    Raises:
        ShardStateError: This process has a process group already.
        MeshError: This machine has fewer accelerators than processes.
    """

    def __init__(self) -> None:
        if dist.is_initialized():
            raise ShardStateError(
                "prove() makes process groups of several sizes, but this process has one already. Call it before "
                "torch.distributed.init_process_group(), or after destroy_process_group()."
            )
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self.device, self._backend = "cpu", "gloo"
        if accelerator is not None:
            self.device = accelerator.type
            self._backend = f"cpu:gloo,{self.device}:{dist.get_default_backend_for_device(self.device)}"
            count = torch.accelerator.device_count()
            torch.accelerator.set_device_index(device_index(int(os.environ.get("LOCAL_RANK", "0")), count))
        self._store, self.rank, self.world = next(iter(dist.rendezvous("env://")))  # type: ignore[attr-defined]
        self._calls = 0

    def alone(self, function: Callable[..., T], jobs: Sequence[tuple[Any, ...]], at_once: int) -> list[T]:
        """Call ``function(0, *job)`` for each job in a world of one process; all processes share them."""

        def act() -> dict[int, T]:
            found = {}
            for index in range(self.rank, len(jobs), self.world):
                with self._group(dist.HashStore(), 0, 1):  # type: ignore[attr-defined]
                    found[index] = function(0, *jobs[index])
            return found

        results = {int(index): result for part in self._all(act) for index, result in part.items()}
        return [results[index] for index in range(len(jobs))]

    def together(self, function: Callable[..., T], count: int, *args: Any) -> list[T]:
        """Call ``function(rank, *args)`` on the first ``count`` processes, and return their results by rank."""
        part = self._part()

        def act() -> T | None:
            if self.rank >= count:
                return None
            with self._group(part, self.rank, count):
                return function(self.rank, *args)

        found: list[Any] = self._all(act)[:count]
        return found

    def decide(self, function: Callable[[], T]) -> T:
        """Return, on every process, the result of a function that the first one calls; it may be any object."""
        box: list[Any] = [None]

        def act() -> None:
            if self.rank == 0:
                box[0] = function()

        self._all(act)
        with self._group(self._part(), self.rank, self.world):
            dist.broadcast_object_list(box, device=torch.device("cpu"))
        found: T = box[0]
        return found

    @contextmanager
    def folder(self, given: str | Path | None) -> Iterator[Path]:
        """Yield the folder that was given, or one of the first process, which removes it at the end.

        Raises:
            ConfigError: Not all processes see it.
        """
        own = tempfile.TemporaryDirectory() if given is None and self.rank == 0 else None
        try:
            home = Path(given or self._all(lambda: "" if own is None else own.name)[0])
            mark = home / "launched"

            def begin() -> None:
                home.mkdir(parents=True, exist_ok=True)
                mark.touch()

            self._all(lambda: begin() if self.rank == 0 else None)
            blind = [rank for rank, sees in enumerate(self._all(mark.exists)) if not sees]
            if blind:
                raise ConfigError(
                    f"Ranks {', '.join(map(str, blind))} do not see {str(home)!r} of rank 0. Pass folder=..., on a "
                    "disk that all machines share.",
                    config="folder",
                )
            yield home
            self._all(lambda: None)  # all have read what they need
            if self.rank == 0:
                mark.unlink()
                # The store may live in this process.
                self._store.wait([f"left/{rank}" for rank in range(1, self.world)], _PATIENCE)
            else:
                self._store.set(f"left/{self.rank}", "")
        finally:
            if own is not None:
                own.cleanup()

    @contextmanager
    def _group(self, store: Any, rank: int, count: int) -> Iterator[None]:
        dist.init_process_group(self._backend, store=store, rank=rank, world_size=count, timeout=_PATIENCE)
        try:
            yield
        finally:
            dist.destroy_process_group()

    def _part(self) -> Any:
        """Return a part of the store for one group; all processes ask in the same order."""
        self._calls += 1
        return dist.PrefixStore(f"group/{self._calls}", self._store)  # type: ignore[attr-defined]

    def _all(self, act: Callable[[], T]) -> list[T]:
        """Return what the function returns on each process.

        Raises:
            RankError: It failed on another process; on that one, its own error is raised.
        """
        self._calls += 1
        prefix = f"result/{self._calls}"
        try:
            answer = json.dumps({"result": act()})
        except BaseException:
            failure = json.dumps({"error": traceback.format_exc(), "rank": self.rank})
            self._store.set(f"{prefix}/all" if self.rank == 0 else f"{prefix}/{self.rank}", failure)
            raise
        if self.rank == 0:  # the others read a single answer
            found = [json.loads(answer), *(self._wait(f"{prefix}/{rank}") for rank in range(1, self.world))]
            failed = next((given for given in found if "error" in given), None)
            together = failed or {"results": [given["result"] for given in found]}
            self._store.set(f"{prefix}/all", json.dumps(together))
        else:
            self._store.set(f"{prefix}/{self.rank}", answer)
            together = self._wait(f"{prefix}/all")
        if "error" in together:
            raise RankError(f"Proving failed on rank {together['rank']}:\n{together['error']}", rank=together["rank"])
        results: list[Any] = together["results"]
        return results

    def _wait(self, key: str) -> dict[str, Any]:
        self._store.wait([key], _PATIENCE)
        value: dict[str, Any] = json.loads(self._store.get(key))
        return value
