"""The share of a GPU's memory that a training process takes: the allocator's, and that beside it. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import product

from mmfsdp.rehearsal.allocator.caching import DeviceFullError
from mmfsdp.rehearsal.allocator.nccl_memory import NCCL_LIBRARY, alone_bytes, communicator_bytes
from mmfsdp.rehearsal.allocator.replaying import Replayed, replayed
from mmfsdp.rehearsal.allocator.wrapping import Wrapped
from mmfsdp.rehearsal.recording.step_records import Allocation, Collective
from mmfsdp.rehearsal.timing.device_specs import UNKNOWN, Device

__all__ = [
    "CONTEXT",
    "CUBLAS_LARGE",
    "CUBLAS_SMALL",
    "UNCERTAIN",
    "beside_allocator",
    "taken_ranges",
    "workspaces_of",
]

_MIB = 1 << 20
_HOPPER = 9  # major number of its compute capability
_PAIRS = re.compile(r":(\d+):(\d+)")
UNCERTAIN = 0.04
"""How far published steps are from the nearest replay at most, in the half that fits
(docs/appendix/published_runs.md): the order of releases on a GPU, fragments that were there before, workspaces that
are not modelled."""

_GIB = 1 << 30
_LARGE_SHARE = 1 / 8
"""From which share of what is taken on the largest buffer of gradients may need a segment of its own again. One of
3.91 GiB did in the 8 B step that was measured on an H100 (docs/appendix/measured_on_gpu.md)."""

CONTEXT = (287_047_680 + 232 * _MIB, 666_632_192)
"""Least and most bytes of the CUDA context with torch's kernels: as measured with modules loaded lazily and at once, in
https://github.com/pytorch/pytorch/pull/86509. Steps load kernels of 232 to 310 MiB, as measured with nine models on an
H100 and an H200."""

CUBLAS_SMALL = (2 * 4096 * 1024 + 8 * 16 * 1024,) * 2
"""Workspaces of cuBLAS, one each for the threads of forward and of backward, of 4096 KiB x 2 + 16 KiB x 8:
torch's default before Hopper (aten/src/ATen/cuda/CublasHandlePool.cpp). The caching allocator hands them out."""

CUBLAS_HOPPER = (32 * _MIB,) * 2
"""The same from Hopper on."""

CUBLAS_LARGE = (*CUBLAS_HOPPER, _MIB)
"""The same with cuBLASLt's workspace, as measured on an H100 with torch 2.11. Only products with a bias use it, and
releases that share it with cuBLAS do not allocate it (https://github.com/pytorch/pytorch/pull/181944)."""

_SETTING = "CUBLAS_WORKSPACE_CONFIG"


def workspaces_of(device: Device | None) -> tuple[Sequence[int], Sequence[int]]:
    """Return the least and the most workspaces that kernels are expected to keep on a device, in bytes.

    ``CUBLAS_WORKSPACE_CONFIG``, pairs of KiB and counts such as ``:4096:2:16:8``, replaces the default size, as in
    training.

    Args:
        device: The device; None if it is not known.
    """
    size = sum(int(kib) * 1024 * int(count) for kib, count in _PAIRS.findall(os.environ.get(_SETTING, "")))
    if size:
        return (size,) * 2, (size,) * 2
    if device is None or device.capability == UNKNOWN:
        return CUBLAS_SMALL, CUBLAS_LARGE
    return (CUBLAS_HOPPER, CUBLAS_LARGE) if device.capability[0] >= _HOPPER else (CUBLAS_SMALL, CUBLAS_SMALL)


def taken_ranges(
    allocations: Sequence[Allocation],
    phases: Iterable[tuple[str, int]],
    *,
    expandable: bool = False,
    workspaces: tuple[Sequence[int], Sequence[int]] = (CUBLAS_SMALL, CUBLAS_LARGE),
    wrapped: Iterable[Sequence[Wrapped]] = (),
    limits: Sequence[int] = (),
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the least and the most bytes that the caching allocator takes from the device, and that it hands out.

    Replays vary what cannot be known here: the workspaces of cuBLAS, whether the optimizer's state is there before the
    first step or is made in it, and what wrapping left. To what is taken comes an uncertainty of 4 % in both
    directions. Without expandable segments, the most covers that a very large buffer of gradients does not find the
    segment that it left: smaller requests have taken parts of it since the step before.

    Args:
        allocations: All allocations of a step.
        phases: Names of the step's phases, each with its first moment.
        expandable: Use expandable segments.
        workspaces: See `workspaces_of`.
        wrapped: How the model may have been wrapped, see `mmfsdp.rehearsal.allocator.wrapping`.
        limits: The least and the most that the device has for the allocator; empty if there is no limit.
    """
    state_from = next((begin for name, begin in phases if name == "optimizer"), None)
    found = []
    every = dict.fromkeys(map(tuple, workspaces)), (None, state_from), dict.fromkeys([(), *map(tuple, wrapped)])
    for kept, moment, units in product(*every):
        run = partial(replayed, allocations, expandable=expandable, workspaces=kept, state_from=moment, wrapped=units)
        found += _limited(run, () if expandable else limits)
    taken, held = [item.reserved for item in found], [item.allocated for item in found]
    low, high = round(min(taken) * (1 - UNCERTAIN)), round(max(taken) * (1 + UNCERTAIN))
    once = 0 if expandable else _largest_once(allocations)
    if once >= _LARGE_SHARE * max(taken):
        high = min(high + once, max(high, *limits)) if limits else high + once
    return (max(low, min(held)), high), (min(held), max(held))


def _largest_once(allocations: Iterable[Allocation]) -> int:
    """Return the bytes of the largest request of a step, if it is of gradients, very large, and like no other; else 0.

    Its segment is free through forward and most of backward, whose requests are cut from it.
    """
    made = [(item.nbytes, item.stream, item.kind) for item in allocations if item.begin]
    most, stream, kind = max(made, default=(0, "", ""))
    like = sum(nbytes > most / 2 for nbytes, other, _ in made if other == stream)
    return most if most >= _GIB and like == 1 and kind == "reduce buffer" else 0


def _limited(run: Callable[..., Replayed], limits: Sequence[int]) -> list[Replayed]:
    """Return the results with limits if these are reached, and memory suffices; and else without."""
    free = run()
    found = []
    for limit in limits:
        if free.reserved <= limit:
            found.append(free)
        else:
            with suppress(DeviceFullError):
                found.append(run(limit=limit))
    return found or [free]


def beside_allocator(collectives: Iterable[Collective], device: Device | None = None) -> tuple[int, int]:
    """Return the least and the most bytes of the CUDA context, of NCCL, and of its communicators.

    Each group of several ranks that the step sends in has a communicator; torch makes it with the first message. With
    one rank there is a communicator if the training loop makes one.

    Args:
        collectives: The collectives of a step.
        device: The device; None if it is not known.
    """
    groups = len({(item.ranks, item.stride) for item in collectives if item.ranks > 1})
    if not groups:
        return CONTEXT[0], CONTEXT[1] + NCCL_LIBRARY[0] + alone_bytes(device)[1]
    each = communicator_bytes(device)
    low, high = (CONTEXT[case] + NCCL_LIBRARY[case] + groups * each[case] for case in range(2))
    return low, high
