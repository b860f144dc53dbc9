"""Finds optimizer state that is each rank's own, though it looks whole: FSDP1's, as scripts and verl save it.

Under FSDP1, ``optimizer.state_dict()`` holds this rank's pieces of flat parameters as ordinary tensors, whereas the
weights beside it say where they belong (``SHARDED_STATE_DICT``). Nothing in the files says of which parameters a flat
one is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from mmfsdp.checkpoint.formats.torch_files.torch_zip import PickledDTensor, PickledShards, PickledTensor
from mmfsdp.checkpoint.tree import leaves

__all__ = ["own_states_by_rank"]


def own_states_by_rank(tree: Any, trees: Callable[[], Sequence[Any]]) -> Any:
    """Return content with each optimizer state that is every rank's own as a list by rank; nothing is changed in place.

    Args:
        tree: The content of the first rank's file, as pickled.
        trees: Returns the contents of all ranks' files; called if there is such state and more than one rank.
    """
    if not isinstance(tree, dict):
        return tree
    if isinstance(tree.get("state"), dict) and isinstance(tree.get("param_groups"), list):
        return list(trees()) if _is_own(tree["state"]) else tree

    def below(key: Any) -> Callable[[], Sequence[Any]]:
        return lambda: [held.get(key) if isinstance(held, dict) else None for held in trees()]

    changed = {key: own_states_by_rank(value, below(key)) for key, value in tree.items() if isinstance(value, dict)}
    return {**tree, **changed} if any(value is not tree[key] for key, value in changed.items()) else tree


def _is_own(state: dict[Any, Any]) -> bool:
    found = [leaf for _, leaf in leaves(state)]
    if any(isinstance(leaf, PickledDTensor | PickledShards) for leaf in found):
        return False
    return any(isinstance(leaf, PickledTensor) and math.prod(leaf.shape) > 1 for leaf in found)
