"""The states of a process's random number generators, as bytes, and those of all ranks as a table."""

from __future__ import annotations

import random
import struct

import numpy as np
import torch

import mmfsdp
from mmfsdp.collective import scope_of
from mmfsdp.runtime import find_sharded_model
from mmfsdp.saving import load_row, random_state, restore_random_state, rows_of_ranks
from mmfsdp.testing import run_ranks


def draw() -> list[float]:
    return [random.gauss(0, 1), random.random(), np.random.normal(), np.random.rand(), torch.rand(()).item()]


def packed_as_before() -> bytes:
    """Return the states as earlier versions of the MMEngine adapter stored them."""
    _, words, gauss = random.getstate()
    _, keys, *rest = np.random.get_state(legacy=True)
    return (
        struct.pack("<625I?d", *words, gauss is not None, gauss or 0.0)
        + struct.pack("<624Iqqd", *keys.tolist(), *rest)  # type: ignore[union-attr]
        + bytes(torch.get_rng_state().tolist())
    )


def test_every_generator_comes_back() -> None:
    random.gauss(0, 1)  # half of a pair is kept for the next call
    np.random.normal()
    states = [random_state(), packed_as_before()]
    first = draw()
    for state in states:
        assert draw() != first
        restore_random_state(state)
        assert draw() == first


def test_each_rank_gets_its_own_row() -> None:
    first, *others = run_ranks(table_of_ranks, 3)
    assert first == (3, b"0", b"0")
    assert others == [(0, b"11", b"11"), (0, b"222", b"222")]


def table_of_ranks(rank: int) -> tuple[int, bytes, bytes]:
    mesh = find_sharded_model(mmfsdp.shard(torch.nn.Linear(4, 4))).mesh
    scope, own = scope_of(mesh), str(rank).encode() * (rank + 1)
    whole = rows_of_ranks(own, mesh, scope, whole=True)
    rows = rows_of_ranks(own, mesh, scope, whole=False)
    bare = torch.tensor([[*str(one).encode() * (one + 1)] + [0] * (2 - one) for one in range(3)], dtype=torch.uint8)
    return len(whole), load_row(rows, scope), load_row(bare, scope, has_head=False).rstrip(b"\0")
