"""Walks and maps the nested content of a checkpoint, and finds its parts, such as the weights."""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from mmfsdp.basics.arguments import argument
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.layout import Layout, TensorRef
from mmfsdp.checkpoint.pickles.unpickling import PickledObject
from mmfsdp.errors import ConfigError, FormatError, closest

__all__ = [
    "MODEL_KEYS",
    "OPTIMIZER_KEYS",
    "Weights",
    "common_prefix",
    "find_leaves",
    "find_tensor",
    "find_weights",
    "is_ref",
    "leaves",
    "listed",
    "map_leaves",
    "named_tensors",
    "part_tensors",
    "select_tensors",
    "tensor_free_paths",
    "top_level_key",
    "unique_name",
    "usual_content",
    "usual_optimizer",
    "weights_of",
]


T = TypeVar("T")


def map_leaves(tree: Any, function: Callable[[str, Any], Any]) -> Any:
    """Return a copy of the tree with every leaf replaced; shared containers stay shared.

    Args:
        tree: Nested dicts, lists and tuples. Pickled objects are walked too, and changed in place.
        function: Called as ``function(path, leaf)``, where the path joins ``str(key)`` of the nested keys with ``/``.

    Raises:
        FormatError: Something holds itself, or is nested deeper than 100 levels.
    """
    return _Mapper(function).map("", tree)


def leaves(tree: Any, limit: int = 10_000_000) -> Iterator[tuple[str, Any]]:
    """Yield every leaf of a tree with its path; a shared leaf comes once for each path to it.

    Args:
        tree: Nested dicts, lists and tuples, and pickled objects.
        limit: Largest number of leaves and containers.

    Raises:
        FormatError: There are more, for example because a container holds itself.
    """
    stack: list[tuple[str, Any]] = [("", tree)]
    for _ in range(limit):
        if not stack:
            return
        path, value = stack.pop()
        if isinstance(value, dict | list | tuple | PickledObject):
            below = [(_join(path, key), child) for key, child in _children(value)]
            stack.extend(reversed(below))
        else:
            yield path, value
    raise FormatError(f"There are more than {limit} values in this checkpoint, or one that holds itself.")


def find_leaves(tree: Any, kind: type[T]) -> list[tuple[str, T]]:
    """Return the leaves of a type with their paths, once for a shared container; errors as for ``map_leaves``."""
    found: list[tuple[str, T]] = []

    def visit(path: str, leaf: Any) -> Any:
        if isinstance(leaf, kind):
            found.append((path, leaf))
        return leaf

    map_leaves(tree, visit)
    return found


def select_tensors(tree: Any) -> list[str]:
    """Return the names of the tensors that a tree refers to, each once, in order."""
    return list(dict.fromkeys(named_tensors(tree).values()))


def named_tensors(part: Any) -> dict[str, str]:
    """Return the names that tensors have within a part, mapped to their names in the source."""
    names: dict[str, str] = {}
    for path, ref in find_leaves(part, TensorRef):
        names[unique_name(path, names)] = ref.name
    return names


def tensor_free_paths(tree: Any, prefix: str = "") -> list[str]:
    """Return the paths of the largest parts of a tree that hold no tensor, in order."""
    if isinstance(tree, TensorRef):
        return []
    if not select_tensors(tree):
        return [prefix or "(everything)"]
    return [path for key, child in _children(tree) for path in tensor_free_paths(child, _join(prefix, key))]


def unique_name(name: str, taken: Container[str]) -> str:
    """Return the name, or ``'name~2'`` and so on if it is taken: the keys 0 and '0' of one dict have the same path."""
    unique, count = name, 1
    while unique in taken:
        count += 1
        unique = f"{name}~{count}"
    return unique


def _join(prefix: str, key: object) -> str:
    return f"{prefix}/{key}" if prefix else str(key)


def _children(tree: Any) -> Iterator[tuple[object, Any]]:
    if isinstance(tree, dict):
        yield from tree.items()
    elif isinstance(tree, list | tuple):
        yield from enumerate(tree)
    elif isinstance(tree, PickledObject):
        yield from ((key, getattr(tree, key)) for key in _PARTS if getattr(tree, key))


_DEPTH = 100  # levels of containers
_PARTS = ("args", "kwargs", "elements", "items", "state")


class _Mapper:
    def __init__(self, function: Callable[[str, Any], Any]) -> None:
        self._function = function
        # The originals are kept beside the copies, so that no id is reused while mapping.
        self._done: dict[int, tuple[Any, Any]] = {}
        self._holders: set[int] = set()

    def map(self, path: str, value: Any) -> Any:
        if not isinstance(value, dict | list | tuple | PickledObject):
            return self._function(path, value)
        if id(value) in self._holders:
            raise FormatError(f"What is at {path[:200]!r} holds itself. No checkpoint is like this.")
        if id(value) in self._done:
            return self._done[id(value)][1]
        if len(self._holders) == _DEPTH:
            raise FormatError(f"There are more than {_DEPTH} levels above {path[:200]!r}. No checkpoint is like this.")
        self._holders.add(id(value))
        mapped = self._map_container(path, value)
        self._holders.remove(id(value))
        return mapped

    def _map_container(self, path: str, value: Any) -> Any:
        if isinstance(value, PickledObject):
            return self._map_pickled(path, value)
        if isinstance(value, dict):
            return self._map_dict(path, value)
        if isinstance(value, list):
            copy: list[Any] = []
            self._done[id(value)] = (value, copy)
            copy.extend(self.map(_join(path, index), element) for index, element in enumerate(value))
            return copy
        result = tuple(self.map(_join(path, index), element) for index, element in enumerate(value))
        self._done[id(value)] = (value, result)
        return result

    def _map_dict(self, path: str, value: dict[Any, Any]) -> dict[Any, Any]:
        copy: dict[Any, Any] = collections.OrderedDict() if isinstance(value, collections.OrderedDict) else {}
        self._done[id(value)] = (value, copy)
        for key, child in value.items():
            copy[key] = self.map(_join(path, key), child)
        if isinstance(value, collections.OrderedDict):
            vars(copy).update(vars(value))
        return copy

    def _map_pickled(self, path: str, value: PickledObject) -> PickledObject:
        self._done[id(value)] = (value, value)
        value.args = self.map(_join(path, "args"), value.args)
        for part in ("kwargs", "elements", "items"):
            if getattr(value, part):  # most have none, and share that
                setattr(value, part, self.map(_join(path, part), getattr(value, part)))
        if value.has_state:
            value.state = self.map(_join(path, "state"), value.state)
        return value


MODEL_KEYS = ("state_dict", "model")
"""Keys of the weights: MMEngine's, and the one of many training scripts."""

OPTIMIZER_KEYS = ("optimizer", "optim")
"""Keys of the optimizer's state."""

# What training scripts save beside weights that have no key of their own, as torchtitan does.
_BESIDE = {
    *OPTIMIZER_KEYS,
    "optimizers",
    "lr_scheduler",
    "lr_schedulers",
    "scheduler",
    "schedulers",
    "param_schedulers",
}
_BESIDE |= {"dataloader", "train_state", "meta", "message_hub", "rng_state", "ema_state_dict"}


_RANDOM = "rng"  # the state of random number generators, which Composer keeps beside everything else


@dataclass(frozen=True)
class Weights:
    """The weights of a checkpoint, and its other content."""

    weights: dict[Any, Any]
    """Name to tensor."""
    where: tuple[Any, ...]
    """The keys that lead to them; none if they have no key of their own."""
    beside: Mapping[Any, Any]
    """Everything beside the weights, by key."""
    above: Mapping[Any, Any] = field(default_factory=dict)
    """Everything beside the first key of ``where`` if there are several, by key."""

    @cached_property
    def names(self) -> dict[str, str]:
        """The names of the weights' tensors, mapped to their names in the source."""
        return named_tensors(self.weights)

    def left_out(self, *kept: str) -> list[str]:
        """Return the paths of everything beside the weights, except for some keys."""
        above = "/".join(map(str, self.where[:-1]))
        own = [f"{above}/{key}" if above else str(key) for key in self.beside if key not in kept]
        return [*own, *map(str, self.above)]


def find_weights(tree: Any, is_tensor: Callable[[Any], bool]) -> Weights | None:
    """Find the weights in the content of a checkpoint; ``None`` if they are under none of the usual keys.

    They lie under ``'state_dict'`` or ``'model'``; or so under the only key there is (``{'app': {'model': ...}}``, as
    in torch's tutorials), or the only one beside ``'rng'`` (``{'state': {'model': ...}, 'rng': ...}``, as in Composer);
    or without a key of their own: alone, or beside ``'optimizer'``, ``'lr_scheduler'``, ``'dataloader'``,
    ``'train_state'`` and the like, as torchtitan writes them.
    """
    if not isinstance(tree, dict):
        return None
    for key in MODEL_KEYS:
        if isinstance(tree.get(key), dict):
            return Weights(tree[key], (key,), _without(tree, key))
    if not any(map(is_tensor, tree.values())):
        above = {key: value for key, value in tree.items() if key == _RANDOM}
        if len(tree) - len(above) != 1:
            return None
        [only] = _without(tree, _RANDOM)
        found = find_weights(tree[only], is_tensor)
        return Weights(found.weights, (only, *found.where), found.beside, above) if found and found.where else None
    parts = {key: value for key, value in tree.items() if isinstance(value, dict)}
    if not parts:
        return Weights(tree, (), {})
    if any(key not in _BESIDE and any(is_tensor(leaf) for _, leaf in leaves(value)) for key, value in parts.items()):
        return None
    own = {key: value for key, value in tree.items() if is_tensor(value) or str(key).endswith("_extra_state")}
    return Weights(own, (), _without(tree, *own))


def usual_content(tree: Any, is_tensor: Callable[[Any], bool]) -> dict[Any, Any] | None:
    """Return content with its weights under ``'state_dict'`` and its optimizer's state under ``'optimizer'``.

    ``None`` if there are no weights where they usually are. Nothing is changed in place.
    """
    found = find_weights(tree, is_tensor)
    if found is None:
        return None
    return {"state_dict": found.weights, **usual_optimizer({**found.above, **found.beside})}


def usual_optimizer(content: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return content with its optimizer's state under ``'optimizer'``, whichever of the usual names it has."""
    content = dict(content)
    for key in OPTIMIZER_KEYS:
        if "optimizer" not in content and isinstance(content.get(key), dict):
            content["optimizer"] = content.pop(key)
    several = content.get("optimizers")  # of Composer, by the names of their classes
    if "optimizer" not in content and isinstance(several, dict) and len(several) == 1:
        [content["optimizer"]] = content.pop("optimizers").values()
    return content


def weights_of(layout: Layout) -> Weights:
    """Find the weights of a checkpoint; see ``find_weights``.

    Raises:
        FormatError: The weights are under none of the usual keys.
    """
    if not isinstance(layout.tree, dict):
        kind = "one tensor" if isinstance(layout.tree, TensorRef) else f"a {type(layout.tree).__name__}"
        raise FormatError(
            f"{layout.path.name} holds {kind} and not a mapping of names, so it has no weights. Save the state_dict() "
            "of a model.",
            file=str(layout.path),
        )
    found = find_weights(layout.tree, is_ref)
    if found is not None:
        return found
    if not layout.top_level:
        raise FormatError(f"{layout.path.name} holds nothing: it has no weights.", file=str(layout.path))
    remedy = f"name one with {argument('keep')}."
    if beside := layout.weights_beside():
        remedy = f"name one with {argument('keep')}, or open what lies beside it: {listed(beside)}."
    if "ds_version" in layout.tree:
        remedy = f"it is one of several files of DeepSpeed. Open its directory {str(layout.path.parent)!r}."
    raise FormatError(
        f"{layout.path.name} has no 'state_dict'. Its top-level keys are {listed(layout.top_level)}; {remedy}",
        file=str(layout.path),
    )


def is_ref(leaf: Any) -> bool:
    """Tell whether a leaf of a layout's tree stands for a tensor."""
    return isinstance(leaf, TensorRef)


def _without(tree: Mapping[Any, Any], *keys: Any) -> dict[Any, Any]:
    return {key: value for key, value in tree.items() if key not in keys}


def top_level_key(layout: Layout, name: str, given_as: str = "keep") -> Any:
    """Return the top-level key that is written ``name``.

    Args:
        layout: The checkpoint.
        name: The key as text.
        given_as: What the caller gave it as: ``'keep'``, or ``'drop'``.

    Raises:
        ConfigError: There is none; the message names the nearest.
    """
    found = [key for key in layout.tree if str(key) == name] if isinstance(layout.tree, dict) else []
    if not found:
        words = ["model", "all"] if given_as == "keep" else []
        hint = closest(name, [*words, *layout.top_level])
        what = "neither 'model' nor 'all' nor a" if words else "no"
        raise ConfigError(
            f"{argument(given_as, name)} is {what} top-level key of {layout.path.name}.{hint} Its keys are "
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
        FormatError: ``keep`` is ``'model'``, but the checkpoint has no weights.
    """
    if keep == "all":
        part = layout.tree
    elif keep == "model":
        return {name: layout.tensors[stored] for name, stored in weights_of(layout).names.items()}
    else:
        part = layout.tree[top_level_key(layout, keep)]
        if is_ref(part):  # it has no names below its own
            return {}
    return {name: layout.tensors[stored] for name, stored in named_tensors(part).items()}


def common_prefix(names: Collection[str], others: Collection[str]) -> str:
    """Return the prefix without which most of the names would be among the others; empty if there is none.

    Args:
        names: Names of tensors, such as ``'module.fc.weight'``.
        others: Names in another checkpoint, such as ``'fc.weight'``.
    """
    known = {*others}
    first = min((name for name in names), key=len, default="")
    cuts = [end + 1 for end, char in enumerate(first) if char in "./"]
    for cut in cuts:
        prefix = first[:cut]
        found = sum(name.startswith(prefix) and name[cut:] in known for name in names)
        if 2 * found > len(names):
            return prefix
    return ""


def find_tensor(layout: Layout, name: str) -> TensorEntry:
    """Return a tensor by its whole name, or by its name among the weights.

    Raises:
        ConfigError: There is none; the message names the nearest.
    """
    if name in layout.tensors:
        return layout.tensors[name]
    found = find_weights(layout.tree, is_ref)
    if found is not None and (stored := found.names.get(name)) is not None:
        return layout.tensors[stored]
    hint = closest(name, layout.tensors) or f" There are {len(layout.tensors)} tensors; `inspect` lists them."
    raise ConfigError(f"{layout.path.name} has no tensor {name!r}.{hint}", file=str(layout.path))


def listed(names: Sequence[str]) -> str:
    """Return names in quotes, the first twenty of them."""
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(repr(name) for name in names[:20]) + more
