"""Shows a campaign which phase each rank of a run is in, and lets it wait until a rank enters a phase.

Ranks write into a small file that all map into memory, which costs them nothing. A rank that enters the phase that the
campaign waits for writes its number into a pipe.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import struct
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["PHASES", "Board", "wait_until"]

PHASES = ("start-up", "load", "data loading", "step", "evaluation", "save", "exit")
_RANKS = 8
_SLOT = struct.Struct("<QQQ")  # process, phase, steps done
_FIRST = 64  # the bytes before are the phase that is waited for, counted from 1; or 0


class Board:
    """What the ranks of a run tell about themselves.

    Args:
        folder: The run's folder.
        rank: Which rank this process is; ``None`` in the campaign, which makes the file.
    """

    def __init__(self, folder: Path, rank: int | None = None) -> None:
        file, pipe = folder / "board", folder / "notices"
        if rank is None:
            file.write_bytes(bytes(_FIRST + _RANKS * _SLOT.size))
            os.mkfifo(pipe)
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), 0)
        self._pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        self._rank, self._steps = rank, 0
        if rank is not None:
            self.enter("start-up")

    def enter(self, phase: str, steps: int | None = None) -> None:
        """Begin a phase, and tell how many steps are done."""
        assert self._rank is not None
        self._steps = self._steps if steps is None else steps
        number = PHASES.index(phase)
        _SLOT.pack_into(self._memory, self._place(self._rank), os.getpid(), number, self._steps)
        if self._memory[0] == number + 1:
            with contextlib.suppress(OSError):
                os.write(self._pipe, bytes([self._rank]))

    def phase(self, rank: int) -> str:
        """Return the phase that a rank has entered last."""
        return PHASES[_SLOT.unpack_from(self._memory, self._place(rank))[1]]

    def process(self, rank: int) -> int:
        """Return which process a rank was at last; 0 if there was none."""
        return _SLOT.unpack_from(self._memory, self._place(rank))[0]

    def steps(self) -> tuple[int, ...]:
        """Return how many steps each rank has done."""
        return tuple(_SLOT.unpack_from(self._memory, self._place(rank))[2] for rank in range(_RANKS))

    def await_phase(self, phase: str) -> None:
        """Let the next rank that enters a phase say so."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._pipe, 1 << 16)  # what was said of another one
        self._memory[0] = PHASES.index(phase) + 1

    def has_entered(self, seconds: float) -> int | None:
        """Return which rank has entered the phase, within some seconds from now; ``None`` if none has."""
        ready, _, _ = select.select([self._pipe], [], [], seconds)
        if not ready:
            return None
        self._memory[0] = 0
        return os.read(self._pipe, 1)[0]

    def close(self) -> None:
        self._memory.close()
        os.close(self._pipe)

    def _place(self, rank: int) -> int:
        return _FIRST + rank * _SLOT.size


def wait_until(true: Callable[[], bool], seconds: float) -> bool:
    """Call a function until it returns true; tell whether it did in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.05)
    return False
