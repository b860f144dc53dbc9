"""LSTM layers as oneDNN computes them on the CPU: the bytes that a layer keeps for backward, and its scratch memory.

oneDNN reports neither, and torch's fake kernel returns an empty workspace. torch 2.9, 2.13 and 2.15 ask for these sizes
on AVX-512 (oneDNN's src/cpu/rnn/rnn_utils.cpp lays the parts out).
"""

from __future__ import annotations

from typing import Any

import torch

from mmfsdp.basics.torch_releases import PACKS_LSTM_STATES, torch_has

__all__ = ["LSTM_LAYER", "add_workspace", "lstm_bytes"]

LSTM_LAYER = "aten::mkldnn_rnn_layer"
_BACKWARD = f"{LSTM_LAYER}_backward"
_LINE = 64  # bytes to which rows are padded, and by which they are longer if they have a multiple of 256 elements


def add_workspace(args: Any, result: Any) -> Any:
    """Return a layer's results, with a workspace of the right size; backward frees it.

    It has the gates of each element of the sequence, the states between layers and those between elements, and the
    gradients of both in float32.

    Args:
        args: The layer's arguments; its input has the shape (length, batch, width).
        result: What the fake kernel returned.
    """
    inputs, hidden, size = args[0], args[10], args[0].element_size()
    length, batch, width = inputs.shape
    steps, states, wide = length * batch, (length + 1) * batch, max(width, hidden)
    grads = 4 if torch_has(PACKS_LSTM_STATES) else 8 if size == 4 else 6
    held = steps * (_row(4 * hidden, size) + _row(hidden, size)) * size
    held += states * (2 * _row(wide, size) * size + grads * _row(wide, 4) * 4)
    held += states * (2 * _row(hidden, size) * size + 2 * _row(hidden, 4) * 4)
    return (*result[:3], inputs.new_empty(held, dtype=torch.uint8))


def lstm_bytes(name: str, args: Any) -> int:
    """Return the scratch bytes of a layer or its backward; 0 for other operators. Pure.

    Weights are copied with padded rows, and backward makes their gradients so. In float32 the gates of the whole
    sequence are computed at once; in 16 bits backward converts the gradient of the output to float32.

    Args:
        name: The operator's name in its schema.
        args: Its positional arguments.
    """
    if name not in (LSTM_LAYER, _BACKWARD):
        return 0
    inputs, again = args[0], name == _BACKWARD
    length, batch, width = inputs.shape
    hidden, size = args[15 if again else 10], inputs.element_size()
    held = (width + hidden) * _row(4 * hidden, 4 if again else size) * (4 if again else size)
    if size == 4:
        times = 1 if torch_has(PACKS_LSTM_STATES) else 5
        held += times * length * batch * _row(4 * hidden, 4) * 4 + 8 * batch * hidden
    else:
        held += 22 * batch * hidden
    if again:
        grads = args[10]
        held += 0 if grads is None or grads.is_contiguous() else grads.nbytes
        if size == 4:
            held += sum(4 * hidden * _row(side, 4) * 4 for side in (width, hidden) if _row(side, 4) != side)
        else:
            held += (width + hidden) * 4 * hidden * size + 4 * length * batch * hidden
    return int(held)


def _row(elements: int, size: int) -> int:
    """Return the elements of a padded row, for a size of an element in bytes."""
    step = _LINE // size
    padded = -(-elements // step) * step
    return padded + step if padded % 256 == 0 else padded
