"""Converts the optimizer state of engines whose parameters are DTensors, in the plain optimizer's own format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mmfsdp.basics.nested import map_values, nested_values
from mmfsdp.basics.optimizer_forms import MATRICES
from mmfsdp.collective.steps import on_all_ranks
from mmfsdp.runtime.dtensors import Box, box_of
from mmfsdp.runtime.sharded_model import ShardedModel
from mmfsdp.state.lazy_tensors import LazyTensor, check_unchanged, local_value, whole_box, whole_value
from mmfsdp.state.optimizers.compressed import COMPRESSED, first_state, names_of_compressed, recompress

__all__ = ["boxes_to_read", "names_in_groups", "placed_state", "stored_values"]


def names_in_groups(state: ShardedModel, optimizer: Optimizer) -> list[list[str]]:
    """Return the FQNs of each param group. Not collective."""
    names = {id(param): fqn for fqn, param in state.module.named_parameters()}
    return [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]


def stored_values(fitting: Mapping[str, Any]) -> list[tuple[Any, LazyTensor]]:
    """Return the lazy tensors of a state, also those within lists and dicts, each with the place of its parameter."""
    return [
        (place, leaf)
        for place, entries in fitting["state"].items()
        for _, leaf in nested_values("", entries)
        if isinstance(leaf, LazyTensor)
    ]


def boxes_to_read(optimizer: Optimizer, fitting: Mapping[str, Any]) -> Iterator[tuple[LazyTensor, Box]]:
    """Yield the lazy tensors of a fitting state, each with the box that this rank reads of it. Not collective."""
    at = _params_by_place(optimizer, fitting)
    for place, entries in fitting["state"].items():
        for name, entry in entries.items():
            for _, value in nested_values("", entry):
                if isinstance(value, LazyTensor):
                    is_like = name != MATRICES and place in at and value.shape == at[place].shape
                    yield value, box_of(at[place]) if is_like else whole_box(value)


def placed_state(state: ShardedModel, optimizer: Optimizer, fitting: Mapping[str, Any]) -> dict[str, Any]:
    """Return a fitting state with this rank's part of its tensors. Collective: every rank."""
    at = _params_by_place(optimizer, fitting)
    group_of = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    compressed = names_of_compressed(fitting)

    def place_entries(param: torch.Tensor, entries: Mapping[str, Any]) -> dict[str, Any]:
        placed = {
            name: map_values(partial(_placed, param=None if name == MATRICES else param), value)
            for name, value in entries.items()
        }
        names = [name for name in compressed if isinstance(placed.get(name), torch.Tensor)]
        first = first_state(optimizer, group_of[id(param)], param) if names else {}
        return {**placed, **{name: recompress(placed[name], first.get(name)) for name in names}}

    def place_all() -> dict[Any, dict[str, Any]]:
        placed = {place: place_entries(at[place], entries) for place, entries in fitting["state"].items()}
        check_unchanged(value for _, value in stored_values(fitting))
        return placed

    rest = {key: value for key, value in fitting.items() if key != COMPRESSED}
    return {**rest, "state": on_all_ranks(place_all, state.scope)}


def _params_by_place(optimizer: Optimizer, fitting: Mapping[str, Any]) -> dict[Any, torch.Tensor]:
    params = (param for group in optimizer.param_groups for param in group["params"])
    places = (place for group in fitting["param_groups"] for place in group["params"])
    return dict(zip(places, params, strict=True))


def _placed(value: Any, param: torch.Tensor | None) -> Any:
    """Turn a whole tensor of the parameter's shape into a DTensor placed like it; return other values as they are."""
    if not isinstance(value, (torch.Tensor, LazyTensor)):
        return value
    if isinstance(value, DTensor) or not isinstance(param, DTensor) or value.shape != param.shape:
        # Steps change state in place, which must not change the caller's tensors.
        return value.clone() if isinstance(value, torch.Tensor) else whole_value(value)
    local = local_value(value, param).to(param.to_local().device, copy=True).contiguous()
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
