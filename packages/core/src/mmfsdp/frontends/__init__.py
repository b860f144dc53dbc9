"""Models and configs by the names that people type on a command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmfsdp.basics.lazy import lazy

if TYPE_CHECKING:
    from mmfsdp.frontends.building import build_model
    from mmfsdp.frontends.findings import LEVELS, Diagnosis, Finding, Level
    from mmfsdp.frontends.readers import ReadConfig, read_config
    from mmfsdp.frontends.training_step import TrainingStep

__all__ = [
    "LEVELS",
    "Diagnosis",
    "Finding",
    "Level",
    "ReadConfig",
    "TrainingStep",
    "build_model",
    "read_config",
]

_WHERE = {
    "build_model": "mmfsdp.frontends.building",
    **dict.fromkeys(("LEVELS", "Diagnosis", "Finding", "Level"), "mmfsdp.frontends.findings"),
    **dict.fromkeys(("ReadConfig", "read_config"), "mmfsdp.frontends.readers"),
    "TrainingStep": "mmfsdp.frontends.training_step",
}

if not TYPE_CHECKING:  # a type checker reports names that are not there
    __getattr__, __dir__ = lazy(__name__, __all__, _WHERE, needs_torch={"build_model"})
