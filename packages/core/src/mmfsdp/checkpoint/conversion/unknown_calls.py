"""Leaves out what a trusted file would call when it is loaded: a conversion writes only calls that mmfsdp knows.

``trust`` keeps unknown objects as placeholders, so that the rest of a file can be read. Written again, they would be
calls that ``torch.load(weights_only=False)`` runs, in a file that looks like one of mmfsdp's.
"""

from __future__ import annotations

import collections
from typing import Any

from mmfsdp.checkpoint.pickles.unpickling import PickledObject, is_known_object

__all__ = ["leave_out_unknown"]

_GONE = object()


def leave_out_unknown(part: dict[Any, Any], path: str = "") -> tuple[dict[Any, Any], list[str]]:
    """Return a mapping without the entries that hold objects of unknown classes, and their paths.

    An entry is left out where the nearest mapping around the object has it. What holds no such object is not copied.

    Args:
        part: The mapping.
        path: Where it is, for the paths.
    """
    removed: list[str] = []
    return _known(part, path, removed), removed


def _known(value: Any, path: str, removed: list[str]) -> Any:
    if not _holds_unknown(value):
        return value
    if isinstance(value, dict):
        kept: dict[Any, Any] = collections.OrderedDict() if isinstance(value, collections.OrderedDict) else {}
        for key, child in value.items():
            name = f"{path}/{key}" if path else str(key)
            found = _GONE if _holds_unknown(key) else _known(child, name, removed)
            if found is _GONE:
                removed.append(name)
            else:
                kept[key] = found
        if isinstance(value, collections.OrderedDict):
            vars(kept).update(_known(vars(value), path, removed))
        return kept
    if isinstance(value, list) and all(isinstance(child, dict) or not _holds_unknown(child) for child in value):
        return [_known(child, f"{path}/{index}", removed) for index, child in enumerate(value)]
    return _GONE


def _holds_unknown(value: Any) -> bool:
    """Tell whether an object of an unknown class is anywhere in a value."""
    waiting, seen = [value], set()
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict):
            inside = (*found.keys(), *found.values(), *getattr(found, "__dict__", {}).values())
        elif isinstance(found, list | tuple | set | frozenset):
            inside = (*found,)
        elif isinstance(found, PickledObject) or (isinstance(found, type) and issubclass(found, PickledObject)):
            if not is_known_object(found):
                return True
            if isinstance(found, type):
                continue
            inside = (found.args, found.kwargs, found.elements, found.items, found.state)
            inside = tuple(dict(one) if one is found.kwargs else one for one in inside)
        else:
            continue
        if id(found) not in seen:
            seen.add(id(found))
            waiting.extend(inside)
    return False
