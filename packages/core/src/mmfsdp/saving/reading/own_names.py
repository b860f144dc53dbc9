"""The names and shapes that a sharded model has for its weights, and weights of a file under these names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from mmfsdp.basics.optimizer_forms import GROUPS, NAMES, STATE, by_name, unflattened
from mmfsdp.basics.text import WRAPPER_PREFIX, clean_fqn
from mmfsdp.errors import FormatError
from mmfsdp.runtime.sharded_model import ShardedModel
from mmfsdp.state.extra_states import EXTRA_STATE

__all__ = ["count_filled", "names_of_params", "own_shapes", "part_of", "under_own_names"]

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


def part_of(content: Mapping[str, Any], state: ShardedModel) -> dict[str, Any]:
    """Return the content of a checkpoint with weights and optimizer state of a model's own names. Not collective.

    Args:
        content: Weights under ``state_dict``, and perhaps an optimizer's state under ``optimizer``.
        state: The model, which is a part of the saved one.

    Raises:
        FormatError: The optimizer's state has positions of parameters, and no names.
    """
    extra = {clean_fqn(f"{name}.{EXTRA_STATE}".lstrip(".")) for name, _ in state.module.named_modules()}
    own = own_shapes(state).keys() | extra
    found = {**content, "state_dict": {name: value for name, value in content["state_dict"].items() if name in own}}
    if isinstance(saved := content.get("optimizer"), Mapping):
        saved = unflattened(saved)
        if not any(isinstance(name, str) for group in saved[GROUPS] for name in group["params"]):
            names = [group.get(NAMES) for group in saved[GROUPS]]
            if not all(isinstance(each, list) for each in names):
                raise FormatError(
                    "The optimizer's state counts parameters and does not name them, so nothing says which of them a "
                    "part of the model has. Load the weights alone, or save with kind='sharded', which keeps names."
                )
            saved = by_name(saved, names)
        kept = [{**group, "params": [name for name in group["params"] if name in own]} for group in saved[GROUPS]]
        found["optimizer"] = {
            **saved,
            STATE: {name: entries for name, entries in saved[STATE].items() if name in own},
            GROUPS: kept,
        }
    return found


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
