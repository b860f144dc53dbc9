"""Lets one process compute the parts of a batch in turn, and records each part as a rank of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch.optim import Optimizer

from mmfsdp.parity.records.activations import Batch
from mmfsdp.parity.records.naming import unwrapped
from mmfsdp.parity.records.recorder import Recording
from mmfsdp.parity.records.step_record import StepRecord
from mmfsdp.parity.records.writing import Writer

__all__ = ["PartedRecording"]


class PartedRecording(Recording):
    """A recording of a process that plays several ranks, one after the other. Who makes one calls ``close()``.

    Each part has buffers of its own, as each rank has, and a file in which it is one of ``world * parts`` ranks. What
    follows from all parts, such as gradients, is in the file of the first one. The first part is played at first. With
    several optimizers, the caller says where a step ends: `end_step`.

    Args:
        folder: See `mmfsdp.recording`.
        model: See `mmfsdp.recording`.
        optimizer: See `mmfsdp.recording`.
        parts: How many ranks this process plays.
        perturb: See `mmfsdp.recording`.
        first_step: See `mmfsdp.recording`.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: Sequence[Optimizer],
        *,
        parts: int,
        perturb: int | None,
        first_step: int,
    ) -> None:
        self._parts, self._playing = parts, 0
        self._writers: list[Writer] = []
        self._own_buffers = [*unwrapped(model).buffers()] if parts > 1 else []
        self._values = [[buffer.clone() for buffer in self._own_buffers] for _ in range(parts)]
        super().__init__(folder, model, optimizer, depth=2, every=1, order="blocks", perturb=perturb, step=first_step)
        rank, world = self._rank_and_world()
        others = (
            StepRecord(self._writers[part], Batch(rank + part, world, "blocks"), first_step) for part in range(1, parts)
        )
        self._records = [self._record, *others]

    def play(self, part: int) -> None:
        """Compute and record as another part from now on, with its buffers. Not collective."""
        if part == self._playing:
            return
        with torch.no_grad():
            values, others = self._values[self._playing], self._values[part]
            for buffer, mine, theirs in zip(self._own_buffers, values, others, strict=True):
                if not torch.equal(buffer, mine):
                    mine.copy_(buffer)
                if not torch.equal(buffer, theirs):  # a backward may need one that no forward changes
                    buffer.copy_(theirs)
        self._playing, self._record = part, self._records[part]
        self._params.slots = self._record.slots

    def end_step(self) -> None:
        """End a step of several optimizers. Not collective."""
        self._end_step()

    def _ends_step(self, optimizer: Optimizer) -> bool:
        return len(self._optimizers) == 1

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Record the outputs of modules in evaluation as the end of the last step. Not collective."""
        self._evaluating = True
        for record in self._records:
            record.step -= 1
        try:
            yield
        finally:
            self._evaluating = False
            for record in self._records:
                record.step += 1

    def close(self) -> None:
        """Remove the hooks, and write what is left."""
        super().close()
        for record in self._records:
            if record is not self._record:
                record.writer.close()

    def _rank_and_world(self) -> tuple[int, int]:
        rank, world = super()._rank_and_world()
        return rank * self._parts, world * self._parts

    def _make_writer(self, folder: Path, rank: int, head: dict[str, Any]) -> Writer:
        self._writers = [
            super(PartedRecording, self)._make_writer(folder, rank + part, head) for part in range(self._parts)
        ]
        return self._writers[0]

    def _after_update(self, optimizer: Optimizer) -> None:
        for part in range(1, self._parts):
            self.play(part)
            self._record.add_boxes(self._params.buffers())
        self.play(0)
        super()._after_update(optimizer)

    def _end_step(self) -> None:
        playing, (self._record, *others) = self._record, self._records
        for record in others:
            record.writer.flush()
        super()._end_step()
        for record in others:
            record.end()
        self._record = playing
