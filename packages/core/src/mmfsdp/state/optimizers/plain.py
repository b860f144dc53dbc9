"""Converts a sharded optimizer's state to the plain optimizer's own format, and loads it.

The full form equals ``optimizer.state_dict()`` of the unsharded model: parameters are numbered by their position in the
param groups. The plain optimizer of the plain model can load it, and the reverse. (Engines with DTensors do not use
torch's ``get_optimizer_state_dict``: it advances the step count of a fresh AdamW.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.nn as nn
from torch.optim import Optimizer

from mmfsdp.basics.nested import map_values, nested_values
from mmfsdp.basics.optimizer_forms import GROUPS, unflattened, with_names
from mmfsdp.collective.lost_ranks import Waiting
from mmfsdp.collective.steps import any_of, gather_objects, on_all_ranks
from mmfsdp.errors import ShardStateError, StateDictError
from mmfsdp.runtime.refusals.frameworks import guard_optimizer_saves
from mmfsdp.runtime.roles import check_roles
from mmfsdp.runtime.sharded_model import ShardedModel, find_sharded_model
from mmfsdp.state.alike import check_alike, kind_of
from mmfsdp.state.lazy_tensors import LazyTensor, locate, whole_box, whole_value
from mmfsdp.state.model import is_first_rank, whole
from mmfsdp.state.optimizers.compressed import COMPRESSED, compressed_names, plain_value
from mmfsdp.state.optimizers.fitting import REBUILD, fit_state
from mmfsdp.state.optimizers.savable import check_savable, may_belong
from mmfsdp.state.optimizers.settings import check_same_class, check_same_moments, report_changed_settings
from mmfsdp.state.sending import send_optim_state

__all__ = [
    "gathered",
    "load_optim_state_dict",
    "optim_state_dict",
    "optim_state_to_load",
    "prepare_optim_load",
    "sharded_by_name",
]


def optim_state_dict(
    model: nn.Module,
    optimizer: Optimizer,
    kind: Literal["full", "sharded"] = "full",
    *,
    rank0_only: bool = True,
    cpu_offload: bool = True,
    by_name: bool = False,
    param_names: bool = False,
) -> dict[str, Any]:
    """Return the optimizer's state in the format of ``Optimizer.state_dict()``. Collective: every rank.

    Args:
        model: The sharded model.
        optimizer: Built from the model's parameters.
        kind: ``full``: whole tensors, as in the plain optimizer of the unsharded model. ``sharded``: DTensors.
        rank0_only: For ``full``: only the mesh's first rank gets the state, the others get an empty dict.
        cpu_offload: For ``full``: return CPU tensors.
        by_name: Identify parameters by FQN instead of position, in ``state`` and in ``params`` of the groups. torch's
            ``get_optimizer_state_dict`` has this form.
        param_names: Also put the FQNs into the groups, under ``'param_names'``, as torch does for an optimizer built
            from ``named_parameters()``.

    Raises:
        StateDictError: ``kind`` is neither ``'full'`` nor ``'sharded'``.
        StateDictError: On some rank, the optimizer keeps what no checkpoint can bring back, such as an object.
        ShardStateError: On some rank, the optimizer was built before the model was sharded, or for another model.
    """
    if kind not in ("full", "sharded"):
        raise StateDictError(f"kind must be 'full' or 'sharded', got {kind!r}.")
    state = find_sharded_model(model)
    _check_own(state, optimizer)
    with _shared(state, optimizer):
        return _state_dict(state, optimizer, kind, rank0_only, cpu_offload, by_name, param_names)


def _state_dict(
    state: ShardedModel,
    optimizer: Optimizer,
    kind: str,
    rank0_only: bool,
    cpu_offload: bool,
    by_name: bool,
    param_names: bool,
) -> dict[str, Any]:
    compressed = _compressed(state, optimizer)
    states = state.engine.optimizer_states(state, optimizer)
    # Gathering needs them on the device, one at a time; the rest is done with them in CPU memory.
    early = bool(compressed) and (kind == "sharded" or states.is_flat)
    own_form = _without_wrappers(optimizer.state_dict(), cpu_offload=not states.is_flat) if early else None
    sharded = states.by_name(own_form) if by_name else states.by_index(own_form)
    if param_names and not by_name:
        sharded = with_names(sharded, states.names_in_groups())
    if compressed:
        sharded = {**sharded, COMPRESSED: compressed}
    if kind == "sharded":
        return sharded
    return gathered(state, sharded, not rank0_only or is_first_rank(state), cpu_offload)


def sharded_by_name(
    state: ShardedModel, optimizer: Optimizer, own_form: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return an optimizer's state by FQN, each rank's own part as DTensors. Collective: every rank.

    Args:
        state: The model's state.
        optimizer: Built from the model's parameters.
        own_form: What ``optimizer.state_dict()`` returned. Default: its current state.

    Raises:
        ShardStateError: See `optim_state_dict`.
    """
    _check_own(state, optimizer)
    with _shared(state, optimizer):
        return state.engine.optimizer_states(state, optimizer).by_name(own_form)


def gathered(state: ShardedModel, sharded: Mapping[str, Any], keep: bool, cpu_offload: bool) -> dict[str, Any]:
    """Return an optimizer's state with whole tensors. Collective: every rank.

    Args:
        state: The model's state.
        sharded: The state with DTensors, by position or by name. Not changed.
        keep: Whether this rank keeps the tensors; otherwise it gets an empty dict.
        cpu_offload: Return CPU tensors.
    """
    with Waiting("gathering an optimizer's state"):
        values = {
            key: {name: whole(plain_value(value), keep, cpu_offload) for name, value in entries.items()}
            for key, entries in sharded["state"].items()
        }
    return {**sharded, "state": values} if keep else {}


def load_optim_state_dict(
    model: nn.Module, optimizer: Optimizer, state_dict: Mapping[str, Any], *, from_rank0: bool = False
) -> None:
    """Load an optimizer's state; each rank loads its own part. Collective: every rank.

    Args:
        model: The sharded model.
        optimizer: Built from the model's parameters, with as many param groups and parameters as the state has.
        state_dict: The full or sharded state of this optimizer or of the unsharded model's: parameters by position, or
            by name as in torch's ``get_optimizer_state_dict``, flattened or not. Not changed. A parameter that never
            got a gradient may have no state.
        from_rank0: Use only the ``state_dict`` of the mesh's first rank, which is sent tensor by tensor.

    Raises:
        StateDictError: Param groups, parameters or shapes do not fit, another class of optimizer wrote the state,
            or with ``from_rank0`` a tensor is a shard; raised on every rank, and nothing is changed. Nothing in a state
            tells RAdam, or AdamW of torch before 2.8, from Adam.
        ShardStateError: See `optim_state_dict`; raised on every rank.
    """
    state = find_sharded_model(model)
    if from_rank0:
        state_dict = send_optim_state(state_dict, state)
    prepare_optim_load(model, optimizer, state_dict)()


def prepare_optim_load(model: nn.Module, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> Callable[[], None]:
    """Check that an optimizer's state fits, and return a function that loads it. Both are collective: every rank.

    See `load_optim_state_dict`. Nothing is changed until the function is called.
    """
    state = find_sharded_model(model)
    fitting = _fitting(state, optimizer, state_dict)
    if state.plan.mesh.shard > 1:
        guard_optimizer_saves(optimizer)  # it may be saved before its first step

    def load() -> None:
        if state.scope.is_first:
            report_changed_settings(fitting["param_groups"], optimizer)
        state.engine.optimizer_states(state, optimizer).load(fitting)

    return load


def optim_state_to_load(state: ShardedModel, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``optimizer.load_state_dict()`` takes on this rank. Collective: every rank.

    Args:
        state: The model's state.
        optimizer: Built from the model's parameters. Not changed.
        state_dict: See `load_optim_state_dict`.

    Raises:
        StateDictError: Param groups, parameters or shapes do not fit; raised on every rank.
        ShardStateError: See `optim_state_dict`; raised on every rank.
    """
    return state.engine.optimizer_states(state, optimizer).to_load(_fitting(state, optimizer, state_dict))


def _fitting(state: ShardedModel, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state by position that is known to fit; ranks know where to read what is stored. Collective."""
    # On each rank, as the files of ranks may differ; and before any call of torch that waits for all ranks.
    on_all_ranks(lambda: _check_form(state_dict), state.scope)
    _check_own(state, optimizer)
    states = state.engine.optimizer_states(state, optimizer)
    groups = states.names_in_groups()
    shapes = {param.fqn: param.shape for param in state.plan.all_params()}

    def check() -> dict[str, Any]:
        settings = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
        found = fit_state(state_dict, groups, settings)
        check_same_class(unflattened(state_dict)[GROUPS], optimizer)
        _check(found, groups, shapes)
        return found

    fitting = on_all_ranks(check, state.scope)
    kinds = {
        f"{index}.{name}": kind_of(value, tells_shards=states.is_flat)
        for index, entries in fitting["state"].items()
        for name, value in entries.items()
    }
    check_alike(kinds, "the optimizer's state", state.scope)
    check_same_moments(fitting["state"].values(), optimizer)  # by now the same on all ranks
    settings = [leaf for _, leaf in nested_values("", fitting["param_groups"]) if isinstance(leaf, LazyTensor)]
    locate([*states.boxes(fitting), *((value, whole_box(value)) for value in settings)], state.scope)

    def read_settings() -> Any:  # a learning rate may be a tensor
        return map_values(whole_value, fitting["param_groups"])

    return {**fitting, "param_groups": on_all_ranks(read_settings, state.scope)}


def _shared(state: ShardedModel, optimizer: Optimizer) -> AbstractContextManager[None]:
    """Let an optimizer whose ranks keep different states return all of them. Collective: every rank."""
    share = getattr(optimizer, "share_state", None)  # of a MatrixOptimizer
    found: AbstractContextManager[None] = nullcontext() if share is None else share(state.scope)
    return found


def _compressed(state: ShardedModel, optimizer: Optimizer) -> dict[str, str]:
    """Check that a state can be saved; return what ranks hold compressed, by name. Collective: every rank."""
    names = {id(param): fqn for fqn, param in state.module.named_parameters()}
    scope = state.scope

    def check() -> dict[str, str]:
        check_savable(optimizer, names)
        return compressed_names(optimizer.state)

    mine = on_all_ranks(check, scope)
    if not any_of(scope, bool(mine)):  # small parts are not compressed
        return {}
    return {name: kind for found in gather_objects(scope, mine) for name, kind in found.items()}


def _without_wrappers(state_dict: Mapping[str, Any], *, cpu_offload: bool) -> dict[str, Any]:
    values = {
        key: {name: plain_value(value, cpu_offload=cpu_offload) for name, value in entries.items()}
        for key, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": values}


def _params(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _check_own(state: ShardedModel, optimizer: Optimizer) -> None:
    """Check on every rank that an optimizer's parameters are the sharded model's. Collective: every rank."""

    def check() -> None:
        name = type(optimizer).__name__
        check_roles(state.roles(_params(optimizer)), name)
        own = {id(param) for param in state.module.parameters()}
        if strange := [tuple(param.shape) for param in _params(optimizer) if id(param) not in own]:
            raise ShardStateError(
                f"{name} holds parameters that {type(state.module).__name__} does not have, of the shapes "
                f"{strange[:3]}. Give the optimizer that was built from this model's parameters()."
            )

    on_all_ranks(check, state.scope)


def _check_form(state_dict: Any) -> None:
    if not isinstance(state_dict, Mapping):
        raise StateDictError(f"An optimizer's state must be a mapping, got a {type(state_dict).__name__}.")


def _check(state_dict: Mapping[str, Any], groups: list[list[str]], shapes: Mapping[str, tuple[int, ...]]) -> None:
    mine, theirs = [len(group) for group in groups], [len(group["params"]) for group in state_dict["param_groups"]]
    if mine != theirs:
        raise StateDictError(f"The optimizer has param groups of {mine} parameters, the state has {theirs}. {REBUILD}")
    names = [name for group in groups for name in group]
    order = [index for group in state_dict["param_groups"] for index in group["params"]]
    name_of = dict(zip(order, names, strict=True))
    for index, entries in state_dict["state"].items():
        if index not in name_of:
            raise StateDictError(
                f"The state is for parameter {index!r}, but the optimizer has {len(names)} parameters. {REBUILD}"
            )
        shape = shapes[name_of[index]]
        for name, value in entries.items():
            if isinstance(value, (torch.Tensor, LazyTensor)) and not may_belong(value.shape, shape):
                raise StateDictError(
                    f"State {name!r} has shape {tuple(value.shape)}, but its parameter has shape {shape}.",
                    fqn=name_of[index],
                )
