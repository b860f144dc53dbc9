"""Computes a hash that identifies a model: the same for meta and real weights, different for other models."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch.nn as nn

from mmfsdp.planning.distributed_params import divided_by

__all__ = ["describe", "fingerprint"]


def describe(model: nn.Module) -> Iterator[str]:
    """Yield a line per module, parameter and buffer: name, class or shape, dtype, requires_grad, ties."""
    first_name: dict[int, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        yield f"module {prefix} {type(module).__qualname__}"
        for kind, tensors in (("param", module._parameters), ("buffer", module._buffers)):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                fqn = f"{prefix}.{name}" if prefix else name
                state = "trained" if tensor.requires_grad else "fixed"
                line = f"{kind} {fqn} {tuple(tensor.shape)} {tensor.dtype} {state}"
                line += "".join(f" {axis}:{dim}" for axis, dim in divided_by(tensor))
                first = first_name.setdefault(id(tensor), fqn)
                yield line if first == fqn else f"{line} is {first}"


def fingerprint(model: nn.Module) -> str:
    """Return 16 hex digits of SHA-256 over `describe`. Not collective."""
    digest = hashlib.sha256()
    for line in describe(model):
        digest.update(line.encode())
        digest.update(b"\n")
    return digest.hexdigest()[:16]
