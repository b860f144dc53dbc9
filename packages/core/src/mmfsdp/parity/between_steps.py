"""Finds parameters that change between two steps, such as by a stale copy: by sketches, without keeping them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache

import torch
from torch.distributed.tensor import DTensor

__all__ = ["BetweenSteps"]

_BLOCK = 1 << 18  # elements that a processor's cache holds beside as many weights


class BetweenSteps:
    """Sketches of this rank's parts of parameters after a step. Equal numbers have equal sketches, to the last bit.

    A sketch adds up elements times fixed random weights, so it also tells signs and the order of elements. They are
    kept by parameter: for the time of a step a param group may be divided, in another order.
    """

    def __init__(self) -> None:
        self._known: dict[int, float | torch.Tensor] = {}

    def remember(self, params: Iterable[torch.Tensor]) -> None:
        """Keep the sketches after a step. Not collective."""
        self._known = _sketches(params)

    def changed(self, params: Iterable[torch.Tensor]) -> set[int]:
        """Return the identities of parameters whose sketches differ from those kept, and drop those. Not collective."""
        if not self._known:
            return set()
        before, now = self._known, _sketches(params)
        self._known = {}
        found, flags = set(), {}
        for key, old in before.items():
            if (new := now.get(key)) is None:
                continue
            if isinstance(old, float) and isinstance(new, float):
                if old != new and math.isfinite(old):
                    found.add(key)
            else:
                held = torch.as_tensor(old)
                flags[key] = (held.ne(torch.as_tensor(new)) & held.isfinite()).any()
        if len({flag.device for flag in flags.values()}) > 1:
            flags = {key: flag.cpu() for key, flag in flags.items()}
        are_others = torch.stack([*flags.values()]).tolist() if flags else []  # a device is waited for once
        return found | {key for key, is_other in zip(flags, are_others, strict=True) if is_other}


@torch.no_grad()
def _sketches(params: Iterable[torch.Tensor]) -> dict[int, float | torch.Tensor]:
    found: dict[int, float | torch.Tensor] = {}
    for param in params:
        held = param.to_local() if isinstance(param, DTensor) else param
        if held.is_complex():
            held = torch.view_as_real(held)
        if held.device.type == "cpu" and held.dtype in (torch.float32, torch.float64) and held.is_contiguous():
            found[id(param)] = _by_blocks(held.detach().view(-1))
        elif held.is_floating_point():
            found[id(param)] = _by_sums(held)
    return found


def _by_blocks(flat: torch.Tensor) -> float:
    weights = _weights(_BLOCK, flat.dtype, flat.device)
    parts = flat.split(_BLOCK)
    return math.fsum((1 + number) * part.dot(weights[: len(part)]).item() for number, part in enumerate(parts))


def _by_sums(held: torch.Tensor) -> torch.Tensor:
    """Return what a device computes without a copy of the tensor: its norm, and sums over both dimensions, weighted."""
    dtype = torch.float64 if held.dtype == torch.float64 else torch.float32
    matrix = held.reshape(held.shape[0] if held.dim() else 1, -1)
    sums = [matrix.sum(dim, dtype=dtype) for dim in (0, 1)]
    weighted = [each.dot(_weights(each.numel(), dtype, held.device)) for each in sums]
    return torch.stack([torch.linalg.vector_norm(matrix, dtype=dtype), *weighted])


@cache
def _weights(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, dtype=dtype, generator=generator).to(device)
