"""A recipe: ordered rules that turn the weights of one model into another model's, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmfsdp.basics.arguments import argument
from mmfsdp.basics.codes import block_of, scales_of
from mmfsdp.basics.text import name_list
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.files.elements import equal_data
from mmfsdp.checkpoint.recipes.recipe_numbers import RecipeValues
from mmfsdp.checkpoint.recipes.rules import Rule, Step
from mmfsdp.checkpoint.recipes.stand_in_files import StandIns
from mmfsdp.errors import ConfigError, closest

__all__ = ["Recipe"]


@dataclass(frozen=True)
class Recipe:
    """Rules, and what they need to know."""

    name: str
    """Its name, or its file's."""
    about: str
    """The libraries that it converts between."""
    rules: tuple[Rule, ...]
    """The rules, in order: each sees what those before it made."""
    values: Mapping[str, Sequence[str | int]]
    """The numbers that rules use, and where to find them; see ``RecipeValues``."""
    keep_unmatched: bool
    """Whether tensors that no rule matches stay as they are; otherwise they are an error."""

    def after(self, base: Recipe) -> Recipe:
        """Return the recipe that applies the rules of another one first."""
        return replace(self, rules=(*base.rules, *self.rules), values={**base.values, **self.values})

    def inverse(self) -> Recipe:
        """Return the recipe that undoes this one.

        Raises:
            ConfigError: A rule cannot be undone.
        """
        undone = [rule.inverse() for rule in reversed(self.rules)]
        return replace(self, rules=tuple(rule for rule in undone if rule is not None))

    def applied(
        self, tensors: Mapping[str, TensorEntry], given: Mapping[str, int], configs: Mapping[str, int]
    ) -> dict[str, TensorEntry]:
        """Return the tensors that the rules make, by name. Only ``untie`` reads data.

        Args:
            tensors: The weights.
            given: Values that the user sets.
            configs: Numbers of the model's config files.

        Raises:
            ConfigError: A rule matches nothing or does not fit, two tensors would get one name, one is left over, or
                a value is not known. The message names the rule, the tensors and their shapes.
        """
        if unknown := [name for name in given if name not in self.values]:
            hint = closest(unknown[0], self.values) or f" It uses {name_list([*self.values]) or 'none'}."
            raise ConfigError(f"Recipe {self.name} has no value {unknown[0]!r}.{hint}", config="recipe_values")
        stand_ins = StandIns()
        values = RecipeValues(
            self.values, given, configs, lambda one, two: equal_data(stand_ins.resolved(one), stand_ins.resolved(two))
        )
        current = {name: stand_ins.of(entry) for name, entry in tensors.items()}
        touched: set[str] = set()
        for rule in self.rules:
            steps = [*rule.steps(current, values)]
            if not steps and not rule.optional:
                raise self._nothing(rule, current)
            current = _stepped(rule, steps, current)
            touched -= {name for step in steps for name in step.taken}
            touched |= {name for step in steps for name in step.made}
        left = [name for name in current if name not in touched]
        if left and not self.keep_unmatched:
            scaled = {scale: name for name, scale in scales_of(tensors).items()}
            if (scale := next((name for name in left if name in scaled), None)) is not None:
                raise _quantized(scaled[scale], scale)
            shapes = ", ".join(f"{name!r} {[*current[name].shape]}" for name in left[:4])
            raise ConfigError(
                f"Recipe {self.name} has no rule for {len(left)} of {len(tensors)} tensors: {shapes}"
                f"{' and others' if len(left) > 4 else ''}. Leave them out with {argument('exclude')}, add a rule, or "
                "set "
                '`unmatched = "keep"` in the recipe.',
                config="recipe",
            )
        if not current:
            raise ConfigError(f"Recipe {self.name} leaves no tensor.", config="recipe")
        made = {name: stand_ins.resolved(entry) for name, entry in current.items()}
        _refuse_lost_scales(tensors, made)
        return made

    def _nothing(self, rule: Rule, current: Mapping[str, Any]) -> ConfigError:
        template = rule.templates()[0]
        hint = closest(template, current) or (
            f" The names are {name_list([*current], 4)}." if current else " No tensor is left."
        )
        return ConfigError(
            f"{rule.where} matches no tensor: no name is like {template!r}.{hint} Is this the right recipe, and the "
            "right direction? If such tensors may be absent, add `optional = true` to the rule.",
            config=rule.where,
        )


def _refuse_lost_scales(tensors: Mapping[str, TensorEntry], made: Mapping[str, TensorEntry]) -> None:
    """Raise a ``ConfigError`` if codes are rearranged and their scales are not, or codes that share a scale part."""
    kept = {entry.chunks() for entry in made.values()} if (scales := scales_of(tensors)) else set()
    for name, scale in scales.items():
        codes, units = tensors[name], tensors[scale]
        block = block_of(codes, units) or ()
        parted = not block or any(size % max(side, 1) for size, side in zip(codes.shape, block, strict=True))
        cut_blocks = len(units.shape) > 1 and units.shape[-1] > 1 and parted
        if codes.chunks() not in kept and (units.chunks() in kept or cut_blocks):
            raise _quantized(name, scale)


def _quantized(name: str, scale: str) -> ConfigError:
    return ConfigError(
        f"{name!r} is codes in units of {scale!r}, and a recipe rearranges numbers. Add {argument('quantize', 'none')} "
        "to the conversion, which restores the numbers first; convert so before load_pretrained() reads the "
        "checkpoint. The result can be quantised again.",
        config="quantize",
    )


def _stepped(rule: Rule, steps: Sequence[Step], tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors with what was made in place of what was taken."""
    made_at = {step.taken[0]: step.made for step in steps if step.taken}
    taken = {name for step in steps for name in step.taken}
    origins: dict[str, str] = {}
    result: dict[str, TensorEntry] = {}

    def add(name: str, entry: TensorEntry, origin: str) -> None:
        if name in result:
            raise ConfigError(
                f"{rule.where}: {origins[name]!r} and {origin!r} would both be named {name!r}. Change the rule, or "
                f"leave one of them out with {argument('exclude')}.",
                config=rule.where,
            )
        result[name], origins[name] = entry, origin

    for name, entry in tensors.items():
        for new, made in made_at.get(name, {} if name in taken else {name: entry}).items():
            add(new, made, name)
    for step in steps:
        for new, made in step.made.items() if not step.taken else ():
            add(new, made, f"{new} of {rule.where}")
    return result
