"""The names and shapes that a sharded model has for its weights, and weights of a file under these names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from mmfsdp.basics.text import WRAPPER_PREFIX, clean_fqn
from mmfsdp.runtime.sharded_model import ShardedModel

__all__ = ["count_filled", "names_of_params", "own_shapes", "under_own_names"]

_Value = TypeVar("_Value")


def names_of_params(state: ShardedModel) -> list[tuple[str, ...]]:
    """Return each parameter's names; a tied parameter has several. Not collective."""
    return [(param.fqn, *param.aliases) for param in state.plan.all_params()]


def own_shapes(state: ShardedModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters and buffers by name, tied names included. Not collective."""
    params = {name: param.shape for param in state.plan.all_params() for name in (param.fqn, *param.aliases)}
    return params | {clean_fqn(name): tuple(buffer.shape) for name, buffer in state.module.named_buffers()}


def under_own_names(weights: Mapping[str, _Value], state: ShardedModel) -> dict[str, _Value]:
    """Return weights without a prefix that the model's names lack, or with one that they have. Not collective.

    Args:
        weights: The weights by the names of a file.
        state: The model.

    Returns:
        The weights under the spelling by which most of them are the model's; empty if none is.
    """
    own = own_shapes(state)
    spellings = _spellings(state)
    matches = [sum(spelt(name) in own for name in weights) for spelt in spellings]
    if not any(matches):
        return {}
    spelt = spellings[matches.index(max(matches))]
    # A name that already is the model's own stays: a head, say, lies beside the base model.
    return {name if name in own else spelt(name): value for name, value in weights.items()}


def count_filled(names: Collection[str], state: ShardedModel) -> int:
    """Return how many parameters weights of these names would fill. Not collective."""
    params = names_of_params(state)
    spelt = [{spell(name) for name in names}.union(names) for spell in _spellings(state)]
    return max(sum(any(name in each for name in own) for own in params) for each in spelt)


def _spellings(state: ShardedModel) -> list[Callable[[str], str]]:
    base = getattr(state.module, "base_model_prefix", "")
    prefixes = [WRAPPER_PREFIX, *([f"{base}."] if base else [])]
    spellings: list[Callable[[str], str]] = [lambda name: name]
    spellings += [lambda name, prefix=prefix: name.removeprefix(prefix) for prefix in prefixes]  # type: ignore[misc]
    spellings += [lambda name, prefix=prefix: prefix + name for prefix in prefixes]  # type: ignore[misc]
    return spellings
