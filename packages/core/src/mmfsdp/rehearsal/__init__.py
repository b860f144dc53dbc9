"""A step of training run on fake tensors: every allocation and every collective of one rank, without a device."""

from __future__ import annotations

from mmfsdp.basics.lazy import lazy

# The stub beside this file lists the public names.
__getattr__, __dir__, __all__ = lazy(
    __name__,
    __file__,
    needs_torch={
        "FirstSteps",
        "ForecastWatch",
        "Measured",
        "advise",
        "calibrate",
        "explain_out_of_memory",
        "fit",
        "measure",
        "measure_links",
        "optimizer_from",
        "phase_seconds",
        "rehearse",
    },
)
