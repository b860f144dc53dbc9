"""Appends sketches to the record of this rank; a full disk ends the recording, and training goes on."""

from __future__ import annotations

import json
import logging
import re
import weakref
from base64 import b64encode
from collections.abc import Mapping, Sequence
from fnmatch import translate
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import torch

from mmfsdp.parity.figures import BITS, FIRST
from mmfsdp.parity.records import FORM, Key, Spread, file_of, line_of
from mmfsdp.parity.sketches import sketch_of, sketches_of
from mmfsdp.parity.wholes import whole_file

__all__ = ["Part", "Writer", "texts_of"]

_log = logging.getLogger("mmfsdp.parity")
_ODD = 4  # where `Figures` has the number of elements that are not finite
_Pending = tuple[Key, Spread, tuple[int, ...], tuple[int, ...], tuple[int, ...], str, tuple[str, int] | None]
_SMALL = 1 << 16
"""Elements up to which copying boxes together costs less than another call."""

Part = tuple[Key, Spread, torch.Tensor, tuple[int, ...], tuple[int, ...]]
"""The key of a tensor, how ranks share it, this rank's part, where that begins, and the shape of the whole."""


class Writer:
    """Keeps the sketches of a step on their device, and writes them at its end in one piece.

    Args:
        folder: The record's folder; a file of the same rank in it is replaced.
        rank: This rank.
        head: What the run is.
        whole: Patterns such as ``"gradient of head.*"``: these tensors are also written whole.
    """

    def __init__(self, folder: Path, rank: int, head: Mapping[str, Any], whole: Sequence[str] = ()) -> None:
        self.stopped = ""
        self.odd = ""
        self._pending: list[_Pending] = []
        self._values: list[torch.Tensor] = []
        self._recent: dict[tuple[object, ...], tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}
        self._file: TextIO | None = None
        self._patterns = [re.compile(translate(pattern)) for pattern in whole]
        self._whole: BinaryIO | None = None
        self._open(folder, rank, json.dumps({"mmfsdp_record": FORM, "rank": rank, **head}) + "\n")

    def add(
        self,
        key: Key,
        spread: Spread,
        local: torch.Tensor,
        offsets: tuple[int, ...],
        shape: tuple[int, ...],
        *,
        leading: int = 1,
        shown: tuple[int, ...] | None = None,
    ) -> None:
        """Sketch this rank's part of a tensor.

        Args:
            key: What the tensor is.
            spread: How ranks share it.
            local: The part.
            offsets: Where it begins.
            shape: The whole tensor's shape.
            leading: See `sketch_of`.
            shown: The shape to write, with ``leading`` above 1.
        """
        if self.stopped:
            return
        dtype = str(local.dtype).removeprefix("torch.")
        self._values.append(self._sketch(local, offsets, shape, leading))
        if shown is not None:  # rows that are no box are not kept whole
            shape, offsets, sizes = shown, (0,) * len(shown), (local.shape[0] * local.shape[2], *shown[1:])
            kept = None
        else:
            sizes, kept = tuple(local.shape), self._keep(key, local)
        self._pending.append((key, spread, shape, offsets, sizes, dtype, kept))

    def add_boxes(self, parts: Sequence[Part]) -> None:
        """Sketch this rank's boxes of tensors; small ones of equal shape are sketched together.

        Args:
            parts: The boxes, in the order of the record.
        """
        if self.stopped:
            return
        groups: dict[tuple[object, ...], list[int]] = {}
        for place, (_, _, local, offsets, shape) in enumerate(parts):
            alone = place if local.numel() > _SMALL else -1
            group = (alone, offsets, shape, local.shape, local.dtype, local.device)
            groups.setdefault(group, []).append(place)
        found: dict[int, torch.Tensor] = {}
        for places in groups.values():
            _, _, local, offsets, shape = parts[places[0]]
            held = [parts[place][2].detach() for place in places]
            stacked = torch.stack(held) if len(held) > 1 else local.detach()[None]
            found.update(zip(places, sketches_of(stacked, offsets, shape), strict=True))
        for place, (key, spread, local, offsets, shape) in enumerate(parts):
            self._values.append(found[place])
            dtype = str(local.dtype).removeprefix("torch.")
            self._pending.append((key, spread, shape, offsets, tuple(local.shape), dtype, self._keep(key, local)))

    def flush(self) -> None:
        """Write what was added."""
        if self._pending and not self.stopped:
            values = _joined(self._values)
            self._report_odd(values[:, _ODD].tolist())
            lines = [line_of(*entry, text) for entry, text in zip(self._pending, texts_of(values), strict=True)]
            self._write("\n".join([*lines, ""]))
        self._pending.clear()
        self._values.clear()
        self._recent.clear()

    def close(self) -> None:
        """Write the rest, and that the recording has ended."""
        self.flush()
        self._write(json.dumps({"end": True}) + "\n")
        for file in (self._file, self._whole):
            try:
                if file is not None:
                    file.close()
            except OSError as error:
                self._stop(error)

    def _sketch(
        self, local: torch.Tensor, offsets: tuple[int, ...], shape: tuple[int, ...], leading: int
    ) -> torch.Tensor:
        """Return the sketch of a part; the input of a module is often the output of the one before."""
        what = (local.data_ptr(), local.shape, local.stride(), local.dtype, offsets, shape, leading)
        if (known := self._recent.get(what)) is not None and known[0]() is not None and known[1] == local._version:
            return known[2]
        found = sketch_of(local, offsets, shape, leading=leading)
        self._recent[what] = weakref.ref(local), local._version, found
        return found

    def _keep(self, key: Key, local: torch.Tensor) -> tuple[str, int] | None:
        """Write a tensor whole if a pattern asks for it; return the type of its elements and where they begin."""
        wanted = any(pattern.fullmatch(f"{key.kind} of {key.name}") for pattern in self._patterns)
        held = local.detach()
        if not wanted or self.stopped or held.is_complex():
            return None
        kind, dtype = ("f", torch.float32) if held.is_floating_point() else ("q", torch.int64)
        if held.dtype == torch.float64:
            kind, dtype = "d", torch.float64
        raw = held.to("cpu", dtype).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        try:
            if self._whole is None:
                self._whole = whole_file(self._folder, self._rank).open("wb")
            offset = self._whole.tell()
            self._whole.write(raw)
            self._whole.flush()
        except OSError as error:
            self._stop(error)
            return None
        return kind, offset

    def _report_odd(self, odd: Sequence[float]) -> None:
        """Log once where numbers that are not finite began on this rank."""
        place = next((place for place, count in enumerate(odd) if count), None)
        if place is not None and not self.odd:
            self.odd = f"{self._pending[place][0]} is the first with infinite or NaN elements: {odd[place]:.0f}"
            _log.error("%s.", self.odd)

    def _open(self, folder: Path, rank: int, head: str) -> None:
        self._folder, self._rank = folder, rank
        try:
            folder.mkdir(parents=True, exist_ok=True)
            whole_file(folder, rank).unlink(missing_ok=True)
            self._file = file_of(folder, rank).open("w", encoding="utf-8")
        except OSError as error:
            self._stop(error)
        self._write(head)

    def _write(self, text: str) -> None:
        if self._file is None or self.stopped:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            self._stop(error)

    def _stop(self, error: OSError) -> None:
        self.stopped = f"{error.strerror or error} ({error.filename})" if error.filename else str(error)
        _log.error("Recording has stopped, training goes on: %s", self.stopped)


def _joined(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the values of all tensors on the CPU, one row each; a device is waited for once."""
    if len({value.device for value in values}) > 1:
        values = [value.cpu() for value in values]
    return torch.stack([*values]).cpu()


def texts_of(values: torch.Tensor) -> list[str]:
    """Return figures as `Figures.unpack` reads them.

    Args:
        values: What `sketches_of` returned, on the CPU.
    """
    middle = FIRST + BITS
    placed = values[:, middle:]
    placed = torch.where(placed.isfinite(), placed.clamp(-3e38, 3e38), placed).float()
    rows = zip(values[:, :middle].numpy().astype("<f8"), placed.numpy().astype("<f4"), strict=True)
    return [b64encode(first.tobytes() + rest.tobytes()).decode() for first, rest in rows]
