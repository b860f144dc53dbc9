"""Finds the weights of a base under the names of an adapter, which come from files or from the model in memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.huggingface.memory_names import Located, as_in_memory, described_model, locate
from mmfsdp.checkpoint.recipes.applying import known_recipes, rewritten

__all__ = ["BaseNames", "find_names"]


@dataclass(frozen=True)
class BaseNames:
    """The weights of a base by the names of an adapter."""

    stored: Mapping[str, str]
    """Name to key among the base's tensors; those that are parts of tensors in memory have their names in files."""
    parts: Mapping[str, tuple[tuple[str, Located], ...]]
    """For tensors that the model puts together: name to the keys of its parts, and which boxes they are."""
    table: str = ""
    """The model whose table of names in memory is used; empty if the adapter has the names of files."""
    convert: Callable[[dict[str, TensorEntry]], Mapping[str, TensorEntry] | None] = lambda weights: weights
    """Returns weights of files as they are in memory."""

    def of(self, name: str) -> tuple[tuple[str, Located | None], ...]:
        """Return the keys of the tensors that are one of this name, and their boxes; no box if there is one tensor."""
        return self.parts[name] if name in self.parts else ((self.stored[name], None),)

    def keep(self, name: str, entry: TensorEntry) -> bool:
        """Tell whether a weight that only the adapter has is read again under its name in memory, if it is added."""
        box = locate({name: entry}, self.convert).get(name)
        return box is not None and box.name == name

    def __contains__(self, name: str) -> bool:
        return name in self.stored or name in self.parts

    def __iter__(self) -> Iterator[str]:
        yield from self.stored
        yield from self.parts


def find_names(
    tensors: Mapping[str, TensorEntry], stored: Mapping[str, str], folder: Path, wanted: Collection[str]
) -> BaseNames:
    """Return the names by which a base has everything that is wanted, or the names in its files if there are none.

    It asks transformers' table for the model of the base's ``config.json``, then the shipped recipes.

    Args:
        tensors: The base's tensors by key.
        stored: Names of weights in the base's files, and their keys.
        folder: The base's folder.
        wanted: Names that the adapter has.
    """
    as_stored = BaseNames(stored, {})
    if all(name in stored for name in wanted):
        return as_stored
    weights = {name: tensors[key] for name, key in stored.items()}
    for table, convert in _tables(folder):
        names = _by_memory(weights, stored, locate(weights, convert), table, convert)
        if all(name in names for name in wanted):
            return names
    return as_stored


_Convert = Callable[[dict[str, TensorEntry]], Mapping[str, TensorEntry] | None]


def _tables(folder: Path) -> Iterator[tuple[str, _Convert]]:
    if (model := described_model(folder)) is not None:
        yield "transformers", partial(as_in_memory, model)
    for recipe in known_recipes():
        for inverse in (False, True):
            name = f"recipe {recipe.name}{', inverse' if inverse else ''}"
            yield name, partial(rewritten, recipe=recipe.name, inverse=inverse, folders=[folder])


def _by_memory(
    weights: Mapping[str, TensorEntry],
    stored: Mapping[str, str],
    boxes: Mapping[str, Located],
    table: str,
    convert: _Convert,
) -> BaseNames:
    whole: dict[str, str] = {}
    parts: defaultdict[str, list[tuple[str, Located]]] = defaultdict(list)
    for name, key in stored.items():
        box = boxes.get(name)
        if box is not None and box.whole == weights[name].shape:
            whole[box.name] = key
            continue
        whole[name] = key
        if box is not None:
            parts[box.name].append((key, box))
    complete = {
        name: tuple(own)
        for name, own in parts.items()
        if sum(math.prod(box.sizes) for _, box in own) == math.prod(own[0][1].whole)
    }
    return BaseNames(whole, complete, table, convert)
