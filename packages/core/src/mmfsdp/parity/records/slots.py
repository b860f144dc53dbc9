"""Holds what a record says of a tensor in every step, so that it is made once: names, geometry, and the line's text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mmfsdp.parity.records.record_files import Key, Spread, said_of
from mmfsdp.parity.sketching.geometries import Geometry, geometry_of

__all__ = ["Placed", "Slot", "Slots"]


@dataclass(frozen=True, slots=True)
class Placed:
    """Where this rank's part of a tensor lies."""

    spread: Spread
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    leading: int = 1
    """How many leading dimensions count as one, so that the part may be every n-th row."""
    shown: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """The shapes of the whole and of the part to write, with ``leading`` above 1."""


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A tensor's entry in the record of a step."""

    kind: str
    name: str
    call: int
    sizes: tuple[int, ...]
    """Shape of this rank's part as given."""
    dtype: torch.dtype
    geometry: Geometry
    """Geometry of this rank's part as sketched."""
    is_box: bool
    """Whether this rank's part is a box of the tensor, so that it can be kept whole."""
    said: str
    """The part of the tensor's line that is the same in every step."""

    def fits(self, local: torch.Tensor) -> bool:
        """Return whether a part is like the one that this was made for."""
        return local.shape == self.sizes and local.dtype == self.dtype and local.device == self.geometry.device

    def key(self, step: int) -> Key:
        """Return the tensor's identity in a step."""
        return Key(step, self.kind, self.name, self.call)


class Slots:
    """The slots of a rank, and how often each name came up in this step."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str], int] = {}
        self._samples = 0
        self._known: dict[tuple[str, str, int], Slot] = {}

    def begin_forward(self, samples: int) -> None:
        """Forget where parts lie if this rank has another number of samples than before."""
        if samples != self._samples:
            self._known.clear()
            self._samples = samples

    def count(self, kind: str, name: str) -> int:
        """Return how often a tensor of this kind and name was recorded before in this step, and count this one."""
        what = kind, name
        call = self._calls.get(what, 0)
        self._calls[what] = call + 1
        return call

    def end_step(self) -> None:
        """Begin to count anew."""
        self._calls.clear()

    def find(self, kind: str, name: str, call: int, local: torch.Tensor, locate: Callable[[], Placed]) -> Slot:
        """Return the slot of a tensor.

        Args:
            kind: Such as "output" or "gradient".
            name: The name of its module or parameter.
            call: What `count` returned.
            local: This rank's part.
            locate: Returns where the part lies; called if the slot is new or the part has another shape than before.
        """
        what = kind, name, call
        found = self._known.get(what)
        if found is None or not found.fits(local):
            found = self._known[what] = _made(kind, name, call, local, locate())
        return found


def _made(kind: str, name: str, call: int, local: torch.Tensor, placed: Placed) -> Slot:
    given = sizes = tuple(local.shape)
    offsets, shape = placed.offsets, placed.shape
    geometry = geometry_of(local, offsets, shape, leading=placed.leading)
    if placed.shown is not None:
        shape, sizes = placed.shown
        offsets = (0,) * len(shape)
    dtype = str(local.dtype).removeprefix("torch.")
    said = said_of(Key(0, kind, name, call), placed.spread, shape, offsets, sizes, dtype)
    return Slot(kind, name, call, given, local.dtype, geometry, placed.shown is None, said)
