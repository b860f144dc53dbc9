"""Finds the shipped recipes that would turn a checkpoint's weights into a model's, for error messages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.recipes.applying import known_recipes, rewritten
from mmfsdp.errors import ConfigError

__all__ = ["fitting_recipes"]


def fitting_recipes(
    tensors: Mapping[str, TensorEntry],
    rate: Callable[[Mapping[str, TensorEntry]], int],
    *,
    folders: Collection[Path] = (),
    values: Mapping[str, int] | None = None,
) -> list[tuple[str, bool]]:
    """Return the shipped recipes whose result fits best: their names, and whether they are to be undone.

    It reads only the data of weights that a recipe expects to be tied.

    Args:
        tensors: The weights by name.
        rate: Returns how many of the needed weights a recipe made; 0 if the result does not fit.
        folders: Where the model's config file may lie, for the numbers that recipes need.
        values: Numbers that the user gave; those that a recipe does not know are left out.
    """
    rated: dict[tuple[str, bool], int] = {}
    for recipe in known_recipes():
        given = {name: value for name, value in (values or {}).items() if name in recipe.values}
        for inverse in (False, True):
            try:
                made = rewritten(tensors, recipe.name, inverse=inverse, values=given, folders=folders)
            except ConfigError:  # it is for other weights, or a number is not known
                continue
            rated[recipe.name, inverse] = rate(made)
    best = max(rated.values(), default=0)
    return [recipe for recipe, found in rated.items() if found == best > 0]
