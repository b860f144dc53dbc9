"""The private parts of torch's FSDP2 that this library uses; no other module accesses them.

torch has one parameter group per unit. A group registers either its shards or their gathered copies in the modules, and
reduces its gradients in backward. The names are those of torch 2.9 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mmfsdp.basics.torch_releases import has_whole_gradient, param_groups_of, put_zero_gradients

__all__ = [
    "around",
    "begin_backward",
    "begin_root",
    "computed_with",
    "free",
    "gather",
    "gathered_params",
    "gathered_values",
    "gradients_of",
    "groups_of",
    "has_gradient",
    "keep_state_dicts_pure",
    "modules_of",
    "name_of",
    "shard_versions",
    "shards_of",
    "stand_in_for_missing",
    "will_gather",
]

Group = Any
"""torch's ``FSDPParamGroup``; modules that are sharded together share one."""


def groups_of(modules: Iterable[nn.Module]) -> list[Group]:
    """Return the parameter groups of sharded modules, each once."""
    found: dict[int, Group] = {}
    for module in modules:
        if isinstance(module, FSDPModule):
            found |= {id(group): group for group in param_groups_of(module)}
    return list(found.values())


def begin_root(root: FSDPModule) -> None:
    """Make torch take ``root`` as the root; by itself it takes the first module that runs."""
    with torch.inference_mode(False):  # torch 2.9 makes the shards' local tensors anew
        root._get_fsdp_state()._lazy_init()


def begin_backward(module: FSDPModule, grad: torch.Tensor) -> None:
    """Gather a unit for its backward, as torch's hook on the unit's outputs does."""
    module._get_fsdp_state()._pre_backward(grad)


def shards_of(group: Group) -> Iterator[nn.Parameter]:
    """Yield the sharded parameters of a group, also while gathered copies are registered."""
    for param in group.fsdp_params:
        yield param.sharded_param


def modules_of(group: Group) -> Iterator[nn.Module]:
    """Yield the modules that hold a group's parameters, some repeatedly."""
    for param in group.fsdp_params:
        yield param._module_info.module
        yield from param._module_info.shared_modules


def free(group: Group) -> bool:
    """Free a group's gathered parameters, also within a forward that uses them, and return whether there were any."""
    group.wait_for_unshard()  # a gathering under way has read the shards already
    was_gathered = not group.is_sharded
    group._to_sharded()
    return was_gathered


def gather(group: Group) -> None:
    """Gather a group's parameters after its shards were written. Collective: every rank of the group."""
    state = group._training_state
    # In a forward torch would gather on streams that do not wait for what was written.
    group._training_state = type(state).IDLE
    try:
        group.unshard()
        group.wait_for_unshard()
    finally:
        group._training_state = state


def gathered_params(groups: Iterable[Group]) -> dict[int, tuple[nn.Parameter, nn.Parameter]]:
    """Return the gathered parameters that are registered in place of shards: by ``id``, the parameter and its shard."""
    found = {}
    for group in groups:
        if group.is_sharded:
            continue
        for param in group.fsdp_params:
            registered = param._module_info.module._parameters[param._module_info.param_name]
            if registered is not param.sharded_param:
                found[id(registered)] = (registered, param.sharded_param)
    return found


def gathered_values(group: Group) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield FQN and gathered copy of each parameter of a gathered group, without those of other tensor types."""
    for param in group.fsdp_params:
        value = param.unsharded_param
        if type(value.data) is torch.Tensor or isinstance(value, DTensor):
            yield param._param_fqn or param._module_info.param_name, value


def computed_with(group: Group, param: torch.Tensor) -> bool:
    """Return whether ``param`` is a gathered copy of one of the group's shards, current or earlier."""
    smaller = group.post_forward_mesh_info
    if smaller is not None and smaller is not group.mesh_info and getattr(param, "device_mesh", None) is smaller.mesh:
        return True  # made by a reshard to fewer ranks after forward, anew each time
    return any(getattr(entry, "_unsharded_param", None) is param for entry in group.fsdp_params)


def shard_versions(groups: Iterable[Group]) -> int:
    """Return a number that grows with each write to shards of gathered groups, except through ``.data``."""
    total = 0
    for group in groups:
        if not group.is_sharded:
            for param in group.fsdp_params:
                shard = param.sharded_param
                total += shard._version + shard._local_tensor._version
    return total


def keep_state_dicts_pure(group: Group) -> None:
    """Make ``state_dict()`` return shards without freeing gathered parameters.

    torch frees them in a hook. A rank that alone calls ``state_dict()`` would then gather once more than the others.
    """
    register = group._register_state_dict_hooks

    def without_freeing() -> None:
        register()
        for handle in group._module_to_pre_save_state_dict_hook_handle.values():
            handle.remove()

    group._register_state_dict_hooks = without_freeing
    places: dict[nn.Module, list[tuple[str, Any]]] = {}
    for param in group.fsdp_params:
        info = param._module_info
        for module, name in [
            (info.module, info.param_name),
            *zip(info.shared_modules, info.shared_param_names, strict=True),
        ]:
            places.setdefault(module, []).append((name, param))

    def show_shards(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        if group.is_sharded:
            return
        for name, param in places[module]:
            if (shown := state_dict.get(prefix + name)) is not None:
                is_param = shown is module._parameters[name]  # keep_vars=True
                state_dict[prefix + name] = param.sharded_param if is_param else param.sharded_param.detach()

    for module in places:
        module.register_state_dict_post_hook(show_shards)


def around(group: Group, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method of a group (``unshard``, ``pre_backward``, ``post_backward``, ...) by ``wrap(method)``."""
    setattr(group, name, wrap(getattr(group, name)))


def name_of(group: Group) -> str:
    """Return the FQN of a group's module, or the FQNs of several modules joined by commas."""
    return group._module_fqn or "(root)"


def will_gather(group: Group) -> bool:
    """Return whether the next ``unshard`` communicates."""
    return not group.is_unsharded and group._all_gather_result is None and group._all_gather_process_group.size() > 1


def has_gradient(group: Group) -> bool:
    """Return whether a parameter has a gradient that is still to be reduced."""
    return any(has_whole_gradient(param) for param in group.fsdp_params)


def gradients_of(group: Group) -> Iterator[torch.Tensor]:
    """Yield the gradients of a group's parameters: those of gathered parameters, and shards that are reduced."""
    for param in group.fsdp_params:
        if hasattr(param, "_unsharded_param"):
            for grad in (param.unsharded_param.grad, getattr(param, "unsharded_accumulated_grad", None)):
                if grad is not None:
                    yield grad
        if param.sharded_param.grad is not None:
            yield param.sharded_param.grad


def stand_in_for_missing(group: Group) -> list[int]:
    """Give zero gradients to trained parameters that have none on this rank, right before gradients are reduced.

    torch reduces the gradients that this rank has: if ranks differ, it adds up gradients of different parameters. Its
    own ``set_reduce_scatter_unused_params`` (2.13) also fills in zeros, but does not report for which parameters, and
    until 2.15 it fails if the other gradients were accumulated in another dtype.

    Returns:
        The indices of these parameters in the group.
    """
    params = group.fsdp_params
    missing = [
        place
        for place, param in enumerate(params)
        if not has_whole_gradient(param) and param.unsharded_param.requires_grad
    ]
    put_zero_gradients(params, missing)
    return missing
