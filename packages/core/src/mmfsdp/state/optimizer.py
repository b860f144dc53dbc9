"""A sharded optimizer's state in the plain optimizer's own format, and back.

The full form is exactly what ``optimizer.state_dict()`` gives for the unsharded model: parameters by their place in
the param groups. So it loads into the plain optimizer of the plain model, and the reverse. (torch's
``get_optimizer_state_dict`` is not used for DTensor engines: it advances the step count of a fresh AdamW.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mmfsdp.collective import gather_objects, scope_of
from mmfsdp.errors import StateDictError
from mmfsdp.runtime import ShardedModel, sharded_model
from mmfsdp.state.model import is_first_rank, send_from_first, whole
from mmfsdp.state.stored import StoredTensor, local_value, whole_value

__all__ = ["load_optim_state_dict", "optim_state_dict"]


def optim_state_dict(
    model: nn.Module,
    optimizer: Optimizer,
    kind: Literal["full", "sharded"] = "full",
    *,
    rank0_only: bool = True,
    cpu_offload: bool = True,
) -> dict[str, Any]:
    """Return the optimizer's state in the format of ``Optimizer.state_dict()``. Collective: every rank.

    Args:
        model: The sharded model.
        optimizer: Built from its parameters.
        kind: ``full``: whole tensors, as the plain optimizer of the unsharded model has them. ``sharded``: DTensors.
        rank0_only: For ``full``: other ranks than the mesh's first get an empty dict.
        cpu_offload: For ``full``: return CPU tensors.

    Raises:
        StateDictError: ``kind`` is neither.
    """
    if kind not in ("full", "sharded"):
        raise StateDictError(f"kind is 'full' or 'sharded', got {kind!r}.")
    state = sharded_model(model)
    keep = not rank0_only or is_first_rank(state)
    sharded = _by_place(state, optimizer) if state.is_fsdp1 else optimizer.state_dict()
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
    """Load an optimizer's state, each rank its own part. Collective: every rank.

    Args:
        model: The sharded model.
        optimizer: Built from its parameters, with as many param groups and parameters as the state has.
        state_dict: The full or the sharded form, of this or of the unsharded model's optimizer. Not changed.
        from_rank0: Only the mesh's first rank's ``state_dict`` counts; it is sent tensor by tensor.

    Raises:
        StateDictError: Param groups, parameters or shapes do not fit; raised on every rank, nothing is changed.
    """
    state = sharded_model(model)
    if from_rank0:
        state_dict = _send(state_dict, state)
    if state.is_fsdp1:
        _load_fsdp1(state, optimizer, state_dict)
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    _check(optimizer, params, state_dict, state)
    placed = {
        place: {name: _placed(value, params[place]) for name, value in entries.items()}
        for place, entries in state_dict["state"].items()
    }
    optimizer.load_state_dict({**state_dict, "state": placed})


def _placed(value: Any, param: torch.Tensor) -> Any:
    """A whole tensor of the parameter's shape becomes a DTensor of its placement; all else stays."""
    if isinstance(value, DTensor) or not isinstance(value, (torch.Tensor, StoredTensor)):
        return value
    if not isinstance(param, DTensor) or value.shape != param.shape:
        return whole_value(value)
    local = local_value(value, param).to(param.to_local().device, copy=True).contiguous()
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def _check(
    optimizer: Optimizer, params: list[torch.Tensor], state_dict: Mapping[str, Any], state: ShardedModel
) -> None:
    missing = [key for key in ("state", "param_groups") if key not in state_dict]
    if missing:
        raise StateDictError(f"An optimizer's state has 'state' and 'param_groups'; {missing[0]!r} is missing.")
    mine = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in state_dict["param_groups"]]
    if mine != theirs:
        raise StateDictError(
            f"The optimizer has param groups of {mine} parameters, the state has {theirs}. "
            "Build the optimizer as it was built when the state was saved."
        )
    names = {id(param): fqn for fqn, param in state.module.named_parameters()}
    for place, entries in state_dict["state"].items():
        for name, value in entries.items():
            if not isinstance(value, (torch.Tensor, StoredTensor)) or value.shape == params[place].shape:
                continue
            if value.numel() != 1 and value.dim() == params[place].dim():
                raise StateDictError(
                    f"State {name!r} has shape {tuple(value.shape)}, its parameter {tuple(params[place].shape)}.",
                    fqn=names.get(id(params[place])),
                )


def _send(state_dict: Mapping[str, Any], state: ShardedModel) -> dict[str, Any]:
    """The first rank's state on every rank; the structure first, then tensor by tensor."""
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
    skeleton = gather_objects(scope_of(state.mesh), skeleton)[0]
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
    """Stands for a tensor that follows."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.shape, self.dtype = shape, dtype


# -- fsdp1: torch names parameters by FQN; the plain format numbers them ------------------------------------


def _by_place(state: ShardedModel, optimizer: Optimizer) -> dict[str, Any]:
    named = get_optimizer_state_dict(state.module, optimizer)
    places: dict[str, int] = {}
    groups = []
    for group in named["param_groups"]:
        fqns = _sorted_like_model(state, group["params"])
        for fqn in fqns:
            places[fqn] = len(places)
        groups.append({**group, "params": [places[fqn] for fqn in fqns]})
    values = {places[fqn]: dict(entries) for fqn, entries in named["state"].items()}
    return {"state": dict(sorted(values.items())), "param_groups": groups}


def _load_fsdp1(state: ShardedModel, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    named = get_optimizer_state_dict(state.module, optimizer)
    mine = [len(group["params"]) for group in named["param_groups"]]
    theirs = [len(group["params"]) for group in state_dict["param_groups"]]
    if mine != theirs:
        raise StateDictError(
            f"The optimizer has param groups of {mine} parameters, the state has {theirs}. "
            "Build the optimizer as it was built when the state was saved."
        )
    fqn_at: dict[int, str] = {}
    groups = []
    for own, group in zip(named["param_groups"], state_dict["param_groups"], strict=True):
        fqns = _sorted_like_model(state, own["params"])
        fqn_at |= dict(zip(group["params"], fqns, strict=True))
        groups.append({**group, "params": fqns})
    values = {
        fqn_at[place]: {name: whole_value(value) for name, value in entries.items()}
        for place, entries in state_dict["state"].items()
    }
    is_full = not any(isinstance(v, DTensor) for entries in values.values() for v in entries.values())
    set_optimizer_state_dict(
        state.module,
        optimizer,
        {"state": values, "param_groups": groups},
        options=StateDictOptions(full_state_dict=is_full),
    )


def _sorted_like_model(state: ShardedModel, fqns: list[str]) -> list[str]:
    place = {param.fqn: param.place for param in state.plan.all_params()}
    return sorted(fqns, key=lambda fqn: place[fqn])
