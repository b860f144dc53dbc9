"""Finds the operators whose results mode ``ops`` keeps, by their names."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from mmfsdp.errors import ConfigError, closest

__all__ = ["DEFAULT_SAVE_OPS", "check_operator", "resolve_operators"]

DEFAULT_SAVE_OPS: tuple[str, ...] = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.baddbmm",
    "aten.linear",
    "aten._scaled_mm",
    "aten._grouped_mm",
    "aten._scaled_grouped_mm",
    "aten.convolution",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "aten._scaled_dot_product_attention_math_for_mps",
    "aten._flash_attention_forward",
    "aten._efficient_attention_forward",
    "_c10d_functional.reduce_scatter_tensor",
    "_c10d_functional.reduce_scatter_tensor_coalesced",
)
"""The operators whose results mode ``ops`` keeps by default. Names that the installed torch lacks are skipped."""


def check_operator(name: str) -> None:
    """Check that a name denotes operators whose results can be kept.

    Args:
        name: ``'namespace.operator'`` or ``'namespace.operator.overload'``, such as ``'aten.mm'``.

    Raises:
        ConfigError: The name denotes none; the message suggests the nearest spelling.
    """
    _overloads(name)


@functools.cache
def resolve_operators(names: tuple[str, ...]) -> frozenset[Any]:
    """Return the overloads for the names; of `DEFAULT_SAVE_OPS`, those that this torch has.

    Raises:
        ConfigError: A name denotes no operator.
    """
    if names != DEFAULT_SAVE_OPS:
        return frozenset(operator for name in names for operator in _overloads(name))
    found: list[Any] = []
    for name in names:
        with contextlib.suppress(ConfigError):
            found.extend(_overloads(name))
    return frozenset(found)


def _overloads(name: str) -> list[Any]:
    """Return the operator overloads that ``'namespace.operator'`` or ``'namespace.operator.overload'`` names."""
    namespace, _, rest = name.partition(".")
    operator, _, overload = rest.partition(".")
    packet: Any = getattr(getattr(torch.ops, namespace), operator, None) if namespace and operator else None
    known = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else []
    if not known or (overload and overload not in known):
        accepted = [f"{namespace}.{operator}.{each}" for each in known] or _operator_names()
        raise ConfigError(f"{name!r} is not an operator of torch {torch.__version__}.{closest(name, accepted)}")
    chosen = [getattr(packet, each) for each in ([overload] if overload else known)]
    # Autograd never runs the out= and in-place overloads of an operator that is named as a whole.
    kept = [each for each in chosen if not each._schema.is_mutable]
    if not kept:
        raise ConfigError(f"{name!r} writes into its arguments: its result cannot be kept. Remove it from save_ops.")
    return kept


def _operator_names() -> list[str]:
    # Only for spelling hints.
    return sorted({each.split(".")[0].replace("::", ".") for each in torch._C._dispatch_get_all_op_names()})
