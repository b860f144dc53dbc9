"""A step of training run on fake tensors: every allocation and every collective of one rank, without a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmfsdp.basics.lazy import lazy

if TYPE_CHECKING:
    from mmfsdp.rehearsal.records import KINDS, Allocation, Collective, Moment
    from mmfsdp.rehearsal.rehearsing import rehearse
    from mmfsdp.rehearsal.reporting.page import report
    from mmfsdp.rehearsal.result import Rehearsal

__all__ = ["KINDS", "Allocation", "Collective", "Moment", "Rehearsal", "rehearse", "report"]

_WHERE = {
    **dict.fromkeys(("KINDS", "Allocation", "Collective", "Moment"), "mmfsdp.rehearsal.records"),
    "Rehearsal": "mmfsdp.rehearsal.result",
    "rehearse": "mmfsdp.rehearsal.rehearsing",
    "report": "mmfsdp.rehearsal.reporting.page",
}

_NEEDS_TORCH = {"rehearse"}


def __getattr__(name: str) -> Any:
    return lazy(__name__, __all__, _WHERE, name, needs_torch=_NEEDS_TORCH)
