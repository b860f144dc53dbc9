"""Says whether a validation follows an iteration, so that a run that stops there does not lose it."""

from __future__ import annotations

import bisect
from typing import Any

__all__ = ["validation_follows"]


def validation_follows(runner: Any, done: int) -> bool:
    """Return whether a loop over iterations validates after this one, as MMEngine's `IterBasedTrainLoop` decides.

    Loops over epochs validate at the end of an epoch, which a run that is resumed within it reaches by itself.

    Args:
        runner: The runner, while it trains.
        done: How many iterations are done.
    """
    loop = runner.train_loop
    if runner.val_loop is None or not all(hasattr(loop, name) for name in ("dataloader_iterator", "val_interval")):
        return False
    milestones, intervals = getattr(loop, "dynamic_milestones", [0]), getattr(loop, "dynamic_intervals", None)
    interval = loop.val_interval if intervals is None else intervals[bisect.bisect(milestones, done + 1) - 1]
    return bool(done >= loop.val_begin and (done % interval == 0 or done == loop.max_iters))
