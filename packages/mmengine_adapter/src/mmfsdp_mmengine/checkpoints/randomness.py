"""Saves and restores the states of all random number generators, of one rank as bytes and of all ranks as a table."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Shard

from mmfsdp.collective import gather_to_first, place_in, scope_of
from mmfsdp.runtime import find_sharded_model
from mmfsdp.state import whole_value

__all__ = ["kept_randomness", "own_random_state", "random_state", "random_states", "restore_random_state"]

_PYTHON = struct.Struct("<625I?d")
_NUMPY = struct.Struct("<624Iqqd")


def random_state() -> torch.Tensor:
    """Return the state of this process's generators: Python's, numpy's global one, torch's, and the GPU's.

    Returns:
        A 1-D CPU tensor of uint8, of the same length in every process of a run.
    """
    _, words, gauss = random.getstate()
    python = _PYTHON.pack(*words, gauss is not None, gauss or 0.0)
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    numpy = _NUMPY.pack(*keys.tolist(), position, has_gauss, cached)  # type: ignore[union-attr]
    parts = [torch.frombuffer(bytearray(python + numpy), dtype=torch.uint8), torch.get_rng_state()]
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_rng_state())
    return torch.cat(parts)


def restore_random_state(state: torch.Tensor) -> None:
    """Set the generators to a state that `random_state` returned; the GPU's only if it was saved.

    Args:
        state: A 1-D CPU tensor of uint8. Not changed.
    """
    raw = state[: _PYTHON.size + _NUMPY.size].numpy().tobytes()
    *words, has_gauss, gauss = _PYTHON.unpack(raw[: _PYTHON.size])
    random.setstate((3, tuple(words), gauss if has_gauss else None))
    *keys, position, has_cached, cached = _NUMPY.unpack(raw[_PYTHON.size :])
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_cached, cached))
    rest = state[_PYTHON.size + _NUMPY.size :]
    size = torch.get_rng_state().numel()
    torch.set_rng_state(rest[:size].clone())
    if torch.cuda.is_available() and rest.numel() > size:
        torch.cuda.set_rng_state(rest[size:].clone())


@contextmanager
def kept_randomness() -> Iterator[None]:
    """Restore the generators' present state at the end of the context."""
    before = random_state()
    try:
        yield
    finally:
        restore_random_state(before)


def random_states(model: nn.Module, state: torch.Tensor, *, whole: bool) -> torch.Tensor:
    """Return the random states of all ranks, one row per rank in the order of the mesh. Collective: every rank.

    Args:
        model: The sharded model, whose mesh lists the ranks.
        state: This rank's state, see `random_state`.
        whole: Return the whole ``(ranks, bytes)`` table of uint8 on the first rank, and an empty one on the others;
            otherwise a DTensor, whose rows are the ranks' own.
    """
    mesh = find_sharded_model(model).mesh
    if whole:
        rows = gather_to_first(scope_of(mesh), state)
        return state.new_empty((0, state.numel())) if rows is None else torch.stack(rows)
    row = state.unsqueeze(0).to(mesh.device_type)
    shape = torch.Size((mesh.size(), state.numel()))
    return DTensor.from_local(
        row, mesh, [Shard(0)] * mesh.ndim, run_check=False, shape=shape, stride=(state.numel(), 1)
    )


def own_random_state(model: nn.Module, progress: Mapping[str, Any]) -> torch.Tensor | None:
    """Return this rank's row of a saved table, or None if the mesh had another size. Not collective."""
    mesh = find_sharded_model(model).mesh
    table = progress.get("random_states")
    if table is None or table.shape[0] != mesh.size():
        return None
    row: torch.Tensor = whole_value(table)[place_in(mesh)]
    return row
