"""The settings of a loop that saves, whatever it saves: the same on all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mmfsdp.errors import ConfigError
from mmfsdp.saving.directory.run import check_count

__all__ = ["LoopSettings"]


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """When to save, and how to stop; `mmfsdp.CheckpointManager` explains each.

    Raises:
        ConfigError: A setting has a wrong value.
    """

    every_steps: int | None = None
    every_minutes: float | None = None
    background: bool = True
    if_busy: Literal["wait", "skip"] = "wait"
    is_tiered: bool = False
    """Whether there is a fast directory."""
    fast_every_steps: int | None = None
    raise_errors: bool = False
    grace_seconds: float | None = 30.0
    exit_code: int = 75

    def __post_init__(self) -> None:
        check_count("every_steps", self.every_steps)
        check_count("fast_every_steps", self.fast_every_steps)
        if self.every_minutes is not None and not 0 < self.every_minutes < math.inf:
            raise ConfigError(f"every_minutes={self.every_minutes!r} is not a positive number.")
        if self.if_busy not in ("wait", "skip"):
            raise ConfigError(f"if_busy must be 'wait' or 'skip', got {self.if_busy!r}.")
        if self.is_tiered != (self.fast_every_steps is not None):
            raise ConfigError("fast_directory and fast_every_steps belong together: pass both, or neither.")
        grace, code = self.grace_seconds, self.exit_code
        if grace is not None and not 0 < grace < math.inf:
            raise ConfigError(f"grace_seconds={grace!r} is not a positive number; None leaves signals alone.")
        if isinstance(code, bool) or not isinstance(code, int) or not 0 <= code < 256:
            raise ConfigError(f"exit_code={code!r} is not a whole number from 0 to 255.")

    def is_due(self, step: int) -> bool:
        """Whether a step is one after which to save."""
        return self.every_steps is not None and step % self.every_steps == 0

    def is_due_fast(self, step: int) -> bool:
        """Whether a step is one after which to save to the fast directory."""
        return self.fast_every_steps is not None and step % self.fast_every_steps == 0

    def have_passed(self, seconds: float) -> bool:
        """Whether it is time to save again, so many seconds after the last save."""
        return self.every_minutes is not None and seconds >= 60 * self.every_minutes
