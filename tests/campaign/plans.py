"""Chooses by chance how a run of the campaign trains, and which faults come in which of its phases."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

from tests.campaign.board import PHASES
from tests.campaign.faults import FAULTS
from tests.campaign.job import TWO_HOSTS

__all__ = ["DELAYS", "KINDS", "plan_faults", "settings_of"]

KINDS = {
    "same": 0.4,
    "elastic": 0.3,
    "store": 0.1,
    "hosts": 0.1,
    "torchrun": 0.1,
    "mmengine": 0.1,
    "mmengine_hosts": 0.1,
}
"""How often each kind of run comes."""
# How long after a phase begins a fault may come, at most. The phases take about as long.
DELAYS = {
    "start-up": 1.0,
    "load": 0.2,
    "data loading": 0.005,
    "step": 0.01,
    "evaluation": 0.05,
    "save": 0.1,
    "exit": 0.3,
}
_OWN = 0.3  # how often a fault is chosen among those that only this kind of run meets


def settings_of(kind: str, steps: int, chance: random.Random, pace: float = 0.0) -> dict[str, Any]:
    """Choose how a run trains and saves; see training.py."""
    save = chance.choice(["sharded", "local", "full"])
    background, wait = chance.choice([(True, True), (True, False), (False, False)])
    return {"kind": kind, "steps": steps, "pace": pace, "save": save, "background": background, "wait": wait}


def plan_faults(
    kind: str, count: int, chance: random.Random, names: Collection[str] = tuple(FAULTS)
) -> list[tuple[str, str]]:
    """Return phases and the faults that strike in them: in each phase equally many, those of the exit last."""
    possible = [name for name in names if kind in FAULTS[name].kinds]
    phases = [PHASES[number % len(PHASES)] for number in range(count)]
    chance.shuffle(phases)
    phases.sort(key=lambda phase: phase == "exit")
    planned = []
    for number, phase in enumerate(phases):
        fitting = possible
        if phases[number + 1 : number + 2] in (["start-up"], ["load"], ["exit"]):  # only a restart leads there
            fitting = [name for name in possible if FAULTS[name].restarts]
        own = [name for name in fitting if FAULTS[name].kinds in ((kind,), TWO_HOSTS)]
        planned.append((phase, chance.choice(own if own and chance.random() < _OWN else fitting)))
    return planned
