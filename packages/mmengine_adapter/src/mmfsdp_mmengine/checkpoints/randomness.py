"""Saves and restores the state of Python's, numpy's and torch's random number generators as bytes of fixed size."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["kept_randomness", "random_state", "restore_random_state"]

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
