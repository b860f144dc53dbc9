"""Appends sketches to the record of this rank; a full disk ends the recording, and training goes on."""

from __future__ import annotations

import json
import logging
import re
import weakref
from base64 import b64encode
from collections.abc import Mapping, Sequence
from fnmatch import translate
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import torch

from mmfsdp.parity.figures import BITS, FIRST
from mmfsdp.parity.records import FORM, Key, Spread, file_of, line_of
from mmfsdp.parity.scaled import Scaled
from mmfsdp.parity.sketches import Sketches
from mmfsdp.parity.wholes import whole_file

__all__ = ["Part", "Writer", "texts_of"]

_log = logging.getLogger("mmfsdp.parity")
_ODD = 4  # where `Figures` has the number of elements that are not finite
_BEFORE, _AFTER = "gradient before clipping", "gradient"
_Pending = tuple[Key, Spread, tuple[int, ...], tuple[int, ...], tuple[int, ...], str, tuple[str, int] | None]

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
        self._pending: list[tuple[int, _Pending]] = []
        self._sketches = Sketches()
        self._scaled = Scaled()
        self._recent: dict[tuple[object, ...], tuple[weakref.ref[torch.Tensor], int, int]] = {}
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
        dtype = _name(local.dtype)
        row = self._sketch(local, offsets, shape, leading)
        if shown is not None:  # rows that are no box are not kept whole
            shape, offsets, sizes = shown, (0,) * len(shown), (local.shape[0] * local.shape[2], *shown[1:])
            kept = None
        else:
            sizes, kept = tuple(local.shape), self._keep(key, local)
        self._pending.append((row, (key, spread, shape, offsets, sizes, dtype, kept)))

    def add_boxes(self, parts: Sequence[Part]) -> None:
        """Sketch this rank's boxes of tensors.

        Args:
            parts: The boxes, in the order of the record.
        """
        if self.stopped:
            return
        known = [self._scaled.find(key.name, local) if key.kind == _AFTER else None for key, _, local, _, _ in parts]
        new = [part for part, scaled in zip(parts, known, strict=True) if scaled is None]
        added = iter(self._sketches.add_all([(local, offsets, shape) for _, _, local, offsets, shape in new]))
        rows = [next(added) if scaled is None else self._sketches.add_scaled(*scaled) for scaled in known]
        for row, (key, spread, local, offsets, shape) in zip(rows, parts, strict=True):
            entry = key, spread, shape, offsets, tuple(local.shape), _name(local.dtype), self._keep(key, local)
            self._pending.append((row, entry))
            if key.kind == _BEFORE:
                self._scaled.remember(key.name, local, row, self._sketches.square(row))

    def flush(self) -> None:
        """Write what was added."""
        if self._pending and not self.stopped:
            values = self._sketches.take()
            self._report_odd(values[:, _ODD].tolist())
            texts = texts_of(values)
            self._write("\n".join([*(line_of(*entry, texts[row]) for row, entry in self._pending), ""]))
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

    def _sketch(self, local: torch.Tensor, offsets: tuple[int, ...], shape: tuple[int, ...], leading: int) -> int:
        """Sketch a part, and return its row; the input of a module is often the output of the one before."""
        what = (local.data_ptr(), local.shape, local.stride(), local.dtype, offsets, shape, leading)
        if (known := self._recent.get(what)) is not None and known[0]() is not None and known[1] == local._version:
            return known[2]
        found = self._sketches.add(local, offsets, shape, leading=leading)
        self._recent[what] = weakref.ref(local), local._version, found
        return found

    def _keep(self, key: Key, local: torch.Tensor) -> tuple[str, int] | None:
        """Write a tensor whole if a pattern asks for it; return the type of its elements and where they begin."""
        if not self._patterns or self.stopped or local.is_complex():
            return None
        if not any(pattern.fullmatch(f"{key.kind} of {key.name}") for pattern in self._patterns):
            return None
        held = local.detach()
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
        first = next(((odd[row], entry[0]) for row, entry in self._pending if odd[row]), None)
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


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
