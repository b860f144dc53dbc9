"""Measures the device at hand: the operators of rehearsals, what it takes to issue one, and the links between ranks."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from mmfsdp.config import ShardConfig
from mmfsdp.errors import ConfigError, ShardStateError
from mmfsdp.planning.resolve import plan as make_plan
from mmfsdp.rehearsal.calls import Call, Spec, seconds_of
from mmfsdp.rehearsal.optimizers import make_optimizer
from mmfsdp.rehearsal.rehearsing import rehearse
from mmfsdp.rehearsal.result import Rehearsal
from mmfsdp.rehearsal.step import default_loss, run_step
from mmfsdp.rehearsal.timing.devices import Device
from mmfsdp.rehearsal.timing.links import Link, Links
from mmfsdp.rehearsal.timing.ranges import Range
from mmfsdp.rehearsal.worlds import alone
from mmfsdp.sharding.apply import shard_in_place
from mmfsdp.sharding.device_mesh import build_mesh

__all__ = ["calibrate", "measure_links", "phase_seconds"]

_DTYPES = ("float32", "bfloat16", "float64")
_PRODUCT = 256  # rows and columns of matrix products
_STREAM = 16 << 20  # bytes to copy
_STEPS = 8
_SMALL, _LARGE = 1 << 10, 1 << 22  # bytes of messages


def calibrate(
    *rehearsals: Rehearsal,
    clock: Callable[[], float] = time.perf_counter,
    links: Links | None = None,
    budget: float = 0.01,
) -> Device:
    """Measure the CPU at hand, and return it as a device for `Rehearsal.time`. Not collective.

    Each operator of the rehearsals is run on its own, on tensors of the same shapes. Operators of other steps follow a
    roofline whose peaks are measured, too. What it takes to issue an operator is measured on steps of a tiny model, by
    phase: it includes autograd, modules, and what FSDP does on the CPU. Use as many threads as the training will.

    Args:
        rehearsals: Steps whose operators to measure, rehearsed with ``device_type='cpu'``.
        clock: Returns seconds. With ``time.process_time`` and one thread, other processes disturb less.
        links: The links between ranks, as `measure_links` measures them.
        budget: About how many seconds to spend on an operator of a shape.

    Raises:
        ConfigError: A rehearsal is not one of a step on the CPU.
    """
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
    return Device(
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
        issues=_issues(clock),
        coverage="what steps of other models have differed by; see the table of errors",
    )


def measure_links(clock: Callable[[], float] = time.perf_counter) -> Links:
    """Return the links between the ranks at hand, as messages of two sizes show them. Collective: every rank.

    What FSDP does on the CPU to gather a unit is the seconds before a collective.

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
    return Links(link, link, world, Range(0.8, 1.0, 1.2), max(_unshard_seconds(clock) - small, 0.0), reducing)


def phase_seconds(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[Any],
    loss: Callable[[nn.Module, Any], torch.Tensor],
    max_norm: float | None,
    clock: Callable[[], float],
    steps: int,
) -> list[dict[str, float]]:
    """Run steps, and return the seconds of the phases of each. Collective: every rank.

    Args:
        model: A sharded model.
        optimizer: Made for its parameters.
        batches: The micro-batches of a step.
        loss: Computes the loss of one.
        max_norm: The norm to clip gradients to; None for no clipping.
        clock: Returns seconds.
        steps: How many steps.
    """
    found = []
    for _ in range(steps):
        seconds: dict[str, float] = defaultdict(float)
        marks: list[tuple[str, float]] = []
        run_step(_marking(marks, clock), model, batches, loss, optimizer, max_norm)
        marks.append(("", clock()))
        for (phase, begin), (_, end) in pairwise(marks):
            seconds[phase] += end - begin
        found.append(dict(seconds))
    return found


def _marking(marks: list[tuple[str, float]], clock: Callable[[], float]) -> Callable[[str], None]:
    return lambda phase: marks.append((phase, clock()))


class _Block(nn.Module):
    """A tiny layer with the operators of a usual one."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        result: torch.Tensor = x + self.down(F.gelu(self.up(self.after(x))))
        return result


def _issues(clock: Callable[[], float]) -> dict[str, float]:
    """Return the seconds that it takes to issue an operator, by phase, beyond what the operator takes."""
    model, batch = nn.Sequential(*[_Block() for _ in range(4)]), torch.randn(2, 4, 8)
    plan = make_plan(model, ShardConfig.from_dict({"wrap": {"kind": "module_class", "classes": "_Block"}}), 1)
    found = rehearse(plan, model, batch, max_norm=1.0, device_type="cpu")
    device = torch.device("cpu")
    known = {signature: seconds_of(call, clock, device, 1e-3) or 0.0 for signature, call in found.calls.items()}
    inside: dict[str, float] = defaultdict(float)
    count: dict[str, float] = defaultdict(float)
    for item in found.operators:
        inside[item.phase] += known.get(item.signature, 0.0) if item.nbytes else 0.0
        count[item.phase] += 1 if item.nbytes or "::" not in item.name else 1 / 3
    with alone():
        state = shard_in_place(model, plan, build_mesh(plan.mesh, "cpu"))
        optimizer = make_optimizer("adamw", list(state.module.parameters()), "cpu")
        steps = phase_seconds(state.module, optimizer, [batch], default_loss, 1.0, clock, _STEPS)[2:]
    return {
        phase: max(statistics.median(step[phase] for step in steps) - inside[phase], 0.0) / count[phase]
        for phase in steps[0]
        if count[phase]
    }


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


def _unshard_seconds(clock: Callable[[], float]) -> float:
    """Return what FSDP takes to gather a tiny unit."""
    model, ranks = nn.LayerNorm(8), dist.get_world_size()
    plan = make_plan(model, ShardConfig.from_dict({"engine": "fsdp2"}), ranks)
    module: Any = shard_in_place(model, plan, build_mesh(plan.mesh, "cpu")).module
    found = []
    for _ in range(12):
        begin = clock()
        module.unshard()
        module.reshard()
        found.append(clock() - begin)
    return statistics.median(found[2:])


def _product_seconds(dtype: str, clock: Callable[[], float]) -> float | None:
    spec = Spec((_PRODUCT, _PRODUCT), (_PRODUCT, 1), getattr(torch, dtype))
    return seconds_of(Call(torch.mm, (spec, spec), {}), clock, torch.device("cpu"))
