"""Starts the process group of a run that its launcher restarts, and divides batches among its current ranks."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from mmfsdp.basics.text import name_list
from mmfsdp.collective.channels import host_of
from mmfsdp.errors import ConfigError, LostRankError, ShardStateError

__all__ = ["accumulation_steps", "init_process_group"]

_JOIN = timedelta(minutes=10)
_SHORTEST, _LONGEST = 0.01, 0.25  # seconds between two looks into the store


def init_process_group(
    backend: str | None = None, *, timeout: timedelta | None = None, join_timeout: timedelta = _JOIN, **kwargs: Any
) -> None:
    """Start the process group of a launcher's processes, after a restart, too. Collective: every process.

    Use it in place of ``torch.distributed.init_process_group`` under ``torchrun --max-restarts``. torchrun keeps the
    store in which ranks leave their addresses from one attempt to the next. With torch's function new ranks may find
    addresses of dead ones there, and then fail with "Connection refused", or hang.

    Args:
        backend: torch's backends. By default ``"cpu:gloo,cuda:nccl"`` where there is a GPU, else ``"gloo"``.
        timeout: How long a collective of the group may take; by default as long as torch allows.
        join_timeout: How long to wait for all ranks.
        **kwargs: Other arguments of ``torch.distributed.init_process_group``, such as ``device_id``.

    Raises:
        ShardStateError: The process group is initialised already.
        ConfigError: No launcher has set the variables, or an argument makes no sense here.
        LostRankError: Not all ranks came within ``join_timeout``.
    """
    if dist.is_initialized():
        raise ShardStateError("torch.distributed is initialised already. Call init_process_group() once per process.")
    if taken := [name for name in ("init_method", "store", "rank", "world_size") if name in kwargs]:
        raise ConfigError(
            f"init_process_group() takes {taken[0]} from the launcher. Leave it out, or call "
            "torch.distributed.init_process_group(), which does not survive restarts."
        )
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        store, rank, world_size = next(iter(rendezvous("env://", timeout=join_timeout)))
    except ValueError as error:
        raise ConfigError(
            f"No launcher has started this process ({error}). Start it with torchrun; for a trial in one process, use "
            "mmfsdp.testing.single_rank()."
        ) from error
    prefix = _agree_on_prefix(store, rank, world_size, join_timeout)
    fresh = PrefixStore(f"mmfsdp/{prefix}", store)
    dist.init_process_group(backend, store=fresh, rank=rank, world_size=world_size, timeout=timeout, **kwargs)


def accumulation_steps(global_batch: int, largest: int, ranks: int | None = None) -> int:
    """Return into how many parts a rank divides its share of a batch, so that the global batch never changes.

    With the ranks that there are now, each takes ``global_batch / ranks`` samples per step, in parts of the same size.

    Args:
        global_batch: Samples per step, over all ranks and parts.
        largest: Samples that a rank computes at once, at most.
        ranks: How many ranks get different batches: `data_parallel_size`. Default: all.

    Raises:
        ConfigError: The ranks cannot share the batch evenly, or a number makes no sense.
    """
    if ranks is None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
    for name, value in (("global_batch", global_batch), ("largest", largest), ("ranks", ranks)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}={value!r} is not a whole number of 1 or more.")
    if global_batch % ranks:
        fitting = next(count for count in range(ranks, 0, -1) if global_batch % count == 0)
        raise ConfigError(
            f"A global batch of {global_batch} cannot be shared by {ranks} ranks evenly. Run on {fitting} ranks, or "
            f"choose a batch that all numbers of ranks divide that the run may have, such as {ranks * largest}."
        )
    share = global_batch // ranks
    return next(parts for parts in range(1, share + 1) if share % parts == 0 and share // parts <= largest)


def _agree_on_prefix(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a text that all living ranks, and no rank of an earlier attempt, have.

    The store may hold keys of ranks that died. Each rank greets with a name of its own and takes only an answer to that
    name. The first rank answers every greeting that it finds, until each rank has confirmed its answer.
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"mmfsdp/greeting/{rank}", own)
        _wait(lambda: store.check([f"mmfsdp/answer/{own}"]), timeout, lambda: "rank 0")
        prefix = store.get(f"mmfsdp/answer/{own}").decode()
        store.set(f"mmfsdp/here/{prefix}/{rank}", "")
        return prefix
    silent, answered = set(range(1, world_size)), set[str]()

    def all_are_here() -> bool:
        for other in list(silent):
            if store.check([f"mmfsdp/here/{own}/{other}"]):
                silent.discard(other)
            elif store.check([f"mmfsdp/greeting/{other}"]):
                name = store.get(f"mmfsdp/greeting/{other}").decode()
                if name not in answered:
                    answered.add(name)
                    store.set(f"mmfsdp/answer/{name}", own)
        return not silent

    _wait(all_are_here, timeout, lambda: f"ranks {name_list(sorted(silent))}")
    return own


def _wait(ready: Callable[[], bool], timeout: timedelta, missing: Callable[[], str]) -> None:
    deadline, pause = monotonic() + timeout.total_seconds(), _SHORTEST
    while not ready():
        if monotonic() > deadline:
            raise LostRankError(
                f"Not all ranks came within {timeout.total_seconds():.0f} s (this is host {host_of()!r}); missing: "
                f"{missing()}. See the output of those ranks, or allow more join_timeout."
            )
        sleep(pause)
        pause = min(2 * pause, _LONGEST)
