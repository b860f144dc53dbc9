"""The share of a GPU's memory that a training process takes: the allocator's, and that beside it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mmfsdp.rehearsal.caching import reserved_bytes
from mmfsdp.rehearsal.recording.step_records import Allocation, Collective

__all__ = ["CONTEXT", "CUBLAS_LARGE", "CUBLAS_SMALL", "NCCL", "beside_allocator", "reserved_range"]

_MIB = 1 << 20
_STREAMS = {"gathered": "gathers", "reduce buffer": "reduces"}

CONTEXT = (287_047_680, 666_632_192)
"""Least and most bytes of the CUDA context with torch's kernels: as measured with modules loaded lazily and at once, in
https://github.com/pytorch/pytorch/pull/86509."""

NCCL = (16 * 4 * _MIB, 32 * 2 * 10 * _MIB)
"""Least and most bytes of a communicator of several ranks: 16 channels with one buffer of 4 MiB, the documented default
of ``NCCL_BUFFSIZE``; 32 channels, a ring's two connections, 10 MiB for each, as counted in
https://github.com/NVIDIA/nccl/issues/1685."""

CUBLAS_SMALL = (2 * 4096 * 1024 + 8 * 16 * 1024,) * 2
"""Workspaces of cuBLAS, one for the thread of forward and one for that of backward, each of 4096 KiB x 2 + 16 KiB x 8:
torch's default before Hopper (aten/src/ATen/cuda/CublasHandlePool.cpp). The caching allocator hands them out."""

CUBLAS_LARGE = (32 * _MIB,) * 4
"""The same from Hopper on, with another two for cuBLASLt, which newer versions of torch share with cuBLAS."""


def reserved_range(
    allocations: Sequence[Allocation], phases: Iterable[tuple[str, int]], *, expandable: bool = False
) -> tuple[int, int]:
    """Return the least and the most bytes that the caching allocator takes from the device, of four replays.

    They vary what cannot be known here: whether all memory is used on one stream, with the small workspaces, or what is
    gathered and reduced is on streams of its own, with the large ones; and whether the optimizer's state is there
    before the first step or is made in it.

    Args:
        allocations: All allocations of a step.
        phases: Names of the step's phases, each with its first moment.
        expandable: Use expandable segments.
    """
    state_from = next((begin for name, begin in phases if name == "optimizer"), None)
    found = [
        reserved_bytes(allocations, streams, expandable=expandable, workspaces=workspaces, state_from=moment)[0]
        for streams, workspaces in (({}, CUBLAS_SMALL), (_STREAMS, CUBLAS_LARGE))
        for moment in (None, state_from)
    ]
    return min(found), max(found)


def beside_allocator(collectives: Iterable[Collective]) -> tuple[int, int]:
    """Return the least and the most bytes of the CUDA context and of NCCL's communicators.

    Each group of several ranks that the step sends in has a communicator; torch makes it with the first message.
    """
    groups = len({(item.ranks, item.stride) for item in collectives if item.ranks > 1})
    return CONTEXT[0] + groups * NCCL[0], CONTEXT[1] + groups * NCCL[1]
