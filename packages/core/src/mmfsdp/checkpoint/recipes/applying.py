"""Finds recipes, shipped or of the user, and applies them to the weights of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.layout import Layout, TensorRef
from mmfsdp.checkpoint.recipes.parsing import parse_recipe
from mmfsdp.checkpoint.recipes.recipe import Recipe
from mmfsdp.checkpoint.recipes.recipe_numbers import config_numbers
from mmfsdp.checkpoint.tree import part_tensors
from mmfsdp.config.settings_file import read_settings
from mmfsdp.errors import ConfigError, closest

__all__ = ["RecipeInfo", "apply_recipe", "find_recipe", "folders_of", "known_recipes", "rewritten"]

_SHIPPED = Path(__file__).parent / "shipped"


@dataclass(frozen=True, slots=True)
class RecipeInfo:
    """A recipe that is shipped, for people and for JSON."""

    name: str
    """Its name: what ``recipe`` accepts."""
    about: str
    """The libraries that it converts between."""
    values: tuple[str, ...]
    """The numbers that it needs, from the model's ``config.json`` or ``recipe_values``."""
    path: str
    """Its file, to copy and change."""

    def describe(self) -> dict[str, Any]:
        """Return plain values for JSON; `values` are ``needs`` there."""
        return {"name": self.name, "about": self.about, "needs": list(self.values), "path": self.path}


def known_recipes() -> list[RecipeInfo]:
    """Return the recipes that are shipped, by name."""
    recipes = [(path, find_recipe(path)) for path in sorted(_SHIPPED.glob("*.toml"))]
    return [RecipeInfo(path.stem, recipe.about, tuple(recipe.values), str(path)) for path, recipe in recipes]


def find_recipe(given: str | os.PathLike[str]) -> Recipe:
    """Return a recipe by the name of a shipped one, or by the path of a file.

    Raises:
        ConfigError: There is none, or it is malformed.
    """
    path = Path(given)
    if path.suffix not in (".toml", ".yaml", ".yml", ".json"):
        if (hint := _unknown(str(given))) is not None:
            raise ConfigError(
                f"There is no recipe {str(given)!r}.{hint} Or give the path of a .toml, .yaml or .json file.",
                config="recipe",
            )
        path = _SHIPPED / f"{given}.toml"
    content = {**read_settings(path)}
    base = content.pop("extends", None)
    recipe = parse_recipe(content, path.stem if path.parent == _SHIPPED else path.name)
    return recipe if base is None else recipe.after(_shipped(base, recipe.name))


def _shipped(name: Any, extended: str) -> Recipe:
    """Return the shipped recipe that another one extends."""
    if (hint := _unknown(name)) is not None:
        raise ConfigError(
            f"{extended}: extends is {name!r}, expected the name of a shipped recipe.{hint}", config="extends"
        )
    return find_recipe(name)


def _unknown(name: Any) -> str | None:
    """Return the names that may be meant if no shipped recipe has this name; None if one has."""
    names = [path.stem for path in sorted(_SHIPPED.glob("*.toml"))]
    return None if name in names else closest(str(name), names) or f" Shipped are {', '.join(names)}."


def rewritten(
    tensors: Mapping[str, TensorEntry],
    recipe: str | os.PathLike[str],
    *,
    inverse: bool = False,
    values: Mapping[str, int] | None = None,
    folders: Iterable[Path] = (),
) -> dict[str, TensorEntry]:
    """Return weights as a recipe makes them.

    Args:
        tensors: The weights by name.
        recipe: A shipped recipe's name, or the path of a file.
        inverse: Undo the recipe instead.
        values: Numbers that it needs.
        folders: Where the model's ``config.json`` or ``params.json`` may lie, for the numbers that are not given.

    Raises:
        ConfigError: See `apply_recipe`.
    """
    found = find_recipe(recipe)
    configs = config_numbers(folders) if found.values else {}
    return (found.inverse() if inverse else found).applied(tensors, values or {}, configs)


def apply_recipe(
    layout: Layout,
    recipe: str | os.PathLike[str],
    *,
    inverse: bool = False,
    values: Mapping[str, int] | None = None,
) -> Layout:
    """Return the weights of a checkpoint as another library names and shapes them. No data is copied.

    Args:
        layout: The checkpoint.
        recipe: The name of a shipped recipe (see `known_recipes`), or the path of a TOML, YAML or JSON file.
        inverse: Undo the recipe instead.
        values: Numbers that the recipe needs, such as ``{"heads": 32}``; by default they are read from ``config.json``
            or ``params.json`` beside the checkpoint.

    Returns:
        A layout of the weights alone, whose chunks lie in the files of ``layout``.

    Raises:
        ConfigError: There is no such recipe, it is malformed or cannot be undone, a rule matches nothing or does not
            fit, two tensors would get one name, one is left over, or a value is not known.
        FormatError: The checkpoint has no weights.
    """
    tensors = rewritten(
        part_tensors(layout, "model"), recipe, inverse=inverse, values=values, folders=folders_of(layout)
    )
    tree = {name: TensorRef(name) for name in tensors}
    return Layout(layout.path, layout.format, layout.world_size, tensors, tree, layout.origins, notes=layout.notes)


def folders_of(layout: Layout) -> list[Path]:
    """Return where the config file of a checkpoint's model may lie."""
    return [layout.path if layout.path.is_dir() else layout.path.parent]
