"""Turns each form of an optimizer's state on disk into another without a change of meaning.

`mmfsdp.basics.optimizer_forms` describes the forms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmfsdp.basics.arguments import argument
from mmfsdp.basics.optimizer_forms import GROUPS, NAMES, STATE, by_index, by_name, numbered, unflattened, with_names
from mmfsdp.checkpoint.layout import Layout, TensorRef
from mmfsdp.checkpoint.tree import find_weights, is_ref
from mmfsdp.errors import FormatError

__all__ = ["in_one_form", "states_by_index", "states_by_name"]

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # of batch norm: no parameters


def states_by_index(tree: Any) -> Any:
    """Return content in which every optimizer's state is indexed by position. Nothing is changed in place.

    The names are kept under ``'param_names'``, where torch itself puts them if it knows them.
    """
    return _mapped(tree, _indexed)


def states_by_name(tree: Any, layout: Layout) -> tuple[Any, tuple[str, ...]]:
    """Return content in which every optimizer's state is keyed by names, and notes for the user.

    Args:
        tree: The content. Not changed.
        layout: The checkpoint that its tensors are in.

    Raises:
        FormatError: The state is indexed by position, and the names of the parameters are unknown.
    """
    notes: list[str] = []
    model = _weights(tree) or _weights(layout.tree)
    return _mapped(tree, lambda state: _named(state, model, layout, notes)), tuple(dict.fromkeys(notes))


def in_one_form(one: Layout, two: Layout) -> tuple[Layout, Layout]:
    """Return two checkpoints whose optimizers' states have the same keys: by name if only one is indexed by position.

    They are returned as they are if that cannot be done, as names are unknown.
    """
    if _are_by_name(one.tree) == _are_by_name(two.tree):
        return one, two
    try:
        first, second = (replace(layout, tree=states_by_name(layout.tree, layout)[0]) for layout in (one, two))
    except FormatError:
        return one, two
    return first, second


def _are_by_name(tree: Any) -> list[bool]:
    """Return of each state of an optimizer whether names are its keys."""
    found: list[bool] = []

    def look(state: dict[str, Any]) -> dict[str, Any]:
        found.append(any(isinstance(name, str) for group in _params(state) for name in group))
        return state

    _mapped(tree, look)
    return found


def _mapped(tree: Any, change: Callable[[dict[str, Any]], dict[str, Any]], depth: int = 4) -> Any:
    if not isinstance(tree, dict) or not depth:
        return tree
    state = unflattened(tree)
    if isinstance(state.get(STATE), dict) and isinstance(state.get(GROUPS), list):
        return change(dict(state))
    mapped = {key: _mapped(value, change, depth - 1) for key, value in tree.items()}
    return mapped if any(mapped[key] is not tree[key] for key in tree) else tree


def _params(state: Mapping[str, Any]) -> list[list[Any]]:
    return [list(group.get("params", ())) for group in state[GROUPS]]


def _indexed(state: dict[str, Any]) -> dict[str, Any]:
    params = _params(state)
    flat = [name for group in params for name in group]
    if not flat or not all(isinstance(name, str) for name in flat):
        return state
    return with_names(by_index(state), params)


def _named(state: dict[str, Any], model: Mapping[str, TensorRef], layout: Layout, notes: list[str]) -> dict[str, Any]:
    params = _params(state)
    indices = [index for group in params for index in group]
    if not indices or not all(type(index) is int for index in indices):
        return state
    names = [list(group.get(NAMES) or ()) for group in state[GROUPS]]
    fits = [*map(len, names)] == [*map(len, params)]
    if not fits or not all(isinstance(name, str) for group in names for name in group):
        guessed = _guessed_names(state, sorted(indices), model, layout)
        names = [[guessed[index] for index in group] for group in params]
        notes.append("the optimizer's state has no names: they were derived from the order and shapes of the weights")
    return by_name(state, names)


def _guessed_names(
    state: Mapping[str, Any], indices: Sequence[int], model: Mapping[str, TensorRef], layout: Layout
) -> dict[int, str]:
    """Return the names of the weights in order, if there are as many as indices, and every state is of their shapes."""
    names: list[str] = []
    seen: set[object] = set()
    for name, ref in model.items():
        entry = layout.tensors[ref.name]
        chunks = entry.chunks() if entry.nbytes else name
        if name.rpartition(".")[2] not in _BUFFERS and chunks not in seen:  # tied weights are one parameter
            seen.add(chunks)
            names.append(name)
    if len(names) != len(indices):
        raise _unknown(layout, f"it is of {len(indices)} parameters, and the weights hold {len(names)} tensors")
    numbers = {numbered(key): entries for key, entries in state[STATE].items()}
    guessed = dict(zip(indices, names, strict=True))
    for index, name in guessed.items():
        shape = layout.tensors[model[name].name].shape
        shapes = [layout.tensors[ref.name].shape for ref in _refs(numbers.get(index))]
        if shapes and shape not in shapes and any(shapes):
            raise _unknown(
                layout, f"that of position {index} is of shape {list(max(shapes))}, and {name!r} {list(shape)}"
            )
    return guessed


def _refs(entries: Any) -> list[TensorRef]:
    return [value for value in entries.values() if isinstance(value, TensorRef)] if isinstance(entries, dict) else []


def _unknown(layout: Layout, reason: str) -> FormatError:
    return FormatError(
        f"The optimizer's state in {layout.path.name} is indexed by position, and the names of the parameters are "
        f"unknown: {reason}. Leave it out with {argument('drop')} 'optimizer', write a format that keeps positions "
        "('pth', 'local'), or save with mmfsdp, which stores the names.",
        file=str(layout.path),
    )


def _weights(tree: Any) -> dict[str, TensorRef]:
    found = find_weights(tree, is_ref)
    held = found.weights if found is not None else {}
    return {str(name): value for name, value in held.items() if isinstance(value, TensorRef)}
