"""Makes ``state_dict()`` return shards without freeing gathered copies."""

from __future__ import annotations

from typing import Any

import torch.nn as nn

from mmfsdp.runtime.torch_fsdp2.param_groups import Group, places_of

__all__ = ["keep_state_dicts_pure"]


def keep_state_dicts_pure(group: Group) -> None:
    """Make ``state_dict()`` return shards without freeing gathered parameters.

    torch frees them in a hook. A rank that alone calls ``state_dict()`` would then gather once more than the others.
    """
    register = group._register_state_dict_hooks

    def register_without_freeing() -> None:
        register()
        for handle in group._module_to_pre_save_state_dict_hook_handle.values():
            handle.remove()

    group._register_state_dict_hooks = register_without_freeing
    held: dict[nn.Module, list[tuple[str, Any]]] = {}
    for param in group.fsdp_params:
        for module, name in places_of(param):
            held.setdefault(module, []).append((name, param))

    def show_shards(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        if group.is_sharded:
            return
        for name, param in held[module]:
            if (shown := state_dict.get(prefix + name)) is not None:
                is_param = shown is module._parameters[name]  # keep_vars=True
                state_dict[prefix + name] = param.sharded_param if is_param else param.sharded_param.detach()

    for module in held:
        module.register_state_dict_post_hook(show_shards)
