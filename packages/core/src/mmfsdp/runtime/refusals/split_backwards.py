"""Gives torch's pipelines the weights that a backward computes with, where they compute the weights' gradients apart.

Schedules without bubbles (``ScheduleInterleavedZeroBubble``, ``ScheduleZBVZeroBubble``) first compute the gradients of
inputs, and look for the weights in the autograd graph. Weights that are not gathered then are not in it: they would get
no gradients, without an error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from mmfsdp.errors import UnsupportedCallError
from mmfsdp.runtime.torch_fsdp2.param_groups import Group, name_of, shards_of

__all__ = ["check_gathered", "is_split_backward"]

_MODULE = "torch.distributed.pipelining._backward"
_CALLERS = 4
"""How many frames lie between: ``parameters()`` of torch calls ``named_parameters()``."""


def is_split_backward() -> bool:
    """Return whether a pipeline of torch asks for the weights of a stage. Call it from ``named_parameters()``."""
    frame = sys._getframe(1)
    for _ in range(_CALLERS):
        if frame.f_globals.get("__name__") == _MODULE:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def check_gathered(groups: Iterable[Group]) -> None:
    """Check that all trained weights are gathered. Not collective.

    Raises:
        UnsupportedCallError: A unit is not.
    """
    for group in groups:
        if not group.is_unsharded and any(shard.requires_grad for shard in shards_of(group)):
            raise UnsupportedCallError(
                "This schedule computes the gradients of weights apart from those of inputs, and would find no weights "
                f"of the shard unit {name_of(group)!r}, which was freed after forward: they would not be trained. "
                "Shard the stages with sharding.reshard_after_forward=False, which keeps units gathered, or use "
                "ScheduleGPipe, Schedule1F1B or ScheduleInterleaved1F1B."
            )
