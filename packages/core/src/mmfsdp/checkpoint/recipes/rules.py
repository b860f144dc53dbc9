"""The rules of recipes: each finds its tensors, says what becomes of them, and can be turned round."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.recipes.rearranging import Pattern, fused, split, stacked, trimmed, unstacked
from mmfsdp.checkpoint.recipes.recipe_numbers import RecipeValues
from mmfsdp.checkpoint.recipes.templates import Group, Template, grouped
from mmfsdp.errors import ConfigError

__all__ = ["Drop", "Fuse", "Rearrange", "Rename", "Rule", "Split", "Stack", "Step", "Tie", "Trim", "Unstack", "Untie"]

Tensors = Mapping[str, TensorEntry]
T = TypeVar("T")


class Step(NamedTuple):
    """A rule for some tensors."""

    taken: Sequence[str]
    """The tensors that it takes; they are replaced."""
    made: dict[str, TensorEntry]
    """The tensors that it makes of them, by name."""


@dataclass(frozen=True)
class Rule:
    """One rule of a recipe."""

    where: str
    """Its path in the recipe, for errors: ``'llama.toml: rules[3].fuse'``."""
    optional: bool
    """Whether it may match nothing."""

    def steps(self, tensors: Tensors, values: RecipeValues) -> Iterator[Step]:
        """Yield what becomes of the tensors that match; touches no data.

        Raises:
            ConfigError: Tensors that belong together are missing or do not fit; the message names them.
        """
        raise NotImplementedError

    def inverse(self) -> Rule | None:
        """Return the rule that undoes this one; ``None`` if there is nothing to undo.

        Raises:
            ConfigError: It cannot be undone.
        """
        raise NotImplementedError

    def templates(self) -> list[str]:
        """Return the templates that tensors must match, for messages."""
        raise NotImplementedError

    def _checked(self, names: Sequence[str], tensors: Tensors, make: Callable[[], T]) -> T:
        try:
            return make()
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            shapes = ", ".join(f"{name!r} of shape {[*tensors[name].shape]}" for name in names[:4])
            raise ConfigError(
                f"{self.where}: {error}. It was given {shapes}. Change the rule, or use the recipe for this model.",
                config=self.where,
            ) from None

    def _complete(self, group: Group, wanted: Sequence[Template]) -> list[str]:
        missing = [template for index, template in enumerate(wanted) if (index, "") not in group.names]
        if missing:
            found = ", ".join(map(repr, [*group.names.values()][:4]))
            raise ConfigError(
                f"{self.where}: {found} came without {missing[0].filled(group.values)!r}. The checkpoint lacks "
                "what the rule needs, or the rule should not match here.",
                config=self.where,
            )
        return [group.names[index, ""] for index in range(len(wanted))]


@dataclass(frozen=True)
class Rename(Rule):
    """Gives tensors other names."""

    pairs: tuple[tuple[Template, Template], ...]

    def steps(self, tensors: Tensors, values: RecipeValues) -> Iterator[Step]:
        for name, entry in tensors.items():
            for old, new in self.pairs:
                found = old.match(name)
                if found is not None:
                    renamed = new.filled(found)
                    yield Step((name,), {renamed: replace(entry, name=renamed)})
                    break

    def inverse(self) -> Rule:
        return replace(self, pairs=tuple((new, old) for old, new in self.pairs))

    def templates(self) -> list[str]:
        return [old.text for old, _ in self.pairs]


@dataclass(frozen=True)
class Fuse(Rule):
    """Puts tensors one behind the other along a dimension."""

    parts: tuple[Template, ...]
    whole: Template
    dim: int
    sizes: tuple[str, ...] | None

    def steps(self, tensors: Tensors, values: RecipeValues) -> Iterator[Step]:
        for group in grouped(tensors, self.parts):
            names = self._complete(group, self.parts)
            name = self.whole.filled(group.values)
            entries = [tensors[part] for part in names]
            entry = self._checked(names, tensors, lambda: fused(name, entries, self.dim))  # noqa: B023
            found = [part.shape[self.dim] for part in entries]
            wanted = (
                [1] * len(found) if self.sizes is None else [values.number(size, self.where) for size in self.sizes]
            )
            if any(size * sum(wanted) != share * sum(found) for size, share in zip(found, wanted, strict=True)):
                remedy = (
                    "State them as `sizes`, as numbers or values, so that the rule can be undone"
                    if self.sizes is None
                    else f"The rule's sizes are {':'.join(map(str, wanted))}"
                )
                raise ConfigError(
                    f"{self.where}: {', '.join(map(repr, names))} have {', '.join(map(str, found))} elements along "
                    f"dimension {self.dim}. {remedy}.",
                    config=self.where,
                )
            yield Step(names, {name: entry})

    def inverse(self) -> Rule:
        return Split(self.where, self.optional, self.parts, self.whole, self.dim, self.sizes)

    def templates(self) -> list[str]:
        return [part.text for part in self.parts]


@dataclass(frozen=True)
class Split(Rule):
    """Cuts tensors along a dimension."""

    parts: tuple[Template, ...]
    whole: Template
    dim: int
    sizes: tuple[str, ...] | None

    def steps(self, tensors: Tensors, values: RecipeValues) -> Iterator[Step]:
        for group in grouped(tensors, [self.whole]):
            [given] = group.names.values()
            names = [part.filled(group.values) for part in self.parts]
            shares = (
                [1] * len(names) if self.sizes is None else [values.number(size, self.where) for size in self.sizes]
            )
            entry = tensors[given]
            parts = self._checked([given], tensors, lambda: split(entry, names, self.dim, shares))  # noqa: B023
            yield Step([given], dict(zip(names, parts, strict=True)))

    def inverse(self) -> Rule:
        return Fuse(self.where, self.optional, self.parts, self.whole, self.dim, self.sizes)

    def templates(self) -> list[str]:
        return [self.whole.text]


@dataclass(frozen=True)
class Stack(Rule):
    """Puts tensors that differ in a number into one with another dimension, such as experts."""

    part: Template
    over: str
    whole: Template
    dim: int

    def steps(self, tensors: Tensors, values: RecipeValues) -> Iterator[Step]:
        for group in grouped(tensors, [self.part], self.over):
            odd = next((own for _, own in group.names if not re.fullmatch("0|[1-9][0-9]{0,8}", own)), None)
            if odd is not None:
                raise ConfigError(
                    f"{self.where}: {group.names[0, odd]!r} has {odd!r} where {{{self.over}}} is a number such as "
                    "7. Rename the tensors first.",
                    config=self.where,
                )
            numbers = sorted(int(own) for _, own in group.names)
            if numbers != [*range(len(numbers))]:
                gap = next(index for index, number in enumerate([*numbers, -1]) if index != number)
                missing = self.part.filled({**group.values, self.over: str(gap)})
                raise ConfigError(f"{self.where}: the checkpoint lacks {missing!r}.", config=self.where)
            names = [group.names[0, str(number)] for number in numbers]
            name = self.whole.filled(group.values)
            entries = [tensors[part] for part in names]
            yield Step(names, {name: self._checked(names, tensors, lambda: stacked(name, entries, self.dim))})  # noqa: B023

    def inverse(self) -> Rule:
        return Unstack(self.where, self.optional, self.part, self.over, self.whole, self.dim)

    def templates(self) -> list[str]:
        return [self.part.text]


@dataclass(frozen=True)
class Unstack(Rule):
    """Cuts tensors into their slices along a dimension."""

    part: Template
    over: str
    whole: Template
    dim: int

    def steps(self, tensors: Tensors, values: RecipeValues) -> Iterator[Step]:
        for group in grouped(tensors, [self.whole]):
            [given] = group.names.values()
            slices = self._checked([given], tensors, lambda: unstacked(tensors[given], self.dim))  # noqa: B023
            names = [self.part.filled({**group.values, self.over: str(index)}) for index in range(len(slices))]
            yield Step([given], {name: replace(entry, name=name) for name, entry in zip(names, slices, strict=True)})

    def inverse(self) -> Rule:
        return Stack(self.where, self.optional, self.part, self.over, self.whole, self.dim)

    def templates(self) -> list[str]:
        return [self.whole.text]


@dataclass(frozen=True)
class Rearrange(Rule):
    """Divides, reorders and joins the axes of tensors."""

    names: tuple[Template, ...]
    pattern: str
    sizes: Mapping[str, str]

    def steps(self, tensors: Tensors, values: RecipeValues) -> Iterator[Step]:
        pattern = Pattern(self.pattern)
        sizes = {axis: values.number(size, self.where) for axis, size in self.sizes.items()}
        for name, entry in tensors.items():
            if any(template.match(name) is not None for template in self.names):
                yield Step((name,), {name: self._checked([name], tensors, lambda: pattern.applied(entry, sizes))})  # noqa: B023

    def inverse(self) -> Rule:
        return replace(self, pattern=Pattern(self.pattern).inverse)

    def templates(self) -> list[str]:
        return [template.text for template in self.names]


@dataclass(frozen=True)
class Trim(Rule):
    """Leaves out what pads tensors at the end of a dimension, such as rows of a vocabulary that no token has."""

    names: tuple[Template, ...]
    size: str
    dim: int

    def steps(self, tensors: Tensors, values: RecipeValues) -> Iterator[Step]:
        for name, entry in tensors.items():
            if any(template.match(name) is not None for template in self.names):
                size = values.number(self.size, self.where)
                yield Step((name,), {name: self._checked([name], tensors, lambda: trimmed(entry, self.dim, size))})  # noqa: B023

    def inverse(self) -> None:
        return None  # who pads tensors does so again

    def templates(self) -> list[str]:
        return [template.text for template in self.names]


@dataclass(frozen=True)
class Drop(Rule):
    """Leaves tensors out."""

    names: tuple[Template, ...]
    recomputed: bool

    def steps(self, tensors: Tensors, values: RecipeValues) -> Iterator[Step]:
        for name in tensors:
            if any(template.match(name) is not None for template in self.names):
                yield Step((name,), {})

    def inverse(self) -> Rule | None:
        if self.recomputed:
            return None
        raise ConfigError(
            f"{self.where}: the recipe drops {self.names[0].text!r}, and nothing tells what it held. If models compute "
            "it themselves, add `recomputed = true` to the rule; the inverse then leaves it out.",
            config=self.where,
        )

    def templates(self) -> list[str]:
        return [template.text for template in self.names]


@dataclass(frozen=True)
class Tie(Rule):
    """Gives tensors a second name."""

    pairs: tuple[tuple[Template, Template], ...]

    def steps(self, tensors: Tensors, values: RecipeValues) -> Iterator[Step]:
        for second, first in self.pairs:
            for name, entry in tensors.items():
                found = first.match(name)
                if found is not None:
                    alias = second.filled(found)
                    yield Step((), {alias: replace(entry, name=alias)})

    def inverse(self) -> Rule:
        return Untie(self.where, self.optional, self.pairs)

    def templates(self) -> list[str]:
        return [first.text for _, first in self.pairs]


@dataclass(frozen=True)
class Untie(Rule):
    """Removes the second names of tensors; what is removed must be equal to the first."""

    pairs: tuple[tuple[Template, Template], ...]

    def steps(self, tensors: Tensors, values: RecipeValues) -> Iterator[Step]:
        for second, first in self.pairs:
            for name, entry in tensors.items():
                found = second.match(name)
                if found is None:
                    continue
                kept = first.filled(found)
                if kept not in tensors:
                    raise ConfigError(f"{self.where}: {name!r} came without {kept!r}.", config=self.where)
                if not values.equal(entry, tensors[kept]):
                    raise ConfigError(
                        f"{self.where}: {name!r} is not equal to {kept!r}, so it cannot be left out. The weights were "
                        "not tied in this model: remove the rule from the recipe, or rename the tensor.",
                        config=self.where,
                    )
                yield Step((name,), {})

    def inverse(self) -> Rule:
        return Tie(self.where, self.optional, self.pairs)

    def templates(self) -> list[str]:
        return [second.text for second, _ in self.pairs]
