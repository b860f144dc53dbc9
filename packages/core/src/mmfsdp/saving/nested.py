"""How nested content becomes the flat names of torch's distributed checkpoint (DCP), so that it comes back as it was.

torch's planner makes ``'a.b'`` of ``{'a': {'b': ...}}`` and notes the keys. That loses empty dicts and turns keys that
are no strings into strings. Here such parts are stored as one object each; all else is named as torch names it, so
that ``torch.distributed.checkpoint.load`` finds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor

from mmfsdp.errors import StateDictError

__all__ = ["NestedSavePlanner", "flattened"]

Path = tuple[str | int, ...]


class NestedSavePlanner(DefaultSavePlanner):
    """torch's planner with names from `flattened`.

    What is not sharded is the first rank's: unsharded buffers, such as running statistics, may differ between ranks.
    Of shards that several replicas hold, torch gives each to the one with the least to write so far.

    Args:
        is_first: Whether this is the first rank of the mesh.
    """

    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self._is_first = is_first

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """See torch's `SavePlanner`."""
        names = {
            name: found
            for name, found in flattened(state_dict).items()
            if self._is_first or isinstance(found[1], DTensor)
        }
        self.is_coordinator = is_coordinator
        self.state_dict = {name: value for name, (_, value) in names.items()}
        self.mappings = {name: path for name, (path, _) in names.items()}


def flattened(content: Mapping[str, Any]) -> dict[str, tuple[Path, Any]]:
    """Return what is stored, by flat name: the keys that lead to it, and the tensor or object.

    Raises:
        StateDictError: A DTensor lies below a key that is no string or in a tuple, or two paths have one name.
    """
    found: dict[str, tuple[Path, Any]] = {}
    for path, value in _leaves((), content):
        name = ".".join(map(str, path))
        if name in found:
            raise StateDictError(f"The keys {found[name][0]!r} and {path!r} would both be stored as {name!r}.")
        found[name] = path, value
    return found


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
        for key, child in value.items():
            yield from _leaves((*path, key), child)
    elif isinstance(value, list) and not _is_plain(value):
        for index, child in enumerate(value):
            yield from _leaves((*path, index), child)
    else:
        if not isinstance(value, torch.Tensor) and _holds_shards(value):
            raise StateDictError(
                f"{'.'.join(map(str, path))!r} is a {type(value).__name__} with sharded tensors, which cannot be "
                "stored in parts. Use dicts with strings as keys, and lists."
            )
        yield path, value


def _is_plain(values: list[Any]) -> bool:
    """Whether torch keeps a list as one object: it holds neither tensors nor dicts."""
    return not any(
        isinstance(value, Mapping | torch.Tensor) or (isinstance(value, list) and not _is_plain(value))
        for value in values
    )


def _holds_shards(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_shards, value.values()))
    return isinstance(value, DTensor) or (isinstance(value, list | tuple) and any(map(_holds_shards, value)))
