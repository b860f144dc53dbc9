"""Reads what Megatron-Core saves as ``torch_dist``: a DCP directory with ``metadata.json`` and ``common.pt``.

Its tensors lie side by side under names such as ``decoder.final_layernorm.weight``. Optimizer state of that one is at
``optimizer.state.exp_avg.decoder.final_layernorm.weight``, with ``chained_0.`` before it if there are several
optimizers (megatron/core/dist_checkpointing/optimizer.py, megatron/core/optimizer/distrib_optimizer.py). What is no
tensor is ``name/shard_0_1``. ``common.pt`` holds what all ranks have in common, such as the iteration.
"""

from __future__ import annotations

import re
from typing import Any

from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.common.source import SourcePath
from mmfsdp.checkpoint.formats.dcp.metadata import read_as_stored, read_dcp_metadata
from mmfsdp.checkpoint.formats.torch_files.torch_zip import PickledTensor, add_whole, read_tree
from mmfsdp.checkpoint.integrity import inside
from mmfsdp.checkpoint.layout import Layout, TensorRef
from mmfsdp.checkpoint.pickles.unpickling import PickledObject
from mmfsdp.checkpoint.tree import map_leaves
from mmfsdp.errors import UnsafePickleError

__all__ = ["read"]

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<kind>\w+)\.(?P<name>.+)", re.ASCII)
_OF_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.", re.ASCII)
_COMMON = "common.pt"


def read(source: SourcePath) -> Layout:
    """Read the layout of such a directory.

    The weights are under ``state_dict``. ``optimizer`` has the state by names of parameters, and under ``as_stored``
    the tensors that do not name a parameter or do not have its shape. Other objects are under ``objects``, and what
    ``common.pt`` holds is under ``common``. If it needs ``trust``, ``common`` is left out without it.

    Raises:
        IncompleteCheckpointError, CorruptCheckpointError, FormatError, UnsafePickleError: See the reader of ``dcp``.
    """
    layout = read_as_stored(source)
    flattened = read_dcp_metadata(source.path / ".metadata", trust=source.trust).flattened
    weights: dict[str, Any] = {}
    state: dict[str, dict[str, Any]] = {}
    stored: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for key, value in layout.tree.items():
        match = _STATE.fullmatch(key)
        if not isinstance(value, TensorRef):
            objects[key] = _plain(value)
        elif match and key not in flattened and isinstance(layout.tree.get(match["name"]), TensorRef):
            state.setdefault(match["name"], {})[match["kind"]] = value
        elif _OF_OPTIMIZER.match(key) or key in flattened:
            stored[key] = value
        else:
            weights[key] = value
    tensors = dict(layout.tensors)
    parts = {
        "state_dict": weights,
        "optimizer": ({"state": state} if state else {}) | ({"as_stored": stored} if stored else {}),
        "objects": objects,
        "common": _common(source, tensors),
    }
    tree = {key: part for key, part in parts.items() if part or key == "state_dict"}
    return _renamed(Layout(layout.path, "megatron", layout.world_size, tensors, tree))


def _plain(value: Any) -> Any:
    """Return an object with bytes for each BytesIO in it, such as the extra state of Transformer Engine."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, PickledObject) and (value.module, value.qualname) == ("_io", "BytesIO"):
        held = value.state[0] if isinstance(value.state, tuple) and value.state else None
        return held if isinstance(held, bytes) else value
    return value


def _renamed(layout: Layout) -> Layout:
    """Return the layout with each tensor under its path in the tree."""
    tensors: dict[str, TensorEntry] = {}

    def bind(name: str, leaf: Any) -> Any:
        if not isinstance(leaf, TensorRef):
            return leaf
        entry = layout.tensors[leaf.name]
        tensors[name] = TensorEntry(name, entry.dtype, entry.shape, entry.stored)
        return TensorRef(name, leaf.parameter)

    tree = map_leaves(layout.tree, bind)
    return Layout(layout.path, layout.format, layout.world_size, tensors, tree)


def _common(source: SourcePath, tensors: dict[str, TensorEntry]) -> Any:
    if _COMMON not in source.names:
        return None

    def bind(name: str, leaf: Any) -> Any:
        return add_whole(f"common/{name}", leaf, tensors) if isinstance(leaf, PickledTensor) else leaf

    try:
        return map_leaves(read_tree(inside(source.path, _COMMON, source.path), trust=source.trust), bind)
    except UnsafePickleError:  # mostly Megatron's own enumerations among the arguments
        return None
