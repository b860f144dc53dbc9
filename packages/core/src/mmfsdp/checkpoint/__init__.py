"""Checkpoints on disk: read the layout of any format, convert between formats; none of it imports torch."""

from __future__ import annotations

from mmfsdp.basics.lazy import lazy

# The stub beside this file lists the public names.
__getattr__, __dir__, __all__ = lazy(__name__, __file__)
