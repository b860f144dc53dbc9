"""`Proof`: what proving a plan has found, as text that can be pasted into an issue, and as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmfsdp.parity.comparing.comparison import Comparison

__all__ = ["Proof"]


@dataclass(frozen=True)
class Proof:
    """A model's computation on several ranks beside that in one process."""

    model: str
    ranks: int
    steps: int
    """Number of steps trained before the checkpoint; the same number follows it."""
    resumed_on: int
    """On how many ranks training went on from the checkpoint."""
    trained: Comparison
    """The steps before the checkpoint."""
    resumed: Comparison
    """The steps after it."""
    versions: Mapping[str, str]
    assumed: tuple[str, ...]
    """Changes that made the runs comparable."""
    device: str = "cpu"
    """The type of device that computed."""
    against: str = "alone"
    """The reference: ``"alone"`` or ``"ddp"``."""
    rank: int = 0
    """The rank of the process that holds this, of those that a launcher has started; one of them prints."""

    @property
    def proven(self) -> bool:
        """Whether everything that was compared is equal, before the checkpoint and after it."""
        return self.trained.same and self.resumed.same

    @property
    def evaluated(self) -> bool:
        """Whether evaluations were compared too."""
        return all(any(item.key.kind == "evaluation" for item in run.compared) for run in (self.trained, self.resumed))

    def describe(self) -> dict[str, Any]:
        """Return plain values only."""
        return {
            "model": self.model,
            "ranks": self.ranks,
            "steps": self.steps,
            "resumed_on": self.resumed_on,
            "proven": self.proven,
            "trained": self.trained.describe(),
            "resumed": self.resumed.describe(),
            "versions": dict(self.versions),
            "evaluated": self.evaluated,
            "assumed": [*self.assumed],
            "device_type": self.device,
            "against": self.against,
        }

    def __str__(self) -> str:
        on = ", ".join([*(f"{name} {version}" for name, version in self.versions.items()), self.device])
        changed = f" ({'; '.join(self.assumed)})" if self.assumed else ""
        ranks, again = _count(self.ranks, "rank"), _count(self.resumed_on, "rank")
        beside, other = ("in one process", "one process") if self.against == "alone" else ("with DDP", "DDP")
        if self.proven:
            count = len(self.trained.compared) + len(self.resumed.compared)
            most = max(self.trained.closest, self.resumed.closest)
            return (
                f"Proven: {self.model} computes on {ranks} what it computes {beside}, over {_count(self.steps, 'step')}"
                f"{' with an evaluation' if self.evaluated else ''}, "
                f"and over {self.steps} more from a checkpoint on {again}. {count} tensors were compared; the largest "
                f"difference is {most:.0%} of what is allowed. On {on}{changed}."
            )
        where = f"on {ranks}" if not self.trained.same else f"after resuming on {again}"
        found = self.resumed if self.trained.same else self.trained
        return f"Not proven: {self.model} differs {where} from {other}.\n{found}\nOn {on}{changed}."


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"
