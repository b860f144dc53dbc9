"""Finds parameters that change between two steps, such as by a stale copy: by their norms, without keeping them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch.distributed.tensor import DTensor

from mmfsdp.parity.heads import square_of

__all__ = ["BetweenSteps"]


class BetweenSteps:
    """The norms of this rank's parts of parameters after a step. Equal numbers have equal norms, to the last bit.

    They are kept by parameter: for the time of a step a param group may be divided, in another order.
    """

    def __init__(self) -> None:
        self._norms: dict[int, float | torch.Tensor] = {}

    def remember(self, params: Iterable[torch.Tensor], known: Mapping[int, float]) -> None:
        """Keep the norms after a step. Not collective.

        Args:
            params: The parameters.
            known: By identity, what `mmfsdp.parity.heads.square_of` would return for contiguous parts on the CPU.
        """
        self._norms = _norms(params, known)

    def changed(self, params: Iterable[torch.Tensor]) -> set[int]:
        """Return the identities of parameters whose norms differ from those kept, and drop those. Not collective."""
        if not self._norms:
            return set()
        before, now = self._norms, _norms(params, {})
        self._norms = {}
        found, flags = set(), {}
        for place, old in before.items():
            if (new := now.get(place)) is None:
                continue
            if isinstance(old, float) and isinstance(new, float):
                if old != new and math.isfinite(old):
                    found.add(place)
            else:
                held = torch.as_tensor(old)
                flags[place] = held.ne(torch.as_tensor(new)) & held.isfinite()
        if len({flag.device for flag in flags.values()}) > 1:
            flags = {place: flag.cpu() for place, flag in flags.items()}
        are_others = torch.stack([*flags.values()]).tolist() if flags else []  # a device is waited for once
        return found | {place for place, is_other in zip(flags, are_others, strict=True) if is_other}


@torch.no_grad()
def _norms(params: Iterable[torch.Tensor], known: Mapping[int, float]) -> dict[int, float | torch.Tensor]:
    found: dict[int, float | torch.Tensor] = {}
    for param in params:
        held = param.to_local() if isinstance(param, DTensor) else param
        if held.device.type == "cpu" and held.dtype in (torch.float32, torch.float64) and held.is_contiguous():
            found[id(param)] = known[id(param)] if id(param) in known else square_of(held)
        elif held.is_floating_point() or held.is_complex():
            wide = held.dtype in (torch.float64, torch.complex64, torch.complex128)
            norm = torch.linalg.vector_norm(held, dtype=None if wide else torch.float32)
            found[id(param)] = norm.to(torch.float64)
    return found
