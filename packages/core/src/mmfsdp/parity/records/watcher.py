"""Watches a training loop, and writes a record of the steps around a jump or a number that is not finite."""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mmfsdp.errors import ConfigError
from mmfsdp.parity.records.activations import Order
from mmfsdp.parity.records.record_files import Entry, Key, entry_of, file_of
from mmfsdp.parity.records.recorder import Recording
from mmfsdp.parity.records.writing import Writer
from mmfsdp.parity.sketching.figures import Figures

__all__ = ["Watch", "WatchSettings", "watching"]

_log = logging.getLogger("mmfsdp.parity")
_USUAL = 50  # norms that a new one is compared with
_FEWEST = 5  # before that many, none is a jump
_SKIPPED = 20  # steps in a row that a gradient scaler may skip until it has found its scale

_FOLLOWED = ("input", "output", "gradient of output", "gradient before clipping", "gradient")
_Name = tuple[str, str, int]


@contextmanager
def watching(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    every: int = 10,
    jump: float = 10.0,
    keep: int = 4,
    alarms: int = 3,
    depth: int = 2,
    order: Order = "blocks",
    first_step: int = 0,
) -> Iterator[Watch]:
    """Watch a training loop for a jump of the norm and for numbers that are not finite. Call it on every rank.

    Every n-th step is recorded as by `mmfsdp.recording`, but kept in memory. At the end of such a step the norms of all
    steps since the last one are looked at. If one is not finite, or many times the median of the last 50, or if a
    recorded tensor has such elements, there is an alarm, one until all is well again: the log names the tensor where it
    began; the steps in memory, and as many after them, each of them now, are written to ``folder/step_N``, which
    `mmfsdp.compare` reads. Nothing is sent: all ranks see the same norm, so all write. Steps that a gradient scaler
    skips, as their norm is not finite, are no alarm before there are 20 in a row.

    Args:
        folder: Where records are written; it is made at the first alarm.
        model: See `mmfsdp.recording`.
        optimizer: See `mmfsdp.recording`.
        every: Record each step whose number it divides.
        jump: How many times the median a norm must be.
        keep: How many recorded steps to keep in memory: about 600 bytes for each tensor and step.
        alarms: Number of alarms after which no more records are written.
        depth: See `mmfsdp.recording`.
        order: See `mmfsdp.recording`.
        first_step: See `mmfsdp.recording`.

    Yields:
        The watch. Its ``alarms`` are sentences. Tell it the norm with ``norm(value)`` if the loop does not call
        ``clip_grad_norm_`` by the names that `mmfsdp.recording` knows.

    Raises:
        ConfigError: An argument has an unknown value.
    """
    settings = WatchSettings(every, jump, keep, alarms, depth, order)
    made = Watch(folder, model, optimizer, settings, first_step=first_step)
    try:
        yield made
    finally:
        made.close()


@dataclass(frozen=True)
class WatchSettings:
    """The settings of a watch, as `watching` takes them.

    Raises:
        ConfigError: A setting has an unknown value.
    """

    every: int = 10
    jump: float = 10.0
    keep: int = 4
    alarms: int = 3
    depth: int = 2
    order: Order = "blocks"

    def __post_init__(self) -> None:
        is_known = self.depth >= 0 and self.order in ("blocks", "strided")
        if not is_known or self.every < 1 or self.keep < 2 or self.alarms < 1 or not self.jump > 1:
            given = ", ".join(f"{name}={value!r}" for name, value in asdict(self).items())
            raise ConfigError(
                "watching() needs every >= 1, jump > 1, keep >= 2, alarms >= 1, depth >= 0 and order 'blocks' or "
                f"'strided', got {given}."
            )


class Watch(Recording):
    """A watch that runs; `watching` makes it. Who makes one calls ``close()`` at the end.

    Args:
        folder: Where records are written; it is made at the first alarm.
        model: See `mmfsdp.recording`.
        optimizer: See `mmfsdp.recording`.
        settings: When to record, and what an alarm is.
        first_step: See `mmfsdp.recording`.

    Attributes:
        alarms: What has gone wrong, a sentence each.
    """

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        settings: WatchSettings,
        *,
        first_step: int = 0,
    ) -> None:
        self.alarms: list[str] = []
        self._folder, self._wanted = Path(folder), settings
        self._norms: list[tuple[int, str, torch.Tensor | float]] = []
        self._usual: dict[str, deque[float]] = {}
        self._until = -1  # until this step all are recorded
        self._is_wrong = self._told = False  # `_told`: of a norm since an optimizer has stepped
        self._skipped = 0
        every, depth, order = settings.every, settings.depth, settings.order
        super().__init__(
            Path(folder), model, optimizer, depth=depth, every=every, order=order, perturb=None, step=first_step
        )

    def norm(self, value: torch.Tensor | float, of: str = "") -> None:
        """Tell the norm of gradients, which is the same on all ranks. Not collective.

        Args:
            value: The norm.
            of: The name of the optimizer whose gradients these are, if there are several: each has its usual norm. By
                default a norm is compared with those that were the first of their step, or the second, and so on.
        """
        self._told = True
        name = of or str(sum(step == self._record.step for step, _, _ in self._norms))
        self._norms.append((self._record.step, name, value.detach() if isinstance(value, torch.Tensor) else value))
        super().norm(value)

    def _make_writer(self, folder: Path, rank: int, head: dict[str, Any]) -> _Ring:
        self._ring = _Ring(folder, rank, head, self._wanted.keep)
        return self._ring

    @property
    def _is_on(self) -> bool:
        return super()._is_on or (self._record.step <= self._until and not self._record.writer.stopped)

    def _begin(self, module: nn.Module, given: Any) -> None:
        if self._told and module.training:
            self._told = False
            if not math.isfinite(_number(self._norms[-1][2])):
                self._skip()
        super()._begin(module, given)

    def _skip(self) -> None:
        """Drop what was recorded of a step that a gradient scaler has skipped; after many, end it."""
        self._skipped += 1
        if self._skipped < _SKIPPED:
            self._norms.pop()
            self._ring.discard()
            self._record.slots.end_step()
        else:
            self._end_step()

    def _after_update(self, optimizer: Optimizer) -> None:
        super()._after_update(optimizer)
        self._told, self._skipped = False, 0

    def _end_step(self) -> None:
        step, judge = self._record.step, self._is_on
        super()._end_step()
        if judge:
            self._judge(step)

    def _judge(self, step: int) -> None:
        why = self._strange_norm()
        if self._ring.is_dumping:
            if step >= self._until:
                self._ring.finish()
            return
        if self._ring.odd:
            why = why or f"Step {step} has numbers that are not finite"
        known, self._is_wrong = self._is_wrong, bool(why)
        if why and not known and len(self.alarms) < self._wanted.alarms:
            target = self._folder / f"step_{step:06}"
            self._ring.dump(target)
            self._until = step + self._wanted.keep
            self.alarms.append(f"{why}. {self._began()} The record: {target}")
            if self._record.rank == 0 or self._ring.odd:
                _log.error("%s", self.alarms[-1])
        self._ring.odd = ""

    def _began(self) -> str:
        if self._ring.odd:
            return f"On rank {self._record.rank}, {self._ring.odd}."
        found = self._ring.origin(self._wanted.jump)
        if found is None:
            return "No tensor of the last recorded step has grown by as much: it ended before, or grew slowly."
        key, norm, usual = found
        grown = f"its norm is {norm:.4g}, and {usual:.4g} in the steps before"
        return f"On rank {self._record.rank} it began at {key}: {grown}."

    def _strange_norm(self) -> str:
        """Return what is wrong with the first strange norm since it was last called; empty if none is."""
        why = ""
        for step, name, value in self._norms:
            norm, before = _number(value), self._usual.setdefault(name, deque(maxlen=_USUAL))
            usual = statistics.median(before) if len(before) >= _FEWEST else math.inf
            if not math.isfinite(norm):
                why = why or f"The norm of step {step} is {norm}"
            elif norm > self._wanted.jump * usual:
                why = why or f"The norm of step {step} is {norm:.4g}, {norm / usual:.0f} times as much as before"
            else:
                before.append(norm)
        self._norms.clear()
        return why


def _number(value: torch.Tensor | float) -> float:
    return float(value.full_tensor() if isinstance(value, DTensor) else value)


class _Ring(Writer):
    """A writer that writes nothing until `dump` is called.

    Args:
        folder: Not used.
        rank: This rank.
        head: What the run is.
        keep: How many recorded steps to keep.
    """

    def __init__(self, folder: Path, rank: int, head: Mapping[str, Any], keep: int) -> None:
        self._steps: deque[str] = deque(maxlen=keep)
        super().__init__(folder, rank, head)

    @property
    def is_dumping(self) -> bool:
        """Whether what is recorded goes to a file."""
        return self._file is not None

    def dump(self, folder: Path) -> None:
        """Write the steps that are kept, and from now on all others, to a folder."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = file_of(folder, self._rank).open("w", encoding="utf-8")
        except OSError as error:
            self._stop(error)
        super()._write(self._head + "".join(self._steps))

    def finish(self) -> None:
        """End the file that `dump` began."""
        self.odd = ""
        super()._write(json.dumps({"end": True}) + "\n")
        if self._file is not None:
            self._file.close()
            self._file = None

    def origin(self, factor: float) -> tuple[Key, float, float] | None:
        """Return the first tensor of the last step whose norm is that many times its usual one, with both norms.

        Args:
            factor: How many times the median of the steps before is a jump.
        """
        *before, last = [[_entry(line) for line in text.splitlines()] for text in self._steps] or [[]]
        usual: dict[_Name, list[float]] = {}
        for entry in (entry for step in before for entry in step):
            usual.setdefault(_name(entry.key), []).append(entry.figures.norm)
        for entry in last:
            norms = usual.get(_name(entry.key))
            if entry.key.kind in _FOLLOWED and norms and _jumps(entry.figures, statistics.median(norms), factor):
                return entry.key, entry.figures.norm, statistics.median(norms)
        return None

    def close(self) -> None:
        """Write what is left, if a file is open. Steps in memory are dropped."""
        self.flush()
        if self.is_dumping:
            self.finish()

    def _open(self, folder: Path, rank: int, head: str) -> None:
        self._rank, self._head = rank, head

    def _write(self, text: str) -> None:
        self._steps.append(text)
        super()._write(text)


def _entry(line: str) -> Entry:
    return entry_of(json.loads(line))


def _name(key: Key) -> _Name:
    return key.kind, key.name, key.call


def _jumps(figures: Figures, usual: float, factor: float) -> bool:
    return bool(figures.odd) or figures.norm > factor * usual > 0
