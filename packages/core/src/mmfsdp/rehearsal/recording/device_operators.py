"""Lets composite operators on a rehearsal's fake CPU tensors run as the kernels that CUDA has for them.

Attention, RMSNorm, dropout and recurrent networks are compositions, which torch takes apart by the device of their
tensors, before autograd sees the parts. A kernel of our own for the CPU's autograd takes them apart as for CUDA, if a
tensor belongs to the rehearsal; all other tensors get torch's own composition. Functions that a model imported by name
are covered, and checkpointing, autograd and ``save_ops`` see CUDA's operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mmfsdp.rehearsal.fakes.fake import below_autograd, is_made_in, is_traced
from mmfsdp.rehearsal.recording.kernels.attention_backends import attention_backend, attention_order
from mmfsdp.rehearsal.recording.recurrent import NETWORKS, recurrent_network

__all__ = ["FUSED_RMS_NORM", "FUSED_RMS_NORM_BACKWARD", "device_operators", "run_fused_norm"]

FUSED_RMS_NORM, FUSED_RMS_NORM_BACKWARD = "aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"

_OPAQUE = ("scaled_dot_product_attention",)  # what a compiler does not take apart
_PADDED = 8  # to which the columns of a head are padded for flash attention


@contextmanager
def device_operators(mode: Any, capability: tuple[int, int] | None = None) -> Iterator[None]:
    """Replace composite operators on tensors that were made in a context of fake tensors.

    Args:
        mode: The context, from `mmfsdp.rehearsal.fakes.fake.fake_tensors`.
        capability: The compute capability of the device; None for any from Ampere on.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        kernels: dict[str, Callable[..., Any]] = {
            "scaled_dot_product_attention": functools.partial(_attention, capability),
            "rms_norm": _rms_norm,
            "dropout": _dropout,
            **{name: recurrent_network(kind) for name, kind in NETWORKS.items()},
        }
        for name, kernel in kernels.items():
            library.impl(name, _chosen(mode, name, kernel), "AutogradCPU")
        yield
    finally:
        library._destroy()


def _chosen(mode: Any, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel for an operator that leaves foreign tensors to torch's own composition."""
    packet, _, overload = name.partition(".")
    composition = getattr(getattr(torch.ops.aten, packet), overload or "default").decompose

    def run(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        replaced = is_made_in(mode, first) or (name in _OPAQUE and is_traced(first))
        return (kernel if replaced else composition)(first, *args, **kwargs)

    return run


def _attention(
    capability: tuple[int, int] | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    backend = attention_backend(
        query,
        key,
        value,
        attn_mask,
        is_causal=is_causal,
        is_grouped=enable_gqa,
        order=attention_order(capability),
        capability=capability,
    )
    operators: Any = torch.ops.aten
    found: torch.Tensor
    if backend == "flash":
        columns = query.shape[-1]
        scale = columns**-0.5 if scale is None else scale
        parts = [_padded(part) for part in (query, key, value)]
        found = operators._scaled_dot_product_flash_attention(*parts, dropout_p, is_causal, False, scale=scale)[0]
        return found if found.shape[-1] == columns else found[..., :columns]
    if backend == "math":
        found = operators._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
        return found
    mask = None if attn_mask is None else _bias(attn_mask, query, key)
    needs = torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value))
    needs = needs or (mask is not None and mask.requires_grad)
    operator = operators._scaled_dot_product_efficient_attention
    if backend == "cudnn":
        operator = operators._scaled_dot_product_cudnn_attention
    found = operator(query, key, value, mask, needs, dropout_p, is_causal, scale=scale)[0]
    return found


def _padded(part: torch.Tensor) -> torch.Tensor:
    rest = -part.shape[-1] % _PADDED
    return torch.nn.functional.pad(part, (0, rest)) if rest else part


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return a mask as it is added: of numbers instead of bools, one for each head."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _rms_norm(
    inputs: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    if weight is not None and weight.dtype != inputs.dtype:  # CUDA's kernel takes equal dtypes only
        found: torch.Tensor = torch.ops.aten.rms_norm.default.decompose(inputs, normalized_shape, weight, eps)
        return found
    result: torch.Tensor = _FusedNorm.apply(inputs, list(normalized_shape), weight, eps)  # type: ignore[no-untyped-call]
    return result


class _FusedNorm(torch.autograd.Function):
    """RMSNorm as CUDA's kernel computes it: it keeps the input and one float32 per row."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, shape: list[int], weight: torch.Tensor | None, eps: float | None
    ) -> torch.Tensor:
        with below_autograd():
            result, rstd = torch.ops.aten._fused_rms_norm(inputs, shape, weight, eps)
        ctx.save_for_backward(inputs, weight, rstd)
        ctx.shape = shape
        found: torch.Tensor = result
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor | None, None]:
        inputs, weight, rstd = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        with below_autograd():
            made = torch.ops.aten._fused_rms_norm_backward(grads[0], inputs, ctx.shape, rstd, weight, wanted)
        return made[0], None, made[1], None


def run_fused_norm(name: str, args: Any) -> Any:
    """Return what CUDA's fused RMSNorm returns, or its backward, on shapes: torch takes it apart on the CPU.

    Args:
        name: `FUSED_RMS_NORM` or `FUSED_RMS_NORM_BACKWARD`.
        args: The operator's arguments.
    """
    if name == FUSED_RMS_NORM:
        inputs, shape = args[:2]
        wide = torch.promote_types(inputs.dtype, torch.float32)
        return torch.empty_like(inputs), torch.empty(
            (*inputs.shape[: inputs.dim() - len(shape)], *([1] * len(shape))), dtype=wide, device=inputs.device
        )
    _, inputs, _, _, weight, wanted = args
    return (
        torch.empty_like(inputs) if wanted[0] else None,
        torch.empty_like(weight) if wanted[1] and weight is not None else None,
    )


def _dropout(inputs: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or not p or not inputs.numel():
        return inputs
    found: torch.Tensor = torch.native_dropout(inputs, p, True)[0]
    return found
