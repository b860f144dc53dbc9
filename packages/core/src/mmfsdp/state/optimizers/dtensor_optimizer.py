"""Converts the optimizer state of engines whose parameters are DTensors, in the plain optimizer's own format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mmfsdp.basics.nested import map_values, nested_values
from mmfsdp.basics.optimizer_forms import MATRICES, by_name
from mmfsdp.collective.steps import on_all_ranks
from mmfsdp.runtime.dtensors import Box, box_of
from mmfsdp.runtime.sharded_model import ShardedModel
from mmfsdp.state.lazy_tensors import LazyTensor, check_unchanged, local_value, whole_box, whole_value
from mmfsdp.state.optimizers.compressed import COMPRESSED, first_state, names_of_compressed, recompress

__all__ = ["DTensorStates", "stored_values"]


class DTensorStates:
    """The state of an optimizer whose parameters are DTensors; see `mmfsdp.runtime.engine.OptimizerStates`."""

    is_flat = False

    def __init__(self, state: ShardedModel, optimizer: Optimizer) -> None:
        self._state, self._optimizer = state, optimizer

    def names_in_groups(self) -> list[list[str]]:
        names = {id(param): fqn for fqn, param in self._state.module.named_parameters()}
        return [[names[id(param)] for param in group["params"]] for group in self._optimizer.param_groups]

    def by_name(self, own_form: Mapping[str, Any] | None) -> dict[str, Any]:
        return by_name(self.by_index(own_form), self.names_in_groups())

    def by_index(self, own_form: Mapping[str, Any] | None) -> dict[str, Any]:
        return {**(self._optimizer.state_dict() if own_form is None else own_form)}

    def boxes(self, fitting: Mapping[str, Any]) -> Iterator[tuple[LazyTensor, Box]]:
        at = _params_by_index(self._optimizer, fitting)
        for index, entries in fitting["state"].items():
            for name, entry in entries.items():
                for _, value in nested_values("", entry):
                    if isinstance(value, LazyTensor):
                        is_like = name != MATRICES and index in at and value.shape == at[index].shape
                        yield value, box_of(at[index]) if is_like else whole_box(value)

    def to_load(self, fitting: Mapping[str, Any]) -> dict[str, Any]:
        at = _params_by_index(self._optimizer, fitting)
        group_of = {id(param): group for group in self._optimizer.param_groups for param in group["params"]}
        compressed = names_of_compressed(fitting)

        def place_entries(param: torch.Tensor, entries: Mapping[str, Any]) -> dict[str, Any]:
            placed = {
                name: map_values(partial(_placed, param=None if name == MATRICES else param), value)
                for name, value in entries.items()
            }
            names = [name for name in compressed if isinstance(placed.get(name), torch.Tensor)]
            first = first_state(self._optimizer, group_of[id(param)], param) if names else {}
            return {**placed, **{name: recompress(placed[name], first.get(name)) for name in names}}

        def place_all() -> dict[Any, dict[str, Any]]:
            placed = {index: place_entries(at[index], entries) for index, entries in fitting["state"].items()}
            check_unchanged(stored_values(fitting))
            return placed

        rest = {key: value for key, value in fitting.items() if key != COMPRESSED}
        return {**rest, "state": on_all_ranks(place_all, self._state.scope)}

    def load(self, fitting: Mapping[str, Any]) -> None:
        placed = self.to_load(fitting)
        on_all_ranks(lambda: self._optimizer.load_state_dict(placed), self._state.scope)


def stored_values(fitting: Mapping[str, Any]) -> list[LazyTensor]:
    """Return the lazy tensors of a state, also those within lists and dicts."""
    return [
        leaf
        for entries in fitting["state"].values()
        for _, leaf in nested_values("", entries)
        if isinstance(leaf, LazyTensor)
    ]


def _params_by_index(optimizer: Optimizer, fitting: Mapping[str, Any]) -> dict[Any, torch.Tensor]:
    params = (param for group in optimizer.param_groups for param in group["params"])
    indices = (index for group in fitting["param_groups"] for index in group["params"])
    return dict(zip(indices, params, strict=True))


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
