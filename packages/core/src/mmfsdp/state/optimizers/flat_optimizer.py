"""Converts the optimizer state of engine ``fsdp1``: torch keys it by FQN, the plain format by position."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictSettings, StateDictType
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mmfsdp.basics.optimizer_forms import GROUPS, STATE, by_index, by_name
from mmfsdp.basics.text import clean_fqn
from mmfsdp.basics.torch_releases import start_adagrad
from mmfsdp.collective.steps import any_of, on_all_ranks
from mmfsdp.errors import StateDictError
from mmfsdp.runtime.dtensors import Box
from mmfsdp.runtime.fsdp1.flat_params import flat_params
from mmfsdp.runtime.refusals.guards import unwatched
from mmfsdp.runtime.sharded_model import ShardedModel
from mmfsdp.state.lazy_tensors import LazyTensor, whole_box, whole_value
from mmfsdp.state.optimizers.compressed import compress_state, names_of_compressed
from mmfsdp.state.optimizers.dtensor_optimizer import stored_values

__all__ = ["FlatStates"]


class FlatStates:
    """The state of an optimizer of flat parameters; see `mmfsdp.runtime.engine.OptimizerStates`."""

    is_flat = True

    def __init__(self, state: ShardedModel, optimizer: Optimizer) -> None:
        self._state, self._optimizer = state, optimizer

    def names_in_groups(self) -> list[list[str]]:
        return [group["params"] for group in self.by_name(None)["param_groups"]]

    def by_name(self, own_form: Mapping[str, Any] | None) -> dict[str, Any]:
        state, optimizer = self._state, self._optimizer
        if own_form is not None:
            with _state_dict_type(state, StateDictType.SHARDED_STATE_DICT):
                given = FullyShardedDataParallel.optim_state_dict(state.module, optimizer, dict(own_form))
            return _in_order(state, optimizer, given)
        start_adagrad(optimizer)
        fresh = not any_of(state.scope, bool(optimizer.state))
        with unwatched(), _initialised(state, optimizer):
            named: dict[str, Any] = dict(get_optimizer_state_dict(state.module, optimizer))
            if fresh:
                # torch has stepped the optimizer with zero gradients, which advances the step count.
                optimizer.state.clear()
                named["state"] = {}
        return _in_order(state, optimizer, named)

    def by_index(self, own_form: Mapping[str, Any] | None) -> dict[str, Any]:
        return by_index(self.by_name(own_form))

    def boxes(self, fitting: Mapping[str, Any]) -> list[tuple[LazyTensor, Box]]:
        return [(value, whole_box(value)) for value in stored_values(fitting)]

    def to_load(self, fitting: Mapping[str, Any]) -> dict[str, Any]:
        state, optimizer = self._state, self._optimizer
        named = self._named(fitting)
        is_full = _is_full(named)
        start_adagrad(optimizer)
        fresh = not any_of(state.scope, bool(optimizer.state))
        if named["state"]:
            with unwatched(), _initialised(state, optimizer):
                named = _filled(state, optimizer, named, StateDictOptions(full_state_dict=is_full))
            if fresh:
                optimizer.state.clear()
        with _state_dict_type(state, StateDictType.FULL_STATE_DICT if is_full else StateDictType.SHARDED_STATE_DICT):
            result: dict[str, Any] = FullyShardedDataParallel.optim_state_dict_to_load(state.module, optimizer, named)
        return result

    def load(self, fitting: Mapping[str, Any]) -> None:
        placed, names = self.to_load(fitting), names_of_compressed(fitting)

        def load() -> None:
            self._optimizer.load_state_dict(placed)
            compress_state(self._optimizer, names)

        on_all_ranks(load, self._state.scope)

    def _named(self, fitting: Mapping[str, Any]) -> dict[str, Any]:
        names = self.names_in_groups()
        named = by_name(fitting, names)[STATE]

        def read() -> dict[str, Any]:
            return {
                fqn: {name: _own(value, f"{fqn}.{name}") for name, value in entries.items()}
                for fqn, entries in named.items()
            }

        values = on_all_ranks(read, self._state.scope)  # a disk may fail, or memory run out, on one rank
        groups = [{**group, "params": own} for group, own in zip(fitting[GROUPS], names, strict=True)]
        return {STATE: values, GROUPS: groups}


def _is_full(named: Mapping[str, Any]) -> bool:
    return not any(isinstance(value, DTensor) for entries in named["state"].values() for value in entries.values())


def _filled(
    state: ShardedModel, optimizer: Optimizer, named: Mapping[str, Any], options: StateDictOptions
) -> dict[str, Any]:
    """Return a state with an entry for every parameter, as torch needs; missing entries have their initial values."""
    initial: dict[str, Any] = dict(get_optimizer_state_dict(state.module, optimizer, options=options))
    return {"state": {**initial["state"], **named["state"]}, "param_groups": named["param_groups"]}


def _own(value: Any, name: str) -> Any:
    value = whole_value(value)
    if isinstance(value, torch.Tensor) and (value.is_meta or value.layout is not torch.strided):
        raise StateDictError(
            f"{name!r} of the optimizer's state is a {value.layout} tensor on {value.device}. Give a dense tensor with "
            "values."
        )
    return value.clone() if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) else value


def _in_order(state: ShardedModel, optimizer: Optimizer, named: Mapping[str, Any]) -> dict[str, Any]:
    position = {param.fqn: param.place for param in state.plan.all_params()}
    own = {id(param): clean_fqn(fqn) for fqn, param in state.module.named_parameters()}
    groups = []
    for group, mine in zip(named["param_groups"], optimizer.param_groups, strict=True):
        fqns = [own.get(id(param), "") for param in mine["params"]]
        if set(fqns) != set(group["params"]):  # flat parameters: many names each
            fqns = sorted(group["params"], key=lambda fqn: position[fqn])
        groups.append({**group, "params": fqns})
    return {**named, "param_groups": groups}


@contextmanager
def _state_dict_type(state: ShardedModel, kind: StateDictType) -> Iterator[None]:
    """Set torch's state dict type without its warning that it is deprecated."""

    def set_type(*settings: Any) -> StateDictSettings:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return FullyShardedDataParallel.set_state_dict_type(state.module, *settings)

    before = set_type(kind)
    try:
        yield
    finally:
        set_type(before.state_dict_type, before.state_dict_config, before.optim_state_dict_config)


@contextmanager
def _initialised(state: ShardedModel, optimizer: Optimizer) -> Iterator[None]:
    """Set gradients aside: torch initialises an optimizer's state only if there are none.

    This includes gradients of flat parameters: torch drops them if the parameters in them have none.
    """
    params = [*flat_params(state.module), *(param for group in optimizer.param_groups for param in group["params"])]
    grads = [param.grad for param in params]
    for param in params:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in zip(params, grads, strict=True):
            _give_back(param, grad)


def _give_back(param: torch.Tensor, grad: torch.Tensor | None) -> None:
    if grad is None or grad.shape == param.shape:
        param.grad = grad
        return
    # A gradient accumulated in no_sync is whole, but the parameter is a piece, and torch checks the shape.
    piece, param.data = param.data, grad
    param.grad = grad
    param.data = piece
