"""Tells whether a rehearsal compiles what training compiles. Torch-free."""

from __future__ import annotations

from mmfsdp.basics.torch_releases import COMPILES_FAKE_TENSORS, torch_has
from mmfsdp.planning.schema import ShardPlan

__all__ = ["EAGER_INSTEAD", "compiles"]

EAGER_INSTEAD = (
    "Units are compiled in training, but this rehearsal ran them eagerly: it compiles for the backend inductor, with "
    "torch 2.13 or newer. Compiled units keep fewer activations and are faster."
)


def compiles(plan: ShardPlan) -> bool:
    """Return whether a rehearsal of the plan compiles its units: for Inductor only, and with a torch that can."""
    return torch_has(COMPILES_FAKE_TENSORS) and (plan.compile is None or plan.compile.backend == "inductor")
