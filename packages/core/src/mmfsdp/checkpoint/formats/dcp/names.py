"""Names the values of nested content as torch's distributed checkpoint (DCP) does, for every writer of that format.

torch's planner (torch/distributed/checkpoint/_traverse.py) joins the keys that lead to a value with dots and turns each
key into text. It divides every mapping, and the lists that hold a tensor or a mapping; tuples stay whole. So
``{'ema': {0: tensor}}`` is stored as ``'ema.0'``, where ``torch.distributed.checkpoint.load`` finds it.

That alone loses empty dicts, and the type of keys that are not strings. Here an empty dict is stored as an object, a
dict without tensors whose keys are not all strings is stored whole, and what has an integer among its keys is noted
beside the names (`IntegerKey`), so that this library reads back what was saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mmfsdp.errors import MmfsdpError

__all__ = ["IntegerKey", "Keys", "NestedKinds", "flatten_nested", "integer_keys", "mark_integers"]


class IntegerKey(str):
    """The text of a key that is an integer in its dict. In the keys of a flat name a bare ``int`` indexes a list."""

    __slots__ = ()


Keys = tuple[str | int, ...]
"""The nested keys that a flat name is made of: text for a dict, an integer for a list."""


@dataclass(frozen=True, slots=True)
class NestedKinds:
    """What the values of nested content are: live objects in a training process, or descriptions of a file's."""

    is_tensor: Callable[[Any], bool]
    """Whether a value is stored as a tensor."""
    mapping: Callable[[Any], Mapping[Any, Any] | None]
    """Returns the value if it is a mapping, None otherwise."""


def flatten_nested(
    content: Mapping[Any, Any], kinds: NestedKinds, error: type[MmfsdpError]
) -> dict[str, tuple[Keys, Any]]:
    """Return the values of nested content by their flat names, in order.

    Args:
        content: Nested mappings and lists; the outermost mapping is always divided.
        kinds: What its values are.
        error: What to raise.

    Returns:
        By flat name, the keys that lead to a value, and the value: a tensor, or an object to be stored whole.

    Raises:
        MmfsdpError: ``error``: two values have the same name.
    """
    found: dict[str, tuple[Keys, Any]] = {}
    for key, child in content.items():
        for keys, value in _walk((_text_of(key),), child, kinds):
            name = ".".join(map(str, keys))
            if name in found:
                raise error(
                    f"The keys {_shown(found[name][0])} and {_shown(keys)} are both {name!r} once they are joined with "
                    "dots, which a distributed checkpoint cannot tell apart. Rename one."
                )
            found[name] = keys, value
    return found


def integer_keys(keys: Keys) -> list[int]:
    """Return the positions of the keys that are integers in their dicts."""
    return [position for position, key in enumerate(keys) if isinstance(key, IntegerKey)]


def mark_integers(keys: Keys, positions: Any) -> Keys:
    """Return keys as `flatten_nested` gave them, from what `integer_keys` said of them.

    Raises:
        ValueError: At one of the positions there is no integer.
    """
    marked = list(keys)
    for position in positions:
        key = keys[position] if type(position) is int and 0 <= position < len(keys) else None
        if type(key) is not str or len(key) > _DIGITS or str(int(key)) != key:
            raise ValueError(f"the keys {keys!r} have no integer at {position!r}")
        marked[position] = IntegerKey(key)
    return tuple(marked)


_DIGITS = 100  # of an integer; more is damage


def _walk(keys: Keys, value: Any, kinds: NestedKinds) -> Iterator[tuple[Keys, Any]]:
    mapping = kinds.mapping(value)
    if mapping is not None and _divides_mapping(mapping, kinds):
        for key, child in mapping.items():
            yield from _walk((*keys, _text_of(key)), child, kinds)
    elif isinstance(value, list) and _divides_list(value, kinds):
        for index, child in enumerate(value):
            yield from _walk((*keys, index), child, kinds)
    else:
        yield keys, value


def _divides_mapping(value: Mapping[Any, Any], kinds: NestedKinds) -> bool:
    if all(isinstance(key, str) for key in value):
        return bool(value)
    if not all(isinstance(key, str) or _is_integer(key) for key in value):
        return False
    return len({str(key) for key in value}) == len(value) and _holds_tensors(value, kinds)


def _divides_list(value: list[Any], kinds: NestedKinds) -> bool:
    return any(
        kinds.is_tensor(child)
        or kinds.mapping(child) is not None
        or (isinstance(child, list) and _divides_list(child, kinds))
        for child in value
    )


def _holds_tensors(value: Any, kinds: NestedKinds) -> bool:
    if kinds.is_tensor(value):
        return True
    mapping = kinds.mapping(value)
    children = mapping.values() if mapping is not None else value if isinstance(value, list | tuple) else ()
    return any(_holds_tensors(child, kinds) for child in children)


def _is_integer(key: Any) -> bool:
    return type(key) is int and abs(key) < 10**_DIGITS


def _text_of(key: Any) -> str:
    return IntegerKey(key) if _is_integer(key) else str(key)


def _shown(keys: Keys) -> str:
    return repr(tuple(int(key) if isinstance(key, IntegerKey) else key for key in keys))
