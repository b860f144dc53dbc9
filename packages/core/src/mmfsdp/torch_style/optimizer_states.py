"""Optimizer states in the forms of torch's class: by name, whole or sharded, and as an optimizer loads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import OptimStateKeyType, StateDictType
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from mmfsdp.basics.optimizer_forms import STATE, by_name
from mmfsdp.collective.lost_ranks import Waiting
from mmfsdp.collective.steps import on_all_ranks
from mmfsdp.errors import StateDictError, UnsupportedCallError
from mmfsdp.runtime.sharded_model import ShardedModel, find_sharded_model
from mmfsdp.state.model import is_first_rank
from mmfsdp.state.optimizers.fitting import fit_state
from mmfsdp.state.optimizers.plain import gathered, optim_state_to_load, sharded_by_name
from mmfsdp.state.sending import send_optim_state
from mmfsdp.torch_style.state_dict_types import get_state_dict_type, on_cpu

__all__ = [
    "flatten_sharded_optim_state_dict",
    "full_optim_state_dict",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "rekey_optim_state_dict",
    "scatter_full_optim_state_dict",
    "shard_full_optim_state_dict",
    "sharded_optim_state_dict",
]

_Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


def optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the optimizer's state by parameter name, in the model's state dict type. Collective: every rank.

    Args:
        model: The wrapped model. `set_state_dict_type` says whether tensors are whole or DTensors, on which ranks, and
            whether they are copied to the CPU.
        optim: Built from the model's parameters.
        optim_state_dict: What ``optim.state_dict()`` returned. Default: its current state.
        group: The model's process group; the model knows it.

    Raises:
        ShardStateError: ``model`` is not a wrapped model.
        StateDictError: ``group`` is not the model's.
    """
    settings = get_state_dict_type(model)
    config = settings.optim_state_dict_config
    state = _checked(model, group)
    sharded = sharded_by_name(state, optim, optim_state_dict)
    if settings.state_dict_type is StateDictType.FULL_STATE_DICT:
        keep = is_first_rank(state) or not getattr(config, "rank0_only", False)
        return gathered(state, sharded, keep, config.offload_to_cpu)
    return _on_cpu(sharded) if config.offload_to_cpu else sharded


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: _Params | None = None,
    rank0_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the optimizer's state by parameter name with whole CPU tensors. Collective: every rank.

    Args:
        model: A sharded model.
        optim: Built from the model's parameters.
        optim_input: Ignored; ``optim`` says it.
        rank0_only: Only the first rank gets the state; the others get an empty dict.
        group: The model's process group; the model knows it.
    """
    state = _checked(model, group)
    keep = not rank0_only or is_first_rank(state)
    return gathered(state, sharded_by_name(state, optim), keep, cpu_offload=True)


def sharded_optim_state_dict(
    model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Return the optimizer's state by parameter name with DTensors on the CPU. Collective: every rank.

    Args:
        model: A sharded model.
        optim: Built from the model's parameters.
        group: The model's process group; the model knows it.
    """
    return _on_cpu(sharded_by_name(_checked(model, group), optim))


def optim_state_dict_to_load(
    model: nn.Module | Mapping[str, Any],
    optim: Optimizer | nn.Module,
    optim_state_dict: Mapping[str, Any] | Optimizer,
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return what ``optim.load_state_dict()`` takes on this rank. Collective: every rank.

    Args:
        model: A sharded model. torch 2.0 had the order ``(optim_state_dict, model, optim)``, which works too.
        optim: Built from the model's parameters. Not changed, except with ``load_directly``.
        optim_state_dict: A state by name or by position, with whole tensors or DTensors. Not changed. If the state
            dict type is full with ``rank0_only``, only the first rank's is used.
        is_named_optimizer: Not supported.
        load_directly: Also load the result.
        group: The model's process group; the model knows it.

    Raises:
        StateDictError: The state does not fit the optimizer, or ``group`` is not the model's.
        UnsupportedCallError: ``is_named_optimizer`` is True, or the arguments are in neither order.
    """
    given = (model, optim, optim_state_dict)
    if isinstance(model, Mapping):
        model, optim, optim_state_dict = optim, optim_state_dict, model  # type: ignore[assignment]
    if not isinstance(model, nn.Module) or not isinstance(optim, Optimizer):
        raise UnsupportedCallError(
            "optim_state_dict_to_load() takes (model, optim, optim_state_dict), or in torch 2.0's order "
            f"(optim_state_dict, model, optim), and got ({', '.join(type(value).__name__ for value in given)})."
        )
    if is_named_optimizer:
        raise UnsupportedCallError(
            "States of optimizers that are keyed by name (is_named_optimizer=True) are not supported. Load them with "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict()."
        )
    state = _checked(model, group)
    config = get_state_dict_type(model).optim_state_dict_config
    result = _to_load(state, optim, optim_state_dict, from_rank0=getattr(config, "rank0_only", False))
    if load_directly:
        on_all_ranks(lambda: optim.load_state_dict(result), state.scope)
    return result


def shard_full_optim_state_dict(
    full_optim_state_dict: Mapping[str, Any],
    model: nn.Module,
    optim_input: _Params | None = None,
    optim: Optimizer | None = None,
) -> dict[str, Any]:
    """Return what ``optim.load_state_dict()`` takes on this rank; every rank has the full state. Collective.

    Args:
        full_optim_state_dict: From `full_optim_state_dict`, or a plain optimizer's. Not changed.
        model: A sharded model.
        optim_input: What the optimizer was built from, if ``optim`` is not given. Default: ``model.parameters()``.
        optim: The optimizer that will load the result.

    Raises:
        StateDictError: The state does not fit the optimizer.
    """
    return _to_load(_checked(model), _optimizer(model, optim, optim_input), full_optim_state_dict)


def scatter_full_optim_state_dict(
    full_optim_state_dict: Mapping[str, Any] | None,
    model: nn.Module,
    optim_input: _Params | None = None,
    optim: Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return what ``optim.load_state_dict()`` takes on this rank; the first rank has the full state. Collective.

    Args:
        full_optim_state_dict: From `full_optim_state_dict`, or a plain optimizer's. Ignored on other ranks.
        model: A sharded model.
        optim_input: See `shard_full_optim_state_dict`.
        optim: The optimizer that will load the result.
        group: The model's process group; the model knows it.

    Raises:
        StateDictError: The state does not fit the optimizer, or ``group`` is not the model's.
    """
    state = _checked(model, group)
    return _to_load(state, _optimizer(model, optim, optim_input), full_optim_state_dict, from_rank0=True)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: Mapping[str, Any], model: nn.Module, optim: Optimizer
) -> dict[str, Any]:
    """Return what ``optim.load_state_dict()`` takes on this rank. Collective: every rank.

    Args:
        sharded_optim_state_dict: From `sharded_optim_state_dict`. Not changed.
        model: A sharded model.
        optim: The optimizer that will load the result.

    Raises:
        StateDictError: The state does not fit the optimizer.
    """
    return _to_load(_checked(model), optim, sharded_optim_state_dict)


def rekey_optim_state_dict(
    optim_state_dict: Mapping[str, Any],
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: _Params | None = None,
    optim: Optimizer | None = None,
) -> dict[str, Any]:
    """Return an optimizer's state with parameters by name or by position. Not collective; tensors are not copied.

    Args:
        optim_state_dict: A state by name or by position. Not changed.
        optim_state_key_type: ``PARAM_NAME`` or ``PARAM_ID``.
        model: A sharded or an unsharded model, whose parameters have the names.
        optim_input: What the optimizer was built from, if ``optim`` is not given. Default: ``model.parameters()``.
        optim: The optimizer whose param groups give the positions.

    Raises:
        StateDictError: The state is for other parameters, or the key type is unknown.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    param_groups = _optimizer(model, optim, optim_input).param_groups
    if unknown := [param for group in param_groups for param in group["params"] if id(param) not in names]:
        raise StateDictError(
            f"The optimizer has {len(unknown)} parameters that are not the model's. Pass the model it was built from."
        )
    groups = [[names[id(param)] for param in group["params"]] for group in param_groups]
    fitting = fit_state(optim_state_dict, groups, [{} for _ in groups])
    if optim_state_key_type == OptimStateKeyType.PARAM_ID:
        return fitting
    if optim_state_key_type == OptimStateKeyType.PARAM_NAME:
        return by_name(fitting, groups)
    raise StateDictError(
        f"optim_state_key_type must be OptimStateKeyType.PARAM_NAME or PARAM_ID, got {optim_state_key_type!r}."
    )


class _Stated(Optimizer):
    """The param groups that an optimizer has that was built from given parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: torch steps an optimizer to create its state, and this one has none."""


def _optimizer(model: nn.Module, optim: Optimizer | None, optim_input: _Params | None) -> Optimizer:
    return optim or _Stated(model.parameters() if optim_input is None else optim_input)


def _checked(model: nn.Module, group: dist.ProcessGroup | None = None) -> ShardedModel:
    """Return the model's state, if ``group`` is one of its groups."""
    state = find_sharded_model(model)
    if group is not None:
        ranks = {*dist.get_process_group_ranks(group)}
        own = [{*map(int, state.mesh.mesh.flatten())}]
        own += [{*dist.get_process_group_ranks(part)} for part in state.mesh.get_all_groups()]
        if ranks not in own:
            raise StateDictError(
                f"The group has the ranks {sorted(ranks)}, but the model is sharded over {sorted(own[0])}. Leave the "
                "group out; the model knows its ranks."
            )
    return state


def _to_load(state: ShardedModel, optim: Optimizer, state_dict: Any, *, from_rank0: bool = False) -> dict[str, Any]:
    own = send_optim_state(state_dict, state) if from_rank0 else _without_sharded_tensors(state_dict, state)
    return optim_state_to_load(state, optim, own)


def _on_cpu(sharded: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **sharded,
        "state": {name: on_cpu(entries) for name, entries in sharded["state"].items()},
    }


def _without_sharded_tensors(state_dict: Any, state: ShardedModel) -> Any:
    """Return an optimizer's state without ShardedTensors. Collective if it has any: every rank.

    torch splits them over all ranks of the world along dimension 0. If the model is sharded in the same way, each rank
    keeps its part; otherwise they are gathered.

    Args:
        state_dict: The state. Not changed.
        state: The model's state.
    """
    if not isinstance(state_dict, Mapping) or not isinstance(state_dict.get(STATE), Mapping):
        return state_dict
    same = state.mesh.ndim == 1 and state.mesh.size() == dist.get_world_size()
    values = {
        name: {key: _converted(value, state, same) for key, value in entries.items()}
        for name, entries in state_dict[STATE].items()
    }
    return {**state_dict, STATE: values}


def _converted(value: Any, state: ShardedModel, same: bool) -> Any:
    if not (isinstance(value, torch.Tensor) and hasattr(value, "local_shards")):
        return value
    shape = value.size()
    shards = value.local_shards()
    if same:
        local = shards[0].tensor if shards else torch.empty(0, *shape[1:], dtype=value.dtype)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, state.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    whole = torch.zeros(shape, dtype=value.dtype, device=shards[0].tensor.device if shards else state.mesh.device_type)
    for shard in shards:
        offsets, sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        whole[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))] = shard.tensor
    with Waiting("gathering the shards of an optimizer's state"):
        dist.all_reduce(whole)
    return whole
