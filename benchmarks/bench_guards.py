"""Processor time of each guard in a training step: the figures of docs/adr/0009-one-observer.md.

Each function that a guard adds to the step is timed where it is called. What torch does within it is subtracted.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

import mmfsdp
from benchmarks.bench_overhead import WRAP, build, stepper
from benchmarks.measuring import Spread, sized, spread
from mmfsdp.runtime import training
from mmfsdp.runtime.calls.unit_gates import UnitGate
from mmfsdp.runtime.gathered.lost_writes import LostWrites
from mmfsdp.runtime.gradients.agreement import GradientAgreement
from mmfsdp.runtime.gradients.graph_inputs import RefuseSecondOrder
from mmfsdp.runtime.refusals import guards
from mmfsdp.runtime.sharded_model import ShardedModel
from mmfsdp.testing import run_ranks

__all__ = ["main"]

STEPS, WARM = sized((30, 3), (2, 1))
WATCHED: dict[str, list[tuple[Any, str]]] = {
    "gradients of some ranks": [
        (GradientAgreement, "before_gather"),
        (GradientAgreement, "before_reduce"),
        (GradientAgreement, "_finish"),
    ],
    "a second backward": [(RefuseSecondOrder, "before_backward")],
    "values written in a forward": [(LostWrites, "gathered"), (LostWrites, "before_free")],
    "the state of the model": [(ShardedModel, "before_forward"), (ShardedModel, "after_forward")],
    "calls from outside of a unit": [(UnitGate, "_enter"), (UnitGate, "_leave")],
    "checks of a step": [(guards, "_before_step"), (guards, "_after_step")],
    "checks of clipping": [(training, "check_roles"), (ShardedModel, "roles")],
}


def main() -> dict[str, Any]:
    """Measure on 2 ranks and return milliseconds per step, by guard."""
    first, *_ = run_ranks(measured, 2, timeout=300)
    for name, value in first.items():
        print(f"{name:32} {value} ms of processor time per step", flush=True)
    return {name: {"median": value.median, "low": value.low, "high": value.high} for name, value in first.items()}


def measured(rank: int) -> dict[str, Spread]:
    """Time the guards of 498 parameters in 32 units."""
    spent: dict[str, float] = defaultdict(float)
    inside: list[str] = []

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if inside:
                return function(*args, **kwargs)
            inside.append(name)
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += time.thread_time() - began
                inside.pop()

        return run

    for name, places in WATCHED.items():
        for owner, attribute in places:
            if hasattr(owner, attribute):
                setattr(owner, attribute, timed(name, getattr(owner, attribute)))
    step = stepper(mmfsdp.shard(build(False), {"wrap": WRAP}), mmfsdp.clip_grad_norm_)
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(STEPS + WARM):
        dist.barrier()
        spent.clear()
        began = time.process_time()
        step()
        whole = time.process_time() - began
        if number >= WARM:
            for name in WATCHED:
                found[name].append(1e3 * spent[name])
            found["the whole step"].append(1e3 * whole)
    return {name: spread(values) for name, values in found.items()}


if __name__ == "__main__":
    main()
