"""What differs for mmfsdp between the releases of torch that it supports; no other module depends on the release.

Each constant is the first release, (major, minor), that behaves as its description says. Once `MINIMUM_TORCH` has
reached it, the constant goes, with the code for older releases; a test says so. Functions act alike on all releases.
They take objects of torch's FSDP2, of which ``FSDPState`` and ``FSDPParamGroup`` are private.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmfsdp.basics.torch_version import installed_release

if TYPE_CHECKING:
    import torch
    from torch.distributed.fsdp import FSDPModule

__all__ = [
    "ACCUMULATES_IN_GRAD",
    "COUNTS_EVERY_GROUP",
    "FREES_RECEIVED_FIRST",
    "HAS_SEVERAL_GROUPS",
    "RESETS_ITERATIONS",
    "RUNS_UNITS_IN_PARTS",
    "STARTS_ADAGRAD_IN_STEP",
    "counted_groups",
    "counts_every_group",
    "discard_iteration",
    "enter_again",
    "frees_received_first",
    "has_whole_gradient",
    "mend_unit",
    "param_groups_of",
    "put_zero_gradients",
    "start_adagrad",
]

STARTS_ADAGRAD_IN_STEP = (2, 12)
"""Adagrad makes its state in the first step, as other optimizers do; its constructor does so on 2.9."""

HAS_SEVERAL_GROUPS = (2, 12)
"""A module that was sharded can have several parameter groups."""

RESETS_ITERATIONS = (2, 13)
"""``FSDPModule.reset_iter_state()`` makes training possible after a forward that raised."""

RUNS_UNITS_IN_PARTS = (2, 13)
"""A unit works if only some of its modules run, and if backward recomputes it, it is gathered and casts its inputs."""

COUNTS_EVERY_GROUP = (2, 14)
"""The name of a process group contains how many groups its process has made, also if the whole world makes it."""

ACCUMULATES_IN_GRAD = (2, 15)
"""Gradients that are not reduced yet stay in ``.grad`` of whole parameters, and a reset discards them."""

FREES_RECEIVED_FIRST = (2, 15)
"""In forward, what was received for one unit is freed before the next unit is copied from what it received."""


def counts_every_group() -> bool:
    """Return whether `COUNTS_EVERY_GROUP` holds for the installed release."""
    return installed_release() >= COUNTS_EVERY_GROUP


def counted_groups() -> int:
    """Return the number that torch puts into the name of the next process group that only its own ranks make.

    Until 2.13 that is the number of groups that the process is in.
    """
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world
    return world.group_count if counts_every_group() else len(world.pg_names)


def param_groups_of(module: FSDPModule) -> list[Any]:
    """Return the parameter groups of a sharded module; modules that are sharded together share theirs."""
    state = module._get_fsdp_state()
    if installed_release() >= HAS_SEVERAL_GROUPS:
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def discard_iteration(root: FSDPModule) -> None:
    """Forget a forward that raised, so that the next one begins anew. Gradients of earlier backwards stay.

    Otherwise a unit of several modules waits for those that did not run, and units train with what was gathered ahead,
    which may be old by then.
    """
    state = root._get_fsdp_state()
    if state._is_root is None:  # nothing has run yet
        return
    if installed_release() < RESETS_ITERATIONS:
        _reset(state)
        return
    kept = []
    if installed_release() >= ACCUMULATES_IN_GRAD:
        groups = [group for each in state._state_ctx.all_states for group in each._fsdp_param_groups]
        params = [param for group in groups for param in group.fsdp_params]
        kept = [param.sharded_param for param in params]
        kept += [param._unsharded_param for param in params if hasattr(param, "_unsharded_param")]
    gradients = [(param, param.grad) for param in kept]
    root.reset_iter_state()
    for param, gradient in gradients:
        param.grad = gradient


def enter_again(module: Any) -> None:
    """Let a unit that has run backward be run anew in the same backward, as any forward that is followed by backward.

    Checkpoints with ``use_reentrant=True`` run it so if forward uses the unit several times. torch, 2.15 too, takes
    this for a recomputation whose backward is still to come, and then loses the gradients in silence.
    """
    state = module._get_fsdp_state()
    if state._training_state.name != "PRE_BACKWARD":
        return
    if {group._training_state.name for group in param_groups_of(module)} == {"POST_BACKWARD"}:
        state._training_state = type(state._training_state).IDLE


def _reset(state: Any) -> None:
    idle = type(state._training_state).IDLE
    stream = state._device_handle.current_stream()
    if (received := state._comm_ctx.all_gather_state) is not None:
        if received.event is not None:
            stream.wait_event(received.event)
        state._comm_ctx.all_gather_state = None
    for each in state._state_ctx.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = idle
        module = each._modules[0]
        for group in param_groups_of(module):
            if (ahead := group._all_gather_result) is not None:
                if ahead.all_gather_event is not None:
                    stream.wait_event(ahead.all_gather_event)
                if ahead.all_gather_work is not None:
                    ahead.all_gather_work.wait()
                group._all_gather_result = None
            group.finalize_backward()
            group._training_state = idle
            group._to_sharded()
    state._comm_ctx.post_forward_order.clear()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def has_whole_gradient(param: Any) -> bool:
    """Return whether a parameter (an ``FSDPParam``) has a gradient that is not reduced yet."""
    if not hasattr(param, "_unsharded_param"):
        return False
    kept_apart = installed_release() < ACCUMULATES_IN_GRAD and param.unsharded_accumulated_grad is not None
    return kept_apart or param.unsharded_param.grad is not None


def put_zero_gradients(params: list[Any], missing: list[int]) -> None:
    """Give zero gradients to parameters of a group that have none, in the dtype that the group's others have.

    Args:
        params: The ``FSDPParam`` objects of the group.
        missing: Indices of those without a gradient.
    """
    import torch

    kept_apart = installed_release() < ACCUMULATES_IN_GRAD and any(
        param.unsharded_accumulated_grad is not None for param in params
    )
    if kept_apart:  # in their reduce dtype: convert all to that dtype
        for param in params:
            if param.unsharded_accumulated_grad is None:
                param.to_accumulated_grad_if_needed()
    for place in missing:
        unsharded = params[place].unsharded_param
        if kept_apart:
            zeros = torch.zeros_like(unsharded, dtype=params[place].reduce_dtype)
            params[place].unsharded_accumulated_grad = zeros
        else:
            unsharded.grad = torch.zeros_like(unsharded, dtype=getattr(unsharded, "grad_dtype", None))


def frees_received_first() -> bool:
    """Return whether `FREES_RECEIVED_FIRST` holds for the installed release; plans of memory depend on it."""
    return installed_release() >= FREES_RECEIVED_FIRST


def start_adagrad(optimizer: torch.optim.Optimizer) -> None:
    """Make the state of an Adagrad that has none, as its constructor does before `STARTS_ADAGRAD_IN_STEP`."""
    import torch

    starts_itself = installed_release() >= STARTS_ADAGRAD_IN_STEP or not isinstance(optimizer, torch.optim.Adagrad)
    if starts_itself or optimizer.state:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            total = torch.full_like(param, optimizer.defaults["initial_accumulator_value"])
            optimizer.state[param] = {"step": torch.tensor(0.0), "sum": total}


def mend_unit(modules: list[Any]) -> None:
    """Make a unit's hooks do what they do since `RUNS_UNITS_IN_PARTS`.

    Args:
        modules: The modules that ``fully_shard`` has just sharded together.
    """
    if installed_release() < RUNS_UNITS_IN_PARTS:
        _UnitHooks(modules)


class _UnitHooks:
    """Replaces the hooks around the forward of a unit's modules."""

    def __init__(self, modules: list[Any]) -> None:
        import torch

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
        for group in param_groups_of(module):
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
    import torch
    from torch.utils._pytree import tree_map

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return values if dtype is None else tree_map(cast, values)
