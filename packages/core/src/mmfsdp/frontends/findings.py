"""The diagnosis of a config: one finding per setting, and the plan that the config leads to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from mmfsdp.planning import MemoryEstimate, ShardPlan

__all__ = ["LEVELS", "Diagnosis", "Finding", "Level"]

Level = Literal["ok", "changed", "warning", "error"]
"""Type of the level of a finding."""
LEVELS: tuple[Level, ...] = ("error", "warning", "changed", "ok")
"""The levels from the most severe: ``error`` cannot run, ``warning`` is probably not intended, ``changed`` works, but
differently from the framework's own classes, ``ok`` works as before."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know about a config."""

    level: Level
    path: str
    """The setting, as a dotted path."""
    here: str
    """The behaviour of mmfsdp, or the reason why it cannot do it."""
    stock: str = ""
    """The behaviour of the framework's own classes."""
    advice: str = ""
    """Lines of a config to write; empty if nothing needs to change."""

    def describe(self) -> dict[str, Any]:
        """Return plain values only; `path` is ``setting`` there, as paths are those of files elsewhere."""
        return {
            "level": self.level,
            "setting": self.path,
            "here": self.here,
            "stock": self.stock,
            "advice": self.advice,
        }


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings about a config: what ``mmfsdp-cli doctor`` prints."""

    path: str
    """The config's file."""
    findings: tuple[Finding, ...]
    """The findings, most severe first."""
    plan: ShardPlan | None = None
    """The plan; None if an error prevents one."""
    suggested: bool = False
    """Whether the plan follows the advice, because the config itself shards nothing."""
    memory: MemoryEstimate | None = None
    """The memory that rank 0 needs for a step with the config's optimizer; None without a plan."""

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return all(finding.level != "error" for finding in self.findings)

    def describe(self) -> dict[str, Any]:
        """Return plain values only, as ``doctor --json`` prints them."""
        return {
            "config": self.path,
            "ok": self.ok,
            "findings": [finding.describe() for finding in self.findings],
            "plan": None if self.plan is None else self.plan.to_dict(),
            "plan_is_suggested": self.suggested,
            "memory": None if self.memory is None else self.memory.describe(),
        }
