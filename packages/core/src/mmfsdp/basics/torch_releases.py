"""The differences between the supported releases of torch; no other module depends on the release.

Each constant is the first release, (major, minor), that behaves as its description says. Once `MINIMUM_TORCH` has
reached it, the constant goes, with the code for older releases; a test says so. Functions act alike on all releases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmfsdp.basics.torch_version import installed_release

if TYPE_CHECKING:
    import torch

__all__ = [
    "ACCUMULATES_IN_GRAD",
    "COMPILES_FAKE_TENSORS",
    "COUNTS_EVERY_GROUP",
    "FREES_RECEIVED_FIRST",
    "HAS_SEVERAL_GROUPS",
    "KEEPS_ROOT_MESH",
    "PACKS_LSTM_STATES",
    "RESETS_ITERATIONS",
    "RUNS_UNITS_IN_PARTS",
    "SHARDS_INTEGERS",
    "STARTS_ADAGRAD_IN_STEP",
    "counted_groups",
    "counts_every_group",
    "frees_received_first",
    "start_adagrad",
    "torch_has",
]

STARTS_ADAGRAD_IN_STEP = (2, 12)
"""Adagrad makes its state in the first step, as other optimizers do; its constructor does so on 2.9."""

HAS_SEVERAL_GROUPS = (2, 12)
"""A module that was sharded can have several parameter groups."""

SHARDS_INTEGERS = (2, 12)
"""``fully_shard`` shards parameters of integers, such as packed weights of 4 bits, on which older releases raise
(https://github.com/pytorch/pytorch/issues/177844)."""

COMPILES_FAKE_TENSORS = (2, 13)
"""``torch.compile`` takes fake tensors as inputs; 2.9 raises an error, and 2.10 to 2.12 were not tried."""

KEEPS_ROOT_MESH = (2, 13)
"""A part of a part of a mesh belongs to the same mesh as the first one; on 2.9 not, and 2.10 to 2.12 were not tried."""

PACKS_LSTM_STATES = (2, 13)
"""oneDNN keeps less for layers of an LSTM on the CPU than with 2.9; 2.10 to 2.12 were not tried."""

RESETS_ITERATIONS = (2, 13)
"""``FSDPModule.reset_iter_state()`` makes training possible after a forward that raised."""

RUNS_UNITS_IN_PARTS = (2, 13)
"""A unit works if only some of its modules run, and if backward recomputes it, it is gathered and casts its inputs."""

COUNTS_EVERY_GROUP = (2, 14)
"""The name of a process group contains how many groups its process has made, also if the whole world makes it."""

ACCUMULATES_IN_GRAD = (2, 15)
"""Gradients that are not reduced yet stay in ``.grad`` of whole parameters, and a reset discards them."""

FREES_RECEIVED_FIRST = (2, 15)
"""In forward, the receive buffer of one unit is freed before the next unit is copied out of its own."""


def torch_has(first: tuple[int, int]) -> bool:
    """Return whether the installed torch is as new as one of the constants of this module."""
    return installed_release() >= first


def counts_every_group() -> bool:
    """Return whether `COUNTS_EVERY_GROUP` holds for the installed release."""
    return installed_release() >= COUNTS_EVERY_GROUP


def counted_groups() -> int:
    """Return the number that torch puts into the name of the next process group that only its own ranks make.

    Until 2.13 that is the number of groups that the process is in.
    """
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world
    return world.group_count if counts_every_group() else len(world.pg_names)


def frees_received_first() -> bool:
    """Return whether `FREES_RECEIVED_FIRST` holds for the installed release; plans of memory depend on it."""
    return installed_release() >= FREES_RECEIVED_FIRST


def start_adagrad(optimizer: torch.optim.Optimizer) -> None:
    """Make the state of an Adagrad that has none, as its constructor does before `STARTS_ADAGRAD_IN_STEP`."""
    import torch

    starts_itself = installed_release() >= STARTS_ADAGRAD_IN_STEP or not isinstance(optimizer, torch.optim.Adagrad)
    if starts_itself or optimizer.state:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            total = torch.full_like(param, optimizer.defaults["initial_accumulator_value"])
            optimizer.state[param] = {"step": torch.tensor(0.0), "sum": total}
