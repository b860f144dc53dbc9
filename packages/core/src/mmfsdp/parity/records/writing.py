"""Appends sketches to the record of this rank; a full disk ends the recording, and training goes on."""

from __future__ import annotations

import json
import logging
import math
import re
import weakref
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import translate
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import torch

from mmfsdp.parity.records.record_files import FORM, file_of, line_of
from mmfsdp.parity.records.slots import Slot
from mmfsdp.parity.records.whole_tensors import whole_file
from mmfsdp.parity.sketching.figures import BITS, FIRST
from mmfsdp.parity.sketching.geometries import Geometry
from mmfsdp.parity.sketching.heads import square_of
from mmfsdp.parity.sketching.sketches import Sketches
from mmfsdp.saving.writing.memory import bytes_of

__all__ = ["Part", "Scaled", "Writer", "texts_of"]

_log = logging.getLogger("mmfsdp.parity")
_ODD = 4  # where `Figures` has the number of elements that are not finite

Part = tuple[Slot, torch.Tensor]
"""A tensor's slot in the record, and this rank's part of it."""

_EVERY = 97  # elements that a sample stands for
_NEAR = {torch.float32: 1e-6, torch.float64: 1e-14}
"""How far a sample may be from the earlier one times a number, as a share. Other dtypes round more."""
_NORM = 1e-5  # how far the norm may be from that


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
        self._pending: list[tuple[int, int, Slot, tuple[str, int] | None]] = []
        self._sketches = Sketches()
        self._scaled = Scaled()
        self._recent: dict[tuple[object, ...], tuple[weakref.ref[torch.Tensor], int, int]] = {}
        self._file: TextIO | None = None
        self._patterns = [re.compile(translate(pattern)) for pattern in whole]
        self._whole: BinaryIO | None = None
        self._open(folder, rank, json.dumps({"mmfsdp_record": FORM, "rank": rank, **head}) + "\n")

    def add(self, step: int, slot: Slot, local: torch.Tensor) -> None:
        """Sketch this rank's part of a tensor.

        Args:
            step: The step.
            slot: What the tensor is.
            local: The part.
        """
        if not self.stopped:
            self._pending.append((self._sketch(local, slot.geometry), step, slot, self._keep(slot, local)))

    def add_boxes(self, step: int, parts: Iterable[Part]) -> None:
        """Sketch this rank's boxes of tensors.

        Args:
            step: The step.
            parts: The boxes, in the order of the record.
        """
        if self.stopped:
            return
        seen: list[Part] = []

        def boxes() -> Iterator[tuple[torch.Tensor, Geometry]]:
            for slot, local in parts:  # each is sketched while the processor's cache holds it
                seen.append((slot, local))
                yield local, slot.geometry

        self._append(step, seen, self._sketches.add_all(boxes()))

    def add_unclipped(self, step: int, parts: Sequence[Part]) -> None:
        """Sketch gradients that may be clipped next.

        Args:
            step: The step.
            parts: The gradients.
        """
        if self.stopped:
            return
        first = self._sketches.count

        def boxes() -> Iterator[tuple[torch.Tensor, Geometry]]:
            for row, (slot, local) in enumerate(parts, first):
                yield local, slot.geometry
                if square := self._sketches.square(row):
                    self._scaled.remember(slot.name, local, row, square)

        self._append(step, parts, self._sketches.add_all(boxes()))

    def add_clipped(self, step: int, parts: Sequence[Part]) -> None:
        """Sketch gradients, and multiply the sketches of those that `add_unclipped` has got and a number has scaled.

        Args:
            step: The step.
            parts: The gradients.
        """
        if self.stopped:
            return
        known = [self._scaled.find(slot.name, local) for slot, local in parts]
        new = [(local, slot.geometry) for (slot, local), scaled in zip(parts, known, strict=True) if scaled is None]
        added = iter(self._sketches.add_all(new))
        rows = [next(added) if scaled is None else self._sketches.add_scaled(*scaled) for scaled in known]
        self._append(step, parts, rows)

    def flush(self) -> None:
        """Write what was added."""
        if self._pending and not self.stopped:
            values = self._sketches.take()
            self._report_odd(values[:, _ODD].tolist())
            texts = texts_of(values)
            lines = [line_of(step, slot.said, texts[row], kept) for row, step, slot, kept in self._pending]
            self._write("\n".join([*lines, ""]))
        self.discard()

    def discard(self) -> None:
        """Drop what was added since it was last written."""
        self._pending.clear()
        self._sketches.clear()
        self._scaled.clear()
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

    def _append(self, step: int, parts: Sequence[Part], rows: Iterable[int]) -> None:
        for row, (slot, local) in zip(rows, parts, strict=True):
            self._pending.append((row, step, slot, self._keep(slot, local) if self._patterns else None))

    def _sketch(self, local: torch.Tensor, geometry: Geometry) -> int:
        """Sketch a part, and return its row; the input of a module is often the output of the one before."""
        what = (local.data_ptr(), local.stride(), geometry)
        if (known := self._recent.get(what)) is not None and known[0]() is not None and known[1] == local._version:
            return known[2]
        found = self._sketches.add(local, geometry)
        self._recent[what] = weakref.ref(local), local._version, found
        return found

    def _keep(self, slot: Slot, local: torch.Tensor) -> tuple[str, int] | None:
        """Write a tensor whole if a pattern asks for it; return the type of its elements and where they begin."""
        if not self._patterns or self.stopped or not slot.is_box or local.is_complex():
            return None
        if not any(pattern.fullmatch(f"{slot.kind} of {slot.name}") for pattern in self._patterns):
            return None
        held = local.detach()
        kind, dtype = ("f", torch.float32) if held.is_floating_point() else ("q", torch.int64)
        if held.dtype == torch.float64:
            kind, dtype = "d", torch.float64
        raw = bytes_of(held.to("cpu", dtype).contiguous())
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
        first = next(((odd[row], slot.key(step)) for row, step, slot, _ in self._pending if odd[row]), None)
        if first is not None and not self.odd:
            self.odd = f"{first[1]} is the first with infinite or NaN elements: {first[0]:.0f}"
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


def texts_of(values: torch.Tensor) -> list[str]:
    """Return figures as `Figures.unpack` reads them.

    Args:
        values: What `Sketches.take` returned.
    """
    middle = FIRST + BITS
    placed = values[:, middle:]
    placed = torch.where(placed.isfinite(), placed.clamp(-3e38, 3e38), placed).float()
    raw = torch.cat([values[:, :middle].contiguous().view(torch.uint8), placed.contiguous().view(torch.uint8)], 1)
    text, each = b64encode(raw.numpy().tobytes()).decode(), raw.shape[1] // 3 * 4  # three bytes are four letters
    return [text[start : start + each] for start in range(0, len(text), each)]


class Scaled:
    """Samples of tensors that were sketched. Only on the CPU: elsewhere, to look at them would wait for the device."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, float, torch.Tensor]] = {}

    def remember(self, name: str, value: torch.Tensor, row: int, square: float) -> None:
        """Keep a sample of a tensor.

        Args:
            name: A name to find it by.
            value: The tensor.
            row: The row of its sketch.
            square: The sum of its squares.
        """
        if value.is_contiguous() and value.dtype in _NEAR and 0 < square < math.inf:
            self._known[name] = row, square, _sample(value)

    def find(self, name: str, value: torch.Tensor) -> tuple[int, float] | None:
        """Return the row of the sketch of the same tensor before, and the number it was multiplied by; else None.

        Every 97th element must be the one of before times that number, and so must be the norm.
        """
        row, square, before = self._known.get(name, (0, 0.0, None))
        if before is None or not value.is_contiguous() or value.dtype not in _NEAR:
            return None
        norm = math.sqrt(square_of(value))  # reads the tensor, so that the sample is in the processor's cache
        after = _sample(value)
        size = before.dot(before).item()
        if after.shape != before.shape or not size:
            return None
        factor = before.dot(after).item() / size
        rest = torch.sub(after, before, alpha=factor).norm().item()
        expected = abs(factor) * math.sqrt(square)
        near = rest <= _NEAR[value.dtype] * abs(factor) * math.sqrt(size) and abs(norm - expected) <= _NORM * expected
        return (row, factor) if near and factor else None

    def clear(self) -> None:
        """Forget all tensors."""
        self._known.clear()


def _sample(value: torch.Tensor) -> torch.Tensor:
    return value.detach().view(-1)[::_EVERY].to(torch.float64)
