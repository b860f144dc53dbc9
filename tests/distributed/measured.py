"""Measures a real step on a rank: the CPU memory that torch allocates, and the collectives that it issues."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed.families import FAMILIES, make
from torch._C._distributed_c10d import FakeWork
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mmfsdp
import mmfsdp.rehearsal
from mmfsdp.state import LocalView

__all__ = ["SETTINGS", "measure", "optimizer_of", "rehearsed"]

MARK = "the step that is measured"

SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"activation_checkpointing": {"mode": "full"}},
    "selective": {"activation_checkpointing": {"mode": "every_n", "n": 2}},
    "ops": {"activation_checkpointing": {"mode": "ops"}},
}


class Issued(TorchDispatchMode):
    """Notes each collective: operator, bytes of its whole tensor, ranks of its group."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int, list[int]]] = []
        self._thread = ThreadPoolExecutor(1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sizes = [sum(t.nbytes for t in tree_leaves(part) if isinstance(t, torch.Tensor)) for part in args[:2]]
            group = next(
                dist.ProcessGroup.unbox(value)
                for value in args
                if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value)
            )
            self.found.append((func._schema.name, max(sizes), dist.get_process_group_ranks(group)))
            tensors = [value for value in tree_leaves(args) if isinstance(value, torch.Tensor)]
            before = [tensor._use_count() for tensor in tensors]
            # The profiler sees what this thread allocates and frees. Gloo copies tensors here and frees the copies in a
            # thread of its own, so it runs in another one. Wait until it has dropped what it sent.
            self._thread.submit(_send, [(func, args, kwargs or {})]).result()
            deadline = time.monotonic() + 5
            while any(t._use_count() > count for t, count in zip(tensors, before, strict=True)):
                assert time.monotonic() < deadline, "gloo keeps the tensors"
                time.sleep(0.0005)
            return args[0], FakeWork().boxed()
        return func(*args, **(kwargs or {}))


def _send(call: list[Any]) -> None:
    func, args, kwargs = call.pop()  # this thread keeps nothing, not even its own arguments
    with torch.no_grad():
        dist.Work.unbox(func(*args, **kwargs)[-1]).wait()


def optimizer_of(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in params if param.requires_grad], lr=1e-3)


def measure(
    rank: int, family: str, config: dict[str, Any], samples: int, accumulate: int, averages: bool = False
) -> tuple[int, dict[str, int], list[tuple[str, int, list[int]]]]:
    """Return of the second step its peak bytes, the bytes of what is there before it, and its collectives."""
    case = FAMILIES[family]
    issued = Issued()
    gc.collect()  # what is freed later would count as negative
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        model = mmfsdp.shard(make(family), config)
        optimizer = optimizer_of(model.parameters())
        view = LocalView(model)
        averaged = AveragedModel(view.tree()) if averages else None
        batches = [case.batch(samples) for _ in range(accumulate)]
        for step in range(2):
            issued.found.clear()
            with record_function(MARK) if step else contextlib.nullcontext(), issued:
                for place, batch in enumerate(batches):
                    with mmfsdp.no_sync(model) if place < accumulate - 1 else contextlib.nullcontext():
                        loss = case.loss(model, batch)
                    if accumulate > 1:
                        loss = loss / accumulate
                    loss.backward()
                del loss
                mmfsdp.clip_grad_norm_(model, 1.0)
                optimizer.step()
                if averaged is not None:
                    averaged.update_parameters(view.tree())
                optimizer.zero_grad()
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    begin = next(event.start_ns() for event in events if event.name() == MARK)
    end = next(event.end_ns() for event in events if event.name() == MARK)
    held = peak = 0
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            if begin <= event.start_ns() <= end:
                peak = max(peak, held)
    state = [value for held in optimizer.state.values() for value in held.values()]
    static = {
        "parameter": storage_bytes(model.parameters()),
        "buffer": storage_bytes(model.buffers()),
        "optimizer state": storage_bytes(state),
        "input": storage_bytes(tree_leaves(batches)),
        "ema": 0 if averaged is None else storage_bytes([*averaged.parameters(), *averaged.buffers()]),
    }
    return peak, {kind: size for kind, size in static.items() if size}, issued.found


def rehearsed(
    family: str, config: dict[str, Any], samples: int, accumulate: int, ranks: int, averages: bool = False
) -> mmfsdp.rehearsal.Rehearsal:
    """Rehearse the step that `measure` runs."""
    case = FAMILIES[family]
    return mmfsdp.rehearse(
        config,
        make(family),
        case.batch(samples),
        mesh=ranks,
        loss=case.loss,
        optimizer=optimizer_of,
        max_norm=1.0,
        accumulate=accumulate,
        device_type="cpu",
        ema=AveragedModel if averages else None,
    )


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of the storages of local tensors."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in local)}
    return sum(storages.values())
