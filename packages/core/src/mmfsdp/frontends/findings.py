"""What a diagnosis of a config says: one finding per setting, and the plan that the config leads to."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from mmfsdp.planning import MemoryEstimate, ShardPlan

__all__ = ["LEVELS", "Diagnosis", "Finding", "Level"]

Level = Literal["ok", "changed", "warning", "error"]
LEVELS: tuple[Level, ...] = ("error", "warning", "changed", "ok")
"""From the gravest: ``error`` cannot run, ``warning`` is probably not what was meant, ``changed`` works and is not what
the framework's own classes did, ``ok`` works as before."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is to be known about a config."""

    level: Level
    path: str
    """The setting, as a dotted path."""
    here: str
    """What mmfsdp does, or why it cannot."""
    stock: str = ""
    """What the framework's own classes did."""
    advice: str = ""
    """What to write, as lines of a config; empty where nothing is to be done."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that was found about a config."""

    path: str
    """The config's file."""
    findings: tuple[Finding, ...]
    """The gravest first."""
    plan: ShardPlan | None = None
    """What would be done; None if there is none, because of an error."""
    suggested: bool = False
    """Whether the plan is that of the advice, as the config itself shards nothing."""
    memory: MemoryEstimate | None = None
    """What rank 0 needs for a step of the plan with the config's optimizer; None without a plan."""

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return all(finding.level != "error" for finding in self.findings)

    def describe(self) -> dict[str, Any]:
        """Return plain values only, as ``doctor --json`` prints them."""
        return {
            "config": self.path,
            "ok": self.ok,
            "findings": [asdict(finding) for finding in self.findings],
            "plan": None if self.plan is None else self.plan.to_dict(),
            "plan_is_suggested": self.suggested,
            "memory": None if self.memory is None else self.memory.describe(),
        }
