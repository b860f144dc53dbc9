"""Finds the parts of a checkpoint: the weights, or what lies under a top-level key, and the names in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmfsdp.checkpoint.layout import Layout, TensorEntry
from mmfsdp.errors import ConfigError, FormatError, closest

__all__ = ["MODEL_KEYS", "find_tensor", "listed", "model_key", "part_tensors", "top_level_key"]

MODEL_KEYS = ("state_dict", "model")
"""Where the weights lie: MMEngine's key, and that of many training scripts."""


def model_key(layout: Layout) -> Any:
    """Return the top-level key of the weights; ``None`` for a bare state dict.

    Raises:
        FormatError: There is no such key.
    """
    if not isinstance(layout.tree, dict):
        raise FormatError(
            f"{layout.path.name} holds a {type(layout.tree).__name__} and not a mapping of names.",
            file=str(layout.path),
        )
    if layout.is_flat:
        return None
    for key in MODEL_KEYS:
        if isinstance(layout.tree.get(key), dict):
            return key
    if not layout.top_level:
        raise FormatError(f"{layout.path.name} holds nothing: it has no weights.", file=str(layout.path))
    raise FormatError(
        f"{layout.path.name} has no 'state_dict'. Its top-level keys are {listed(layout.top_level)}; name one "
        "with keep= (--keep).",
        file=str(layout.path),
    )


def top_level_key(layout: Layout, name: str, argument: str = "keep") -> Any:
    """Return the top-level key that is written ``name``.

    Args:
        layout: The checkpoint.
        name: The key as text.
        argument: What the caller gave it as: ``'keep'``, or ``'drop'``.

    Raises:
        ConfigError: There is none; the message names the nearest.
    """
    found = [key for key in layout.tree if str(key) == name] if isinstance(layout.tree, dict) else []
    if not found:
        words = ["model", "all"] if argument == "keep" else []
        hint = closest(name, [*words, *layout.top_level])
        what = "neither 'model' nor 'all' nor a" if words else "no"
        raise ConfigError(
            f"{argument}={name!r} is {what} top-level key of {layout.path.name}.{hint} Its keys are "
            f"{listed(layout.top_level)}."
        )
    return found[0]


def part_tensors(layout: Layout, keep: str) -> dict[str, TensorEntry]:
    """Return the tensors of a part by their names in it.

    Args:
        layout: The checkpoint.
        keep: ``'model'``, ``'all'`` or a top-level key.

    Raises:
        ConfigError: There is no such key.
        FormatError: It has no weights where those are asked for.
    """
    if keep == "all":
        return dict(layout.tensors)
    key = model_key(layout) if keep == "model" else top_level_key(layout, keep)
    return dict(layout.tensors) if key is None else layout.tensors_below(str(key))


def find_tensor(layout: Layout, name: str) -> TensorEntry:
    """Return a tensor by its whole name, or by its name among the weights.

    Raises:
        ConfigError: There is none; the message names the nearest.
    """
    for whole in (name, *(f"{key}/{name}" for key in MODEL_KEYS)):
        if whole in layout.tensors:
            return layout.tensors[whole]
    hint = closest(name, layout.tensors) or f" There are {len(layout.tensors)} tensors; `inspect` lists them."
    raise ConfigError(f"{layout.path.name} has no tensor {name!r}.{hint}", file=str(layout.path))


def listed(names: Sequence[str]) -> str:
    """Return names in quotes, the first twenty of them."""
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(repr(name) for name in names[:20]) + more
