"""Converts a sharded optimizer's state to the plain optimizer's own format, and loads it.

The full form equals ``optimizer.state_dict()`` of the unsharded model: parameters are numbered by their position in the
param groups. The plain optimizer of the plain model can load it, and the reverse. (Engines with DTensors do not use
torch's ``get_optimizer_state_dict``: it advances the step count of a fresh AdamW.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mmfsdp.collective.scopes import scope_of
from mmfsdp.collective.steps import broadcast_object, on_all_ranks
from mmfsdp.errors import StateDictError
from mmfsdp.runtime.dtensors import box_of
from mmfsdp.runtime.sharded_model import ShardedModel, find_sharded_model
from mmfsdp.state import named_optimizer
from mmfsdp.state.flat_optimizer import groups_by_name, load_flat_state, state_by_name, state_by_place
from mmfsdp.state.lazy_tensors import LazyTensor, check_unchanged, local_value, locate, whole_box, whole_value
from mmfsdp.state.model import is_first_rank, send_from_first, whole

__all__ = ["load_optim_state_dict", "optim_state_dict", "prepare_optim_load"]

_REBUILD = "Build the optimizer as it was built when the state was saved."


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
    """
    if kind not in ("full", "sharded"):
        raise StateDictError(f"kind must be 'full' or 'sharded', got {kind!r}.")
    state = find_sharded_model(model)
    keep = not rank0_only or is_first_rank(state)
    if state.is_fsdp1:
        sharded = state_by_name(state, optimizer) if by_name else state_by_place(state, optimizer)
    else:
        sharded = optimizer.state_dict()
        if by_name:
            sharded = named_optimizer.by_name(sharded, _names_in_groups(state, optimizer))
    if param_names and not by_name:
        sharded = named_optimizer.with_names(sharded, _groups_of(state, optimizer))
    if kind == "sharded":
        return sharded
    values = {
        place: {name: whole(value, keep, cpu_offload) for name, value in entries.items()}
        for place, entries in sharded["state"].items()
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
        StateDictError: Param groups, parameters or shapes do not fit; raised on every rank, and nothing is changed.
    """
    state = find_sharded_model(model)
    if from_rank0:
        state_dict = _send(state_dict, state)
    prepare_optim_load(model, optimizer, state_dict)()


def prepare_optim_load(model: nn.Module, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> Callable[[], None]:
    """Check that an optimizer's state fits, and return a function that loads it. Both are collective: every rank.

    See `load_optim_state_dict`. Nothing is changed until the function is called.
    """
    state = find_sharded_model(model)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    # On each rank, as the files of ranks may differ; and before any call of torch that waits for all ranks.
    on_all_ranks(lambda: _check_form(state_dict), scope_of(state.mesh))
    groups = _groups_of(state, optimizer)
    shapes = {param.fqn: param.shape for param in state.plan.all_params()}

    def check() -> dict[str, Any]:
        settings = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
        found = named_optimizer.by_place(state_dict, groups, settings)
        _check(found, groups, shapes)
        return found

    fitting = on_all_ranks(check, scope_of(state.mesh))
    if state.is_fsdp1:
        stored = [value for entries in fitting["state"].values() for value in entries.values()]
        locate([(value, whole_box(value)) for value in stored if isinstance(value, LazyTensor)], scope_of(state.mesh))
        return lambda: load_flat_state(state, optimizer, fitting)
    at = dict(zip((place for group in fitting["param_groups"] for place in group["params"]), params, strict=True))

    locate(
        [
            (value, box_of(at[place]) if value.shape == at[place].shape else whole_box(value))
            for place, entries in fitting["state"].items()
            for value in entries.values()
            if isinstance(value, LazyTensor)
        ],
        scope_of(state.mesh),
    )

    def load() -> None:
        def place_all() -> dict[Any, dict[str, Any]]:
            placed = {
                place: {name: _placed(value, at[place]) for name, value in entries.items()}
                for place, entries in fitting["state"].items()
            }
            check_unchanged(value for entries in fitting["state"].values() for value in entries.values())
            return placed

        placed = on_all_ranks(place_all, scope_of(state.mesh))
        optimizer.load_state_dict({**fitting, "state": placed})

    return load


def _groups_of(state: ShardedModel, optimizer: Optimizer) -> list[list[str]]:
    return groups_by_name(state, optimizer) if state.is_fsdp1 else _names_in_groups(state, optimizer)


def _names_in_groups(state: ShardedModel, optimizer: Optimizer) -> list[list[str]]:
    names = {id(param): fqn for fqn, param in state.module.named_parameters()}
    return [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]


def _check_form(state_dict: Any) -> None:
    if not isinstance(state_dict, Mapping):
        raise StateDictError(f"An optimizer's state must be a mapping, got a {type(state_dict).__name__}.")


def _placed(value: Any, param: torch.Tensor) -> Any:
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


def _check(state_dict: Mapping[str, Any], groups: list[list[str]], shapes: Mapping[str, tuple[int, ...]]) -> None:
    mine, theirs = [len(group) for group in groups], [len(group["params"]) for group in state_dict["param_groups"]]
    if mine != theirs:
        raise StateDictError(f"The optimizer has param groups of {mine} parameters, the state has {theirs}. {_REBUILD}")
    names = [name for group in groups for name in group]
    order = [place for group in state_dict["param_groups"] for place in group["params"]]
    places = dict(zip(order, names, strict=True))
    for place, entries in state_dict["state"].items():
        if place not in places:
            raise StateDictError(
                f"The state is for parameter {place!r}, but the optimizer has {len(names)} parameters. {_REBUILD}"
            )
        shape = shapes[places[place]]
        for name, value in entries.items():
            if not isinstance(value, (torch.Tensor, LazyTensor)) or tuple(value.shape) == shape:
                continue
            if value.numel() != 1 and value.dim() == len(shape):
                raise StateDictError(
                    f"State {name!r} has shape {tuple(value.shape)}, but its parameter has shape {shape}.",
                    fqn=places[place],
                )


def _send(state_dict: Mapping[str, Any], state: ShardedModel) -> dict[str, Any]:
    """Return the first rank's state on every rank; the structure is sent first, then tensor by tensor."""
    first = is_first_rank(state)
    skeleton: Any = None
    if first:
        skeleton = {**state_dict, "state": {}}
        for place, entries in state_dict["state"].items():
            skeleton["state"][place] = {
                name: _Sent(tuple(value.shape), str(value.dtype).removeprefix("torch."))
                if isinstance(value, torch.Tensor)
                else value
                for name, value in entries.items()
            }
    skeleton = broadcast_object(scope_of(state.mesh), skeleton)
    device = next(iter(state.module.parameters())).device if state.mesh.device_type != "cpu" else torch.device("cpu")
    received: dict[Any, dict[str, Any]] = {}
    for place, entries in skeleton["state"].items():
        received[place] = {}
        for name, value in entries.items():
            if isinstance(value, _Sent):
                tensor = (
                    state_dict["state"][place][name].to(device).contiguous()
                    if first
                    else torch.empty(value.shape, dtype=getattr(torch, value.dtype), device=device)
                )
                send_from_first(tensor, state)
                received[place][name] = tensor
            else:
                received[place][name] = value
    return {**skeleton, "state": received}


class _Sent:
    """Stands for a tensor that is sent later."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.shape, self.dtype = shape, dtype
