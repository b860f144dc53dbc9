"""Measures a real step on a rank: the CPU memory that torch allocates, and the collectives that it issues."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed.families import FAMILIES, make
from tests.distributed.rarer_families import RARER
from torch._C._distributed_c10d import FakeWork
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_leaves

import mmfsdp
import mmfsdp.rehearsal
from mmfsdp.state import LocalView

__all__ = ["CASES", "SETTINGS", "measure", "optimizer_of", "rehearsed"]

CASES = {**FAMILIES, **RARER}

MARK = "the step that is measured"

COLLECTIVES = (
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "allgather_into_tensor_coalesced_",
    "allreduce_",
    "allreduce_coalesced_",
    "broadcast_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
)

SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"activation_checkpointing": {"mode": "full"}},
    "selective": {"activation_checkpointing": {"mode": "every_n", "n": 2}},
    "ops": {"activation_checkpointing": {"mode": "ops"}},
}


class Issued:
    """Notes each collective while it is entered: operator, bytes of its whole tensor, ranks of its group.

    It takes the place of the operators themselves. Under a dispatch mode torch would not add gradients up in place, and
    the step would need more memory than the one that users run.
    """

    def __init__(self) -> None:
        self.found: list[tuple[str, int, list[int]]] = []
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> Issued:
        self._library = torch.library.Library("c10d", "IMPL")
        for name in COLLECTIVES:
            operator = getattr(torch.ops.c10d, name).default
            self._library.impl(name, partial(self._issue, operator), "AutogradCPU")
        return self

    def __exit__(self, *raised: object) -> None:
        self._library._destroy()

    def _issue(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        sizes = [sum(t.nbytes for t in tree_leaves(part) if isinstance(t, torch.Tensor)) for part in args[:2]]
        group = next(
            dist.ProcessGroup.unbox(value)
            for value in args
            if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value)
        )
        self.found.append((operator._schema.name, max(sizes), dist.get_process_group_ranks(group)))
        tensors = [value for value in tree_leaves(args) if isinstance(value, torch.Tensor)]
        before = [tensor._use_count() for tensor in tensors]
        # The profiler sees what this thread allocates and frees. Gloo copies tensors here and frees the copies in a
        # thread of its own, so it runs in another one. Wait until it has dropped what it sent.
        self._thread.submit(_send, [(operator, args, kwargs)]).result()
        deadline = time.monotonic() + 5
        while any(t._use_count() > count for t, count in zip(tensors, before, strict=True)):
            assert time.monotonic() < deadline, "gloo keeps the tensors"
            time.sleep(0.0005)
        work = FakeWork().boxed()
        return work if len(operator._schema.returns) == 1 else (args[0], work)


def _send(call: list[Any]) -> None:
    operator, args, kwargs = call.pop()  # this thread keeps nothing, not even its own arguments
    with torch._C._AutoDispatchBelowAutograd():  # below `Issued`
        found = operator(*args, **kwargs)
    dist.Work.unbox(found[-1] if isinstance(found, tuple) else found).wait()


def optimizer_of(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in params if param.requires_grad], lr=1e-3)


def measure(
    rank: int,
    family: str,
    config: dict[str, Any],
    samples: int,
    accumulate: int,
    averages: bool = False,
    reduces: bool = False,
    only_first: bool = False,
) -> tuple[int, dict[str, int], list[tuple[str, int, list[int]]]]:
    """Return of the second step its peak bytes, the bytes of what is there before it, and its collectives.

    With ``only_first`` the other ranks take part, and return nothing: to profile takes longer than the steps.
    """
    case, looks = CASES[family], rank == 0 or not only_first
    issued = Issued()
    gc.collect()  # what is freed later would count as negative
    # Also what `shard` sends: of what gloo copies for it, the profiler would see the allocation alone.
    profiling = profile(activities=[ProfilerActivity.CPU], profile_memory=True) if looks else contextlib.nullcontext()
    with profiling as profiled, issued:
        model = mmfsdp.shard(make(case), config)
        optimizer = optimizer_of(model.parameters())
        view = LocalView(model)
        averaged = AveragedModel(view.tree()) if averages else None
        batches = [case.batch(samples) for _ in range(accumulate)]
        for step in range(2):
            issued.found.clear()
            with record_function(MARK) if step else contextlib.nullcontext():
                for place, batch in enumerate(batches):
                    waits = place < accumulate - 1 and not reduces
                    with mmfsdp.no_sync(model) if waits else contextlib.nullcontext():
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
    if not looks:
        return 0, {}, []
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    begin, end = next((event.start_ns(), event.end_ns()) for event in events if event.name() == MARK)
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
    case = CASES[family]
    return mmfsdp.rehearse(
        config,
        make(case),
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
