"""A step of training run on fake tensors: every allocation and every collective of one rank, without a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmfsdp.basics.lazy import lazy

if TYPE_CHECKING:
    from mmfsdp.rehearsal.calibrating import calibrate, measure_links
    from mmfsdp.rehearsal.first_steps import FirstSteps
    from mmfsdp.rehearsal.fitting.advising import advise
    from mmfsdp.rehearsal.fitting.fastest import fit
    from mmfsdp.rehearsal.fitting.fit_result import Fit, FitOption
    from mmfsdp.rehearsal.measuring import Measured, measure
    from mmfsdp.rehearsal.optimizers import optimizer_from
    from mmfsdp.rehearsal.recording.step_records import KINDS, Allocation, Collective, Moment, Operator
    from mmfsdp.rehearsal.rehearsing import rehearse
    from mmfsdp.rehearsal.reporting.report_page import report
    from mmfsdp.rehearsal.result import Rehearsal
    from mmfsdp.rehearsal.savings import Saving
    from mmfsdp.rehearsal.step import phase_seconds
    from mmfsdp.rehearsal.timing.device_specs import Device, devices, write_device
    from mmfsdp.rehearsal.timing.links import Link, Links
    from mmfsdp.rehearsal.timing.ranges import Range
    from mmfsdp.rehearsal.timing.step_time import StepTime
    from mmfsdp.rehearsal.timing.streams import Span

__all__ = [
    "KINDS",
    "Allocation",
    "Collective",
    "Device",
    "FirstSteps",
    "Fit",
    "FitOption",
    "Link",
    "Links",
    "Measured",
    "Moment",
    "Operator",
    "Range",
    "Rehearsal",
    "Saving",
    "Span",
    "StepTime",
    "advise",
    "calibrate",
    "devices",
    "fit",
    "measure",
    "measure_links",
    "optimizer_from",
    "phase_seconds",
    "rehearse",
    "report",
    "write_device",
]

_WHERE = {
    "FirstSteps": "mmfsdp.rehearsal.first_steps",
    "advise": "mmfsdp.rehearsal.fitting.advising",
    "fit": "mmfsdp.rehearsal.fitting.fastest",
    **dict.fromkeys(("Fit", "FitOption"), "mmfsdp.rehearsal.fitting.fit_result"),
    **dict.fromkeys(
        ("KINDS", "Allocation", "Collective", "Moment", "Operator"), "mmfsdp.rehearsal.recording.step_records"
    ),
    **dict.fromkeys(("Device", "devices", "write_device"), "mmfsdp.rehearsal.timing.device_specs"),
    **dict.fromkeys(("Link", "Links"), "mmfsdp.rehearsal.timing.links"),
    "Range": "mmfsdp.rehearsal.timing.ranges",
    "Saving": "mmfsdp.rehearsal.savings",
    "Span": "mmfsdp.rehearsal.timing.streams",
    "StepTime": "mmfsdp.rehearsal.timing.step_time",
    **dict.fromkeys(("calibrate", "measure_links"), "mmfsdp.rehearsal.calibrating"),
    **dict.fromkeys(("Measured", "measure"), "mmfsdp.rehearsal.measuring"),
    "Rehearsal": "mmfsdp.rehearsal.result",
    "optimizer_from": "mmfsdp.rehearsal.optimizers",
    "phase_seconds": "mmfsdp.rehearsal.step",
    "rehearse": "mmfsdp.rehearsal.rehearsing",
    "report": "mmfsdp.rehearsal.reporting.report_page",
}

_NEEDS_TORCH = {
    "FirstSteps",
    "Measured",
    "advise",
    "calibrate",
    "fit",
    "measure",
    "measure_links",
    "optimizer_from",
    "phase_seconds",
    "rehearse",
}

if not TYPE_CHECKING:  # a type checker reports names that are not there
    __getattr__, __dir__ = lazy(__name__, __all__, _WHERE, needs_torch=_NEEDS_TORCH)
