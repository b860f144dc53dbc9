"""Models and configs by the names that people type on a command line."""

from __future__ import annotations

from mmfsdp.basics.lazy import lazy

# The stub beside this file lists the public names.
__getattr__, __dir__, __all__ = lazy(__name__, __file__, needs_torch={"RemadeStep", "build_model"})
