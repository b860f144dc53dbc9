"""`ShardPlan`: how each module of a model will be sharded, decided before anything is changed. Torch-free."""

from __future__ import annotations

import json
from typing import Any, Self

from pydantic import ValidationError

from mmfsdp.errors import PlanError
from mmfsdp.planning.plan_data import PlanData
from mmfsdp.planning.plan_records import ShardUnit
from mmfsdp.planning.tables.params import render_params
from mmfsdp.planning.tables.units import equal_units, render_diff, render_table, render_tree

__all__ = ["ShardPlan"]


class ShardPlan(PlanData):
    """A complete decision on how to shard a model: a value that prints, compares and converts to JSON."""

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return JSON text that `from_json` reads back to an equal plan."""
        return self.model_dump_json(indent=indent)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return the plan that `to_json` wrote, or that is the ``plan`` of what ``mmfsdp-cli plan --json`` prints.

        Raises:
            PlanError: The text is not a plan as JSON, or was written by another version of the format.
        """
        try:
            given = json.loads(text)
            return cls.model_validate(given.get("plan", given) if isinstance(given, dict) else given)
        except ValidationError as error:
            found = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in found["loc"])
            raise PlanError(f"The text is not a plan: {where + ': ' if where else ''}{found['msg']}.") from None
        except ValueError as error:
            raise PlanError(f"The text is not a plan: Invalid JSON: {error}.") from None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return self.model_dump(mode="json")

    def table(self, *, every_unit: bool = False, width: int | None = None) -> str:
        """Return the shard units as an aligned text table, with totals and notes.

        Args:
            every_unit: Show each unit in a row of its own. By default equal layers share one: ``blocks.{0..31}``.
            width: The longest line in characters; None for no limit. Long cells are wrapped, and columns that do
                not fit are left out.
        """
        return render_table(self, every_unit=every_unit, width=width)

    def tree(self, *, every_unit: bool = False) -> str:
        """Return the shard units as a text tree over module names.

        Args:
            every_unit: Show each unit in a line of its own. By default equal layers share one.
        """
        return render_tree(self, every_unit=every_unit)

    def params_table(self, *, every_param: bool = False, width: int | None = None) -> str:
        """Return the parameters as an aligned text table.

        Each has the axes that divide it, in their order, each with the dimension; the shape that the first rank holds;
        and what becomes of its gradient: the mean over axes whose ranks get different batches, and equal on the ranks
        along axes that share a batch and do not divide it.

        Args:
            every_param: Show each parameter in a row of its own. By default those of equal layers share one.
            width: The longest line in characters; None for no limit.
        """
        return render_params(self, every_param=every_param, width=width)

    def equal_units(self, *, every_unit: bool = False) -> list[tuple[str, list[ShardUnit]]]:
        """Return the units, those that differ in nothing but an index of their name together: ``blocks.{0..31}``.

        Args:
            every_unit: Return each unit alone.
        """
        return equal_units(self, every_unit=every_unit)

    def diff(self, other: ShardPlan) -> str:
        """Return the differences of ``other``, one per line, or an empty string."""
        return render_diff(self, other)

    def __str__(self) -> str:
        return self.table()
