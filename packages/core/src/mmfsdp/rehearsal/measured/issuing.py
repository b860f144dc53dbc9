"""Measures the CPU's time to issue operators, on steps of a tiny model whose operators take next to no time."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from mmfsdp.planning.resolve import plan as make_plan
from mmfsdp.planning.schema import ShardPlan
from mmfsdp.rehearsal.recording.calls import seconds_of
from mmfsdp.rehearsal.rehearsing import rehearse
from mmfsdp.rehearsal.running.optimizers import make_optimizer
from mmfsdp.rehearsal.running.step import default_loss, run_step
from mmfsdp.rehearsal.timing.device_specs import Device
from mmfsdp.rehearsal.timing.ranges import Range
from mmfsdp.rehearsal.timing.roofline import weight_of
from mmfsdp.rehearsal.timing.step_time import works_of
from mmfsdp.runtime.torch_fsdp2.observing import Role, Subscriber, Turn, subscribe
from mmfsdp.runtime.torch_fsdp2.param_groups import Group
from mmfsdp.sharding.apply import shard_in_place
from mmfsdp.sharding.device_mesh import build_mesh

__all__ = ["issue_seconds"]

_STEPS, _WARM = 10, 2


class _Block(nn.Module):
    """A tiny layer with the operators of a usual one."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        result: torch.Tensor = x + self.down(F.gelu(self.up(self.after(x))))
        return result


class _Watch(Subscriber):
    """Adds up the seconds that a step spends in each phase and role.

    Args:
        clock: Returns seconds.
    """

    turn = Turn.MEASURING

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self._clock, self._since, self._doing = clock, clock(), ("", "")

    def begin(self, phase: str, role: str = "compute") -> None:
        """Note what the step does from now on."""
        now = self._clock()
        self.seconds[self._doing] += now - self._since
        self._since, self._doing = now, (phase, role)

    @contextmanager
    def communicating(self, group: Group, role: Role) -> Iterator[None]:
        """Note that the step gathers or reduces a unit."""
        before = self._doing
        self.begin(before[0], role)
        try:
            yield
        finally:
            self.begin(*before)


def issue_seconds(device: Device, clock: Callable[[], float]) -> dict[str, float]:
    """Return the seconds to issue an operator, without running it. Collective: every rank of the world.

    The keys are phases, and roles for operators that gather or reduce a unit: FSDP does more to issue these.

    Args:
        device: The device, its links measured.
        clock: Returns seconds.
    """
    model, batch = nn.Sequential(*[_Block() for _ in range(4)]), torch.randn(4, 128, 64)
    config = {"engine": "fsdp2", "wrap": {"kind": "module_class", "classes": "_Block"}}
    plan = make_plan(model, config, dist.get_world_size())
    found = rehearse(plan, model, batch, rank=dist.get_rank(), max_norm=1.0, device_type="cpu")
    cpu = torch.device("cpu")
    known = {signature: seconds_of(call, clock, cpu, 1e-3) or 0.0 for signature, call in found.calls.items()}
    bare = replace(device, measured=known, issue=Range(0.0, 0.0, 0.0))
    left: dict[str, float] = defaultdict(float)
    count: dict[str, float] = defaultdict(float)
    for work, item in zip(
        works_of(found.operators, found.collectives, bare, bare.links, "usual"), found.operators, strict=True
    ):
        left[_key(work.phase, work.role)] -= work.seconds
        count[_key(work.phase, work.role)] += weight_of(item)
    for key, seconds in _step_seconds(model, batch, plan, clock).items():
        left[_key(*key)] += seconds
    return {name: max(left[name], 0.0) / weight for name, weight in count.items() if weight}


def _key(phase: str, role: str) -> str:
    return phase if role == "compute" else role


def _step_seconds(
    model: nn.Module, batch: torch.Tensor, plan: ShardPlan, clock: Callable[[], float]
) -> dict[tuple[str, str], float]:
    """Return the seconds of a real step, by phase and role: medians. Collective: every rank of the world."""
    state = shard_in_place(model, plan, build_mesh(plan.mesh, "cpu"))
    optimizer = make_optimizer("adamw", list(state.module.parameters()), "cpu")
    watch = _Watch(clock)
    subscribe(watch, state.groups)
    steps = []
    for _ in range(_STEPS):
        run_step(watch.begin, state.module, [batch], default_loss, optimizer, 1.0)
        watch.begin("", "")
        steps.append(watch.seconds)
        watch.seconds = defaultdict(float)
    return {key: statistics.median(step[key] for step in steps[_WARM:]) for key in steps[-1]}
