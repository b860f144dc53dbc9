"""Measures the device at hand: the operators of rehearsals, and the links between ranks."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from mmfsdp.errors import ConfigError, ShardStateError
from mmfsdp.rehearsal.fakes.worlds import alone
from mmfsdp.rehearsal.measured.issuing import issue_seconds
from mmfsdp.rehearsal.recording.calls import Call, Spec, seconds_of
from mmfsdp.rehearsal.result import Rehearsal
from mmfsdp.rehearsal.timing.device_specs import Device
from mmfsdp.rehearsal.timing.links import Link, Links
from mmfsdp.rehearsal.timing.ranges import Range

__all__ = ["calibrate", "measure_links"]

_DTYPES = ("float32", "bfloat16", "float64")
_PRODUCT = 256  # rows and columns of matrix products
_STREAM = 16 << 20  # bytes to copy
_SMALL, _LARGE = 1 << 10, 1 << 22  # bytes of messages


def calibrate(
    *rehearsals: Rehearsal,
    clock: Callable[[], float] = time.perf_counter,
    links: Links | None = None,
    together: bool = False,
    budget: float = 0.01,
) -> Device:
    """Measure the CPU at hand, and return it as a device for `Rehearsal.time`. Not collective, unless ``together``.

    Each operator of the rehearsals is run on its own, on tensors of the same shapes. Operators of other steps follow a
    roofline whose peaks are measured, too. The time to issue an operator is measured on steps of a tiny model: it
    includes autograd, modules, and FSDP's work on the CPU. Use as many threads as the training will.

    Args:
        rehearsals: Steps whose operators to measure, rehearsed with ``device_type='cpu'``.
        clock: Returns seconds. With ``time.process_time`` and one thread, other processes disturb less.
        links: The links between ranks, as `measure_links` measures them.
        together: Run the tiny model on all ranks of the process group, which must all call this, instead of on one:
            FSDP does more on the CPU where it sends something.
        budget: About how many seconds to spend on an operator of a shape.

    Raises:
        ConfigError: A rehearsal is not one of a step on the CPU.
        ShardStateError: ``together`` without a process group.
    """
    if together and not dist.is_initialized():
        raise ShardStateError("Ranks calibrate together in a process group. Call this after init_process_group().")
    for found in rehearsals:
        if found.device_type != "cpu":
            raise ConfigError(
                f"Only the CPU can be calibrated, and this is a rehearsal for {found.device_type!r}. Rehearse with "
                "device_type='cpu'."
            )
    device = torch.device("cpu")
    calls = {signature: call for found in rehearsals for signature, call in found.calls.items()}
    measured = {signature: seconds_of(call, clock, device, budget) for signature, call in calls.items()}
    products = {name: _product_seconds(name, clock) for name in _DTYPES}
    own = {name: 2 * _PRODUCT**3 / seconds for name, seconds in products.items() if seconds}
    copied = seconds_of(Call(torch.clone, (Spec((_STREAM,), (1,), torch.uint8),), {}), clock, device)
    made = Device(
        "this CPU",
        own,
        2 * _STREAM / (copied or 1.0),
        0,
        links or Links(Link(2e9, 50e-6), Link(1e9, 100e-6), torch.get_num_threads()),
        f"measured with torch {torch.__version__}, {torch.get_num_threads()} threads",
        products=Range(0.3, 0.8, 1.0),
        attention=Range(0.2, 0.5, 1.0),
        streaming=Range(0.4, 1.0, 2.0),
        smallest=0.0,
        is_async=False,
        measured={signature: seconds for signature, seconds in measured.items() if seconds is not None},
        coverage="what steps of other models have differed by; see the table of errors",
    )
    with contextlib.nullcontext() if together else alone():
        return replace(made, issues=issue_seconds(made, clock))


def measure_links(clock: Callable[[], float] = time.perf_counter) -> Links:
    """Return the links between the ranks at hand, as messages of two sizes show them. Collective: every rank.

    Args:
        clock: Returns seconds.

    Raises:
        ShardStateError: There is no process group, or it has one rank.
    """
    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise ShardStateError("Links can be measured between 2 or more ranks. Call this after init_process_group().")
    world = dist.get_world_size()
    small, large = (_sent_seconds(_gathers(), size, clock) for size in (_SMALL, _LARGE))
    least, most = (_sent_seconds(_scatters(), size, clock) for size in (_SMALL, _LARGE))
    bandwidth = (world - 1) / world * (_LARGE - _SMALL) / max(large - small, 1e-9)
    reducing = max((most - least) / max(large - small, 1e-9), 1.0)
    link = Link(bandwidth, small / (world - 1))
    return Links(link, link, world, Range(0.8, 1.0, 1.2), 0.0, reducing)


def _gathers() -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """Return the all-gather of a part into a whole tensor. torch 2.13 has another name for it, and warns of this."""
    gather = vars(dist).get("all_gather_single") or dist.all_gather_into_tensor
    return lambda part, whole: gather(whole, part)


def _scatters() -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """Return the reduce-scatter of a whole tensor into a part."""
    return vars(dist).get("reduce_scatter_single") or dist.reduce_scatter_tensor


def _sent_seconds(send: Callable[[torch.Tensor, torch.Tensor], Any], nbytes: int, clock: Callable[[], float]) -> float:
    """Return the median seconds of a collective. Its whole tensor has ``nbytes`` bytes and is of float32."""
    count = nbytes // 4 // dist.get_world_size()
    part, whole = torch.zeros(count), torch.zeros(count * dist.get_world_size())
    found = []
    for _ in range(12):
        begin = clock()
        send(part, whole)
        found.append(clock() - begin)
    return statistics.median(found)


def _product_seconds(dtype: str, clock: Callable[[], float]) -> float | None:
    spec = Spec((_PRODUCT, _PRODUCT), (_PRODUCT, 1), getattr(torch, dtype))
    return seconds_of(Call(torch.mm, (spec, spec), {}), clock, torch.device("cpu"))
