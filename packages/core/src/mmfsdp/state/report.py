"""Reports how a state dict and a model differ; the report is the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import all_equal, gather_objects, on_all_ranks
from mmfsdp.errors import StateDictError

__all__ = ["LoadReport", "agree", "compare_shapes"]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How a state dict and a model differ; the same on every rank."""

    missing: tuple[str, ...] = ()
    """FQNs that only the model has."""
    unexpected: tuple[str, ...] = ()
    """Keys that only the state dict has."""
    mismatched: tuple[str, ...] = ()
    """FQNs whose shapes differ, each with both shapes."""

    @property
    def missing_keys(self) -> list[str]:
        """`missing`, under the name that torch's ``load_state_dict`` gives it."""
        return list(self.missing)

    @property
    def unexpected_keys(self) -> list[str]:
        """`unexpected`, under the name that torch's ``load_state_dict`` gives it."""
        return list(self.unexpected)

    @property
    def clean(self) -> bool:
        """Whether everything matched."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        parts = [
            f"{len(names)} {word}: {', '.join(names[:5])}" + (" ..." if len(names) > 5 else "")
            for word, names in (
                ("missing", self.missing),
                ("unexpected", self.unexpected),
                ("of another shape", self.mismatched),
            )
            if names
        ]
        return "; ".join(parts) or "all keys match"


def compare_shapes(wanted: Mapping[str, Any], offered: Mapping[str, Any]) -> LoadReport:
    """Return how two sets of shapes by name differ. Not collective.

    Args:
        wanted: The model's shapes; None for a value that is not a tensor.
        offered: The state dict's shapes.
    """
    return LoadReport(
        missing=tuple(name for name in wanted if name not in offered),
        unexpected=tuple(name for name in offered if name not in wanted),
        mismatched=tuple(
            f"{name}: {offered[name]} in the state dict, {shape} in the model"
            for name, shape in wanted.items()
            if name in offered and offered[name] != shape
        ),
    )


def agree(mine: LoadReport, what: str, scope: Scope, *, strict: bool) -> LoadReport:
    """Return the differences that any rank found. Collective: every rank of the scope.

    Args:
        mine: The differences that this rank found.
        what: Name of the model, for the message.
        scope: The ranks that take part.
        strict: Raise if there is any difference.

    Raises:
        StateDictError: With ``strict``, some rank found a difference; raised on every rank.
    """

    def check() -> None:
        if strict and not mine.clean:
            raise StateDictError(f"The state dict does not fit {what}: {mine}.")

    on_all_ranks(check, scope)
    reports = [mine] if all_equal(scope, repr(mine)) else gather_objects(scope, mine)
    return LoadReport(
        missing=_union(report.missing for report in reports),
        unexpected=_union(report.unexpected for report in reports),
        mismatched=_union(report.mismatched for report in reports),
    )


def _union(parts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for part in parts for name in part))
