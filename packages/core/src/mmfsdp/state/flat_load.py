"""Turns FSDP1's flat parameters into a state dict, and loads values into them.

Of whole values each rank writes the elements that it holds, and nothing is gathered. Shards are loaded by torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from mmfsdp.basics.text import clean_fqn
from mmfsdp.collective.steps import on_all_ranks
from mmfsdp.runtime.dtensors import Box, whole_tensor
from mmfsdp.runtime.fsdp1.flat_params import FlatPiece, flat_pieces
from mmfsdp.runtime.sharded_model import ShardedModel
from mmfsdp.state.extra_states import EXTRA_STATE
from mmfsdp.state.lazy_tensors import LazyTensor, whole_value

__all__ = ["fill_piece", "flat_targets", "load_by_torch", "piece_box"]


def flat_targets(state: ShardedModel) -> dict[str, Any] | None:
    """Return what a load of whole values writes to, in the unsharded model's order; None without flat parameters.

    Flat parameters are there as pieces, beside what a state dict of engine ``fsdp1`` holds else: whole parameters,
    buffers, extra states. Not collective.
    """
    state.reshard()
    pieces = flat_pieces(state.module)
    found: dict[str, Any] = {**pieces}
    for prefix, module in state.module.named_modules(remove_duplicate=False):
        start = clean_fqn(f"{prefix}.") if prefix else ""
        persistent = {
            name: value for name, value in module._buffers.items() if name not in module._non_persistent_buffers_set
        }
        for own, value in {**module._parameters, **persistent}.items():
            name = clean_fqn(start + own)
            if value is not None and own != "_flat_param" and name not in pieces:
                found[name] = value
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            found[start + EXTRA_STATE] = None
    params = [name for param in state.plan.params_in_order() for name in (param.fqn, *param.aliases)]
    return {name: found[name] for name in (*(name for name in params if name in found), *found)} if pieces else None


def load_by_torch(
    state: ShardedModel, names: list[str], state_dict: Mapping[str, Any], target: Mapping[str, Any]
) -> None:
    """Load values by torch's own load for FSDP1. Collective: every rank.

    Args:
        state: The model's state.
        names: The keys to load.
        state_dict: Their values, whole or shards.
        target: The model's own sharded state dict.
    """
    source = on_all_ranks(lambda: {name: whole_value(state_dict[name]) for name in names}, state.scope)
    if not state.plan.use_orig_params:  # a flat parameter is loaded as a whole
        source = {name: source[name] if name in source else _whole(into) for name, into in target.items()}
    full = {name: value for name, value in source.items() if not isinstance(value, DTensor)}
    sharded = {name: value for name, value in source.items() if isinstance(value, DTensor)}
    parts: list[tuple[dict[str, Any], bool]] = [(full, True), (sharded, False)]
    for values, is_full in parts:
        if values:
            set_model_state_dict(state.module, values, options=StateDictOptions(full_state_dict=is_full, strict=False))


def _whole(value: Any) -> Any:
    return whole_tensor(value, cpu_offload=True) if isinstance(value, torch.Tensor) else value


def piece_box(piece: FlatPiece) -> Box:
    """Return the rows of the parameter that hold this rank's elements; no rows if it has none. Not collective."""
    count, start = piece.target.numel(), piece.start
    if not piece.shape:
        return Box((), ())
    row = piece.shape[1:].numel()
    first, last = (start // row, (start + count - 1) // row) if count else (0, -1)
    return Box((first, *[0] * (len(piece.shape) - 1)), (last - first + 1, *piece.shape[1:]))


@torch.no_grad()
def fill_piece(piece: FlatPiece, value: Any) -> None:
    """Copy this rank's elements of a whole value. Not collective.

    Args:
        piece: The elements to write.
        value: A whole tensor, or a `LazyTensor`, from which only the needed rows are read.
    """
    count = piece.target.numel()
    if not count:
        return
    start = piece.start
    if isinstance(value, LazyTensor) and piece.shape:
        box = piece_box(piece)
        elements = value.read(box).flatten()
        start -= box.offsets[0] * piece.shape[1:].numel()
    else:
        elements = (value.read() if isinstance(value, LazyTensor) else value).reshape(-1)
    piece.target.copy_(elements[start : start + count])
