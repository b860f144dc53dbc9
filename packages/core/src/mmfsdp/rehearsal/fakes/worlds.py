"""Gives a block of code its own world of ranks, beside the one that the process may be in.

torch keeps one world per process: the default group, and all groups by name. Here the calling thread gets an empty one
for a while, so that it can make groups without the other ranks; other threads, such as a save in the background, keep
the one that there is. This is private to torch, which does the same for its tests (``ThreadLocalWorld`` of
``torch.testing._internal``). The names exist in torch 2.9 to 2.15.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

__all__ = ["alone", "fake_world"]

_OWN = "_world"
_DICTS = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag", "pg_coalesce_state")
_numbers = itertools.count(1 << 32, 1 << 20)  # names of groups are numbers, and no two may have the same


class _Beside:
    """The world of one thread, and another one for all others."""

    def __init__(self, own: Any, others: Any) -> None:
        vars(self).update(_thread=threading.get_ident(), _own=own, _others=others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own if threading.get_ident() == self._thread else self._others, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._own if threading.get_ident() == self._thread else self._others, name, value)


@contextmanager
def fake_world(size: int, rank: int) -> Iterator[None]:
    """Be one rank of a world in which nothing is sent, also within another world. Not collective."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    with _apart():
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        yield


@contextmanager
def alone() -> Iterator[None]:
    """Be the only rank of a world over gloo, also within another world. Not collective."""
    with tempfile.TemporaryDirectory() as folder, _apart():
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        yield


@contextmanager
def _apart() -> Iterator[None]:
    """Give this thread an empty world; its groups are gone afterwards."""
    module: Any = distributed_c10d
    before, hook = vars(module)[_OWN], sys.excepthook  # torch's hook names the rank
    own = SimpleNamespace(default_pg=None, group_count=next(_numbers), comms=[], **{name: {} for name in _DICTS})
    setattr(module, _OWN, _Beside(own, before))
    _forget_meshes()
    try:
        yield
    finally:
        for group, name in own.pg_names.items():
            with suppress(RuntimeError):  # no backend can
                group.shutdown()
            module._unregister_process_group(name)
        sys.excepthook = hook
        setattr(module, _OWN, before)
        _distributed_c10d._set_global_rank(-1 if before.default_pg is None else before.default_pg.rank())
        _forget_meshes()


def _forget_meshes() -> None:
    """Empty DTensor's caches of shardings.

    Their entries hold meshes, and equal meshes of another world have the same key: results would lie on a mesh whose
    groups are gone, or not this world's.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache.cache_clear()
    # The cache of torch's C++ code, from 2.10 on.
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()
