"""Takes and restores the states of a rank's random number generators: torch's, the accelerator's, Python's, NumPy's."""

from __future__ import annotations

import base64
import json
import random
import sys
from typing import Any

import torch

__all__ = ["random_state", "restore_random_state"]


def random_state(device_type: str) -> bytes:
    """Return the states of all generators of this process, as JSON. Not collective.

    NumPy's global generator is included if the process has imported NumPy.

    Args:
        device_type: The type of the model's device; the generator of the current device is included.
    """
    state: dict[str, Any] = {"torch": _encode(torch.get_rng_state()), "python": random.getstate()}
    if device_type != "cpu":
        state[device_type] = _encode(torch.get_device_module(device_type).get_rng_state())
    if "numpy" in sys.modules:
        name, words, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, [int(word) for word in words], *rest]
    return json.dumps(state).encode()


def restore_random_state(packed: bytes, device_type: str) -> None:
    """Set the generators of this process to what `random_state` returned. Not collective."""
    state = json.loads(packed)
    torch.set_rng_state(_decode(state["torch"]))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if device_type in state:
        torch.get_device_module(device_type).set_rng_state(_decode(state[device_type]))
    if "numpy" in state:
        import numpy as np  # only where the run used it

        name, words, *rest = state["numpy"]
        np.random.set_state((name, np.array(words, dtype=np.uint32), *rest))


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
