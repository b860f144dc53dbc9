"""Refuses hooks on the gradients of parameters that sharding would never call."""

from __future__ import annotations

import torch.nn as nn

from mmfsdp.basics.text import clean_fqn, name_list
from mmfsdp.errors import ShardStateError
from mmfsdp.planning.schema import ShardPlan

__all__ = ["check_gradient_hooks"]


def check_gradient_hooks(model: nn.Module, plan: ShardPlan, *, calls_some: bool) -> None:
    """Check that hooks on parameters, such as one that masks a gradient, will be called. Not collective.

    ``fully_shard`` and FSDP1 compute with gathered copies, whose gradients autograd hands to nobody else. Only what
    ``register_post_accumulate_grad_hook()`` registers with a shard of ``fully_shard`` is called, after the reduction.

    Args:
        model: The model, before or after it was sharded.
        plan: Its plan.
        calls_some: Whether its parameters are shards of ``fully_shard`` already.

    Raises:
        ShardStateError: A parameter of a shard unit has hooks that are never called.
    """
    in_units = {param.fqn for unit in plan.units for param in unit.params}
    # torch has no public way to ask for hooks; both attributes are older than FSDP2.
    kinds = ("_backward_hooks",) if calls_some else ("_backward_hooks", "_post_accumulate_grad_hooks")
    hooked = [
        name
        for name, param in model.named_parameters()
        if clean_fqn(name) in in_units and any(getattr(param, kind, None) for kind in kinds)
    ]
    if hooked:
        raise ShardStateError(
            f"{name_list(hooked)} {'has' if len(hooked) == 1 else 'have'} gradient hooks that sharding would never "
            "call: it computes with gathered copies. With engine 'fsdp2', register them after shard(), with "
            "register_post_accumulate_grad_hook() of the sharded model's parameters, whose .grad is then the reduced "
            "gradient of a shard; or list the modules in sharding.ignored_modules, which keeps them whole."
        )
