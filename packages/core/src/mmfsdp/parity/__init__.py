"""Records what a training loop computes, and compares two recordings. Comparing needs no torch."""

from __future__ import annotations

from mmfsdp.basics.lazy import lazy

# The stub beside this file lists the public names.
__getattr__, __dir__, __all__ = lazy(
    __name__, __file__, needs_torch={"Recording", "Watch", "WatchSettings", "prove", "recording", "watching"}
)
