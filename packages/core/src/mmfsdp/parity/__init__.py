"""Recording what a training loop computes, and comparing two recordings. Comparing needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmfsdp.basics.lazy import lazy

if TYPE_CHECKING:
    from mmfsdp.parity.comparing import compare
    from mmfsdp.parity.comparison import Compared, Comparison, Difference
    from mmfsdp.parity.page import comparison_page
    from mmfsdp.parity.recorder import Recording, recording
    from mmfsdp.parity.records import Key

__all__ = ["Compared", "Comparison", "Difference", "Key", "Recording", "compare", "comparison_page", "recording"]

_WHERE = {
    "compare": "mmfsdp.parity.comparing",
    **dict.fromkeys(("Compared", "Comparison", "Difference"), "mmfsdp.parity.comparison"),
    "comparison_page": "mmfsdp.parity.page",
    "Key": "mmfsdp.parity.records",
    **dict.fromkeys(("Recording", "recording"), "mmfsdp.parity.recorder"),
}

if not TYPE_CHECKING:  # a type checker reports names that are not there
    __getattr__, __dir__ = lazy(__name__, __all__, _WHERE, needs_torch={"Recording", "recording"})
