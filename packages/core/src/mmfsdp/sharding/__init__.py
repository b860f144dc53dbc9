"""Carries out a plan: meshes, devices, initialisation, activation checkpointing and the engines."""

from __future__ import annotations

from mmfsdp.basics.lazy import lazy
from mmfsdp.basics.torch_version import require_torch

require_torch(__name__)

# The stub beside this file lists the public names.
__getattr__, __dir__, __all__ = lazy(__name__, __file__)
