"""Takes and restores the states of a rank's random number generators: torch's, the accelerator's, Python's, NumPy's."""

from __future__ import annotations

import base64
import json
import random
import struct
import sys
from typing import Any

import torch

__all__ = ["random_state", "restore_random_state"]

_START = b'{"torch"'
_OLD = struct.Struct("<625I?d624Iqqd")  # Python's state, and NumPy's; torch's and CUDA's follow


def random_state(device_type: str | None = None) -> bytes:
    """Return the states of all random number generators of this process, as JSON. Not collective.

    NumPy's global generator is included if the process has imported NumPy.

    Args:
        device_type: The type of the model's device; the generator of the current device is included. ``None``: the
            type of this machine's accelerator, if it has one.
    """
    state: dict[str, Any] = {"torch": _encode(torch.get_rng_state()), "python": random.getstate()}
    if (device_type := device_type or _accelerator()) != "cpu":
        state[device_type] = _encode(torch.get_device_module(device_type).get_rng_state())
    if "numpy" in sys.modules:
        name, words, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, [int(word) for word in words], *rest]
    return json.dumps(state).encode()


def restore_random_state(packed: bytes, device_type: str | None = None) -> None:
    """Set the random number generators of this process to such states. Not collective.

    Args:
        packed: What `random_state` returned, or what earlier versions of the MMEngine adapter stored.
        device_type: See `random_state`.
    """
    state = json.loads(packed) if packed.startswith(_START) else _read_old(packed)
    torch.set_rng_state(_decode(state["torch"]))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if state.get(device_type := device_type or _accelerator()):
        torch.get_device_module(device_type).set_rng_state(_decode(state[device_type]))
    if "numpy" in state:
        import numpy as np  # only where the run used it

        name, words, *rest = state["numpy"]
        np.random.set_state((name, np.array(words, dtype=np.uint32), *rest))


def _accelerator() -> str:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if found is None else found.type


def _read_old(packed: bytes) -> dict[str, Any]:
    values, rest = _OLD.unpack_from(packed), packed[_OLD.size :]
    words, (has_gauss, gauss), numpy = values[:625], values[625:627], values[627:]
    size = torch.get_rng_state().numel()
    return {
        "python": (3, words, gauss if has_gauss else None),
        "numpy": ("MT19937", numpy[:624], *numpy[624:]),
        "torch": base64.b64encode(rest[:size]),
        "cuda": base64.b64encode(rest[size:]),
    }


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _decode(text: str | bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
