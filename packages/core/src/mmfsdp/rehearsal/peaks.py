"""Measures the most bytes that a real step holds in CPU memory, as torch's profiler sees them."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

__all__ = ["cpu_peak", "peak_of_events"]


def cpu_peak(step: Callable[[], object], held: Iterable[Any]) -> int:
    """Return the most bytes that torch holds in CPU memory during a step, what it has before included.

    Args:
        step: Runs a step that leaves behind what it found, such as one of training that is not the first.
        held: What is held before the step; other things than tensors are ignored.
    """
    gc.collect()  # what is freed later would be taken for the step's
    before = _storage_bytes(held)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_bytes())["traceEvents"]
    found = [event for event in events if event.get("name") == "[memory]"]
    rows = [(event["ts"], event["args"]["Addr"], event["args"]["Bytes"]) for event in found]
    return before + peak_of_events(rows)


def peak_of_events(events: Iterable[tuple[float, int, int]]) -> int:
    """Return the most bytes held by what a step allocates. Pure.

    What is allocated and never freed was freed by another thread, which the profiler does not see: gloo's, that frees
    its copies once they are sent. It does not count, nor does what was there before.

    Args:
        events: When, the address, and the bytes: positive ones are allocated, negative ones freed.
    """
    begun: dict[int, tuple[float, int]] = {}
    changes = []
    for moment, address, nbytes in sorted(events, key=lambda event: event[0]):
        if nbytes > 0:
            begun[address] = moment, nbytes
        elif address in begun:
            begin, size = begun.pop(address)
            changes += [(begin, size), (moment, -size)]
    held = peak = 0
    for _, change in sorted(changes, key=lambda change: change[0]):
        held += change
        peak = max(peak, held)
    return peak


def _storage_bytes(items: Iterable[Any]) -> int:
    """Return the bytes of the storages of tensors, each once, of DTensors those of this rank."""
    local = [item.to_local() if isinstance(item, DTensor) else item for item in items if torch.is_tensor(item)]
    storages = {storage.data_ptr(): storage.nbytes() for storage in (item.untyped_storage() for item in local)}
    return sum(storages.values())
