"""Makes the hooks around a unit's forward work on torch 2.9 to 2.12 as on later releases."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from mmfsdp.basics.torch_releases import RUNS_UNITS_IN_PARTS, torch_has
from mmfsdp.runtime.torch_fsdp2.param_groups import groups_in_module

__all__ = ["mend_unit"]


def mend_unit(modules: list[Any]) -> None:
    """Make a unit's hooks work as they do since `RUNS_UNITS_IN_PARTS`.

    Args:
        modules: The modules that ``fully_shard`` has just sharded together.
    """
    if not torch_has(RUNS_UNITS_IN_PARTS):
        _UnitHooks(modules)


class _UnitHooks:
    """Replaces the hooks around the forward of a unit's modules."""

    def __init__(self, modules: list[Any]) -> None:
        self.state: Any = modules[0]._get_fsdp_state()
        self.modules = frozenset(modules)
        self.waiting: set[Any] = self.state._modules_to_run_forward
        self.torch_before, self.torch_after = self.state._pre_forward, self.state._post_forward
        self.state._pre_forward, self.state._post_forward = self.before, self.after  # for other methods than forward
        before, after = torch.compiler.disable(self.enter), torch.compiler.disable(self.leave)
        handles = [self.state._pre_forward_hook_handle, self.state._post_forward_hook_handle]
        if len(modules) > 1:
            handles = handles[0].handles  # those before all modules, then those after them
        for place, handle in enumerate(handles):
            handle.hooks_dict_ref()[handle.id] = before if place < len(modules) else after

    def enter(self, module: Any, args: Any, kwargs: Any) -> Any:
        if len(self.modules) > 1 and not self.waiting:
            self.waiting |= self.modules
        return self.before(module, args, kwargs)

    def leave(self, module: Any, args: Any, output: Any) -> Any:
        if len(self.modules) > 1:
            if module not in self.waiting:  # it ran before
                return self.cast_output(output)
            self.waiting.discard(module)
            if self.waiting:
                return self.cast_output(output)
        return self.after(module, args, output)

    def before(self, module: Any, args: Any, kwargs: Any) -> Any:
        if not self.is_in("PRE_BACKWARD", "FORWARD"):
            return self.torch_before(module, args, kwargs)
        # Backward recomputes the unit, or another of its modules ran before this one.
        for group in groups_in_module(module):
            group.unshard()
            group.wait_for_unshard()
        policy = self.state._mp_policy
        return _cast((args, kwargs), policy.param_dtype if policy.cast_forward_inputs else None)

    def after(self, module: Any, args: Any, output: Any) -> Any:
        if self.is_in("PRE_BACKWARD"):
            return self.cast_output(output)
        context = self.state._state_ctx
        is_root = context.iter_forward_root is self.state
        output = self.torch_after(module, args, output)
        for state in reversed(context.all_states) if is_root else ():
            if state is not self.state and state._modules_to_run_forward:  # the model is done without some modules
                state._modules_to_run_forward.clear()
                output = state._post_forward(state._modules[0], None, output)
        return output

    def is_in(self, *phases: str) -> bool:
        return self.state._training_state.name in phases

    def cast_output(self, output: Any) -> Any:
        return _cast(output, self.state._mp_policy.output_dtype)


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    """Cast the floating-point tensors in any structure, unless ``dtype`` is None."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return values if dtype is None else tree_map(cast, values)
