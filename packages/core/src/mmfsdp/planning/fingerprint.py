"""What a model is, as a hash: the same for meta and real weights, different for any other model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
import torch.nn as nn

from mmfsdp.dtypes import canonical_dtype

__all__ = ["describe", "fingerprint"]


def describe(model: nn.Module) -> Iterator[str]:
    """Yield a line for each module, parameter and buffer: name, class or shape, dtype, whether it is trained."""
    for fqn, module in model.named_modules():
        yield f"module {fqn} {type(module).__qualname__}"
    for kind, tensors in (
        ("param", model.named_parameters(remove_duplicate=False)),
        ("buffer", model.named_buffers(remove_duplicate=False)),
    ):
        for fqn, tensor in tensors:
            yield f"{kind} {fqn} {tuple(tensor.shape)} {_dtype(tensor)} {'trained' if tensor.requires_grad else 'fixed'}"


def fingerprint(model: nn.Module) -> str:
    """Return 16 hex digits of SHA-256 over `describe`. Not collective."""
    digest = hashlib.sha256()
    for line in describe(model):
        digest.update(line.encode())
        digest.update(b"\n")
    return digest.hexdigest()[:16]


def _dtype(tensor: torch.Tensor) -> str:
    return canonical_dtype(tensor.dtype)
