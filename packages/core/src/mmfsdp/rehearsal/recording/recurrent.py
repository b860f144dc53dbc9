"""Recurrent networks of fake tensors as cuDNN computes them: the bytes kept for backward, and the workspaces.

cuDNN reports neither. The sizes fit 120 networks on an H100 with torch 2.11 and cuDNN 9.19
(``benchmarks/on_gpu/kernels.jsonl``): kept bytes are exact, workspaces of more than 300 MB are right to 10 %, smaller
ones are up to 45 % below the measured size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from mmfsdp.rehearsal.fakes.fake import below_autograd

__all__ = ["NETWORKS", "RECURRENT", "recurrent_flops", "recurrent_network", "recurrent_scratch", "run_recurrent"]

RECURRENT = _FORWARD, _BACKWARD = "aten::_cudnn_rnn", "aten::_cudnn_rnn_backward"

NETWORKS = {"rnn_relu.input": 0, "rnn_tanh.input": 1, "lstm.input": 2, "gru.input": 3}
"""Operators that cuDNN has a kernel for, each with its mode (``cudnnRNNMode_t``)."""

_LSTM = 2
_GATES = 1, 1, 4, 3
_KEPT = 1, 1, 5, 6
"""Vectors of the hidden size that a layer keeps for each element of the sequence; all but the last keep their output,
too, see https://github.com/pytorch/pytorch/issues/2895."""
_WORKING, _WORKING_BOTH = 5, 7
"""Vectors of the hidden size for each element of the sequence in a workspace, with one direction and with both."""
_LEAST = 24 << 20  # bytes of a workspace beside those and a copy of the weights


def recurrent_network(mode: int) -> Callable[..., Any]:
    """Return the function that runs an operator of `NETWORKS` as cuDNN does."""

    def run(
        inputs: torch.Tensor,
        states: Any,
        params: Sequence[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[torch.Tensor, ...]:
        hx, cx = states if mode == _LSTM else (states, None)
        tensors = [inputs, hx, *([] if cx is None else [cx]), *params]
        if torch.is_autocast_enabled("cpu"):  # which stands for CUDA's in a rehearsal
            tensors = [tensor.to(torch.get_autocast_dtype("cpu")) for tensor in tensors]
        settings = (mode, hx.shape[2] if cx is None else cx.shape[2], num_layers, batch_first, dropout, train)
        found = _Network.apply((*settings, bidirectional), 4 if has_biases else 2, cx is not None, *tensors)  # type: ignore[no-untyped-call]
        return tuple(found[: 2 if cx is None else 3])

    return run


class _Network(torch.autograd.Function):
    """A network whose result, reserve and copy of the weights are kept for backward."""

    @staticmethod
    def forward(ctx: Any, settings: Any, stride: int, has_cell: bool, *tensors: torch.Tensor) -> Any:
        mode, hidden, layers, batch_first, dropout, train, both = settings
        inputs, hx, *rest = tensors
        cx, weights = (rest[0], rest[1:]) if has_cell else (None, rest)
        with below_autograd():
            out, hy, cy, reserve, packed = torch.ops.aten._cudnn_rnn(
                inputs,
                weights,
                stride,
                None,
                hx,
                cx,
                mode,
                hidden,
                0,
                layers,
                batch_first,
                dropout,
                train,
                both,
                [],
                None,
            )
        ctx.save_for_backward(inputs, hx, cx, out, reserve, packed, *weights)
        ctx.settings, ctx.stride = settings, stride
        ctx.set_materialize_grads(False)
        return out, hy, cy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        mode, hidden, layers, batch_first, dropout, train, both = ctx.settings
        inputs, hx, cx, out, reserve, packed, *weights = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[3], ctx.needs_input_grad[4], cx is not None and ctx.needs_input_grad[5], True]
        with below_autograd():
            dx, dhx, dcx, dweights = torch.ops.aten._cudnn_rnn_backward(
                inputs, weights, ctx.stride, packed, hx, cx, out, *grads, mode, hidden, 0, layers, batch_first, dropout,
                train, both, [], None, reserve, wanted,
            )  # fmt: skip
        cell = [] if cx is None else [dcx if wanted[2] else None]
        return None, None, None, dx if wanted[0] else None, dhx if wanted[1] else None, *cell, *dweights


def run_recurrent(name: str, args: Any) -> Any:
    """Return cuDNN's results, on shapes: it copies the weights side by side, and so lie their gradients.

    Args:
        name: One of `RECURRENT`.
        args: The operator's arguments.
    """
    inputs, weights = args[:2]
    if name == _FORWARD:
        hx, cx, mode, _, _, layers, batch_first, dropout, train, both = args[4:14]
        directions = 2 if both else 1
        outer = inputs.shape[:2]
        out = inputs.new_empty((*(reversed(outer) if batch_first else outer), directions * hx.shape[2]))
        reserve = _reserve_bytes(mode, out, layers, directions, dropout) if train else 0
        return (
            out.transpose(0, 1) if batch_first else out,
            torch.empty_like(hx),
            inputs.new_empty(0) if cx is None else torch.empty_like(cx),
            inputs.new_empty(reserve, dtype=torch.uint8),
            inputs.new_empty(sum(weight.numel() for weight in weights)),
        )
    hx, cx = args[4:6]
    flat = inputs.new_empty(sum(weight.numel() for weight in weights))
    parts = flat.split([weight.numel() for weight in weights])
    return (
        torch.empty_like(inputs),
        torch.empty_like(hx),
        inputs.new_empty(0) if cx is None else torch.empty_like(cx),
        [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)],
    )


def recurrent_scratch(name: str, args: Any) -> int:
    """Return the bytes of a network's workspace, and of copies of tensors that are not in the order of time."""
    inputs, weights = args[:2]
    later = 6 if name == _BACKWARD else 4
    mode_at = later + (4 if name == _BACKWARD else 2)
    hidden, both, hx = args[mode_at + 1], args[mode_at + 7], args[4]
    rows, directions = prod(inputs.shape[:2]), 2 if both else 1
    size = inputs.element_size()
    held = (_WORKING_BOTH if both else _WORKING) * rows * directions * hidden * size
    held += sum(weight.numel() for weight in weights) * size + _LEAST
    if args[mode_at + 4]:  # batch_first
        held += inputs.nbytes + (rows * directions * hx.shape[2] * size if name == _BACKWARD else 0)
    return int(held)


def recurrent_flops(name: str, args: Any) -> int:
    """Return the floating-point operations of a network's products; backward has twice as many."""
    inputs, weights, stride = args[:3]
    elements = sum(weight.numel() for index, weight in enumerate(weights) if index % stride < 2)
    return int(2 * prod(inputs.shape[:2]) * elements * (2 if name == _BACKWARD else 1))


def _reserve_bytes(mode: int, out: torch.Tensor, layers: int, directions: int, dropout: float) -> int:
    kept = (layers * (_KEPT[mode] + 1) - 1) * out.nbytes
    masks = (layers - 1) * directions * out.numel() // 8 if dropout else 0
    return int(kept + masks)
