"""What is known of each sharded model while it trains, and the hooks that keep it from training wrongly.

torch accepts, without a word, several uses that leave weights untrained or ranks apart. Closed here:

- a forward before the optimizer is built, or an exception in it, leaves units gathered, and an optimizer built
  then would train copies: ``parameters()`` of a sharded model returns the shards whatever ran before;
- whether a backward reduces gradients is decided by its forward, inside or outside of `no_sync`, as with DDP;
- gradients of parameters held whole are averaged over ranks, which torch leaves to the user.

`mmfsdp.guards` refuses the rest when an optimizer steps.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils.module_tracker import ModuleTracker

from mmfsdp.errors import ShardStateError
from mmfsdp.planning.schema import ShardPlan

__all__ = ["ShardedModel", "clean_fqn", "live_models", "sharded_model"]

_sharded: weakref.WeakKeyDictionary[nn.Module, ShardedModel] = weakref.WeakKeyDictionary()


def sharded_model(model: nn.Module) -> ShardedModel:
    """Return what is known of a sharded model.

    Args:
        model: What `apply_plan` or `shard` returned, or a wrapper around it.

    Raises:
        ShardStateError: ``model`` is not sharded by this library.
    """
    found = _sharded.get(model)
    if found is None:
        raise ShardStateError(
            f"This {type(model).__name__} was not sharded by mmfsdp. Pass the model that mmfsdp.shard() returned "
            "(the root, not a submodule of it)."
        )
    return found


def live_models() -> list[ShardedModel]:
    """Return all sharded models that still exist."""
    return list({id(state): state for state in _sharded.values()}.values())


def clean_fqn(name: str) -> str:
    """Return an FQN as the unsharded model has it, without the steps that FSDP1 adds."""
    return name.replace("_fsdp_wrapped_module.", "")


class ShardedModel:
    """A sharded model's plan and mesh, and whether its gradients are reduced.

    Args:
        module: The sharded root; only a weak reference is kept.
        plan: What was applied.
        mesh: Where.

    Attributes:
        sync_gradients: Whether forwards from now on are followed by gradient reduction; `no_sync` turns it off.
        unreduced: Whether the last backward left its gradients unreduced.
        gathered: Gathered parameters that were registered in place of shards, by ``id``.
    """

    def __init__(self, module: nn.Module, plan: ShardPlan, mesh: DeviceMesh) -> None:
        self.plan = plan
        self.mesh = mesh
        self.sync_gradients = True
        self.unreduced = False
        self.gathered: dict[int, weakref.ref[torch.Tensor]] = {}
        self._module = weakref.ref(module)
        self._units = [weakref.ref(unit) for unit in module.modules() if isinstance(unit, FSDPModule)]
        self._whole = [_parameter(module, param.fqn) for param in plan.ignored_params]
        self._in_forward = 0
        self._tracker = ModuleTracker()
        self._fsdp1_no_sync: Any = None
        _sharded[module] = self
        _install(self, module)

    @property
    def module(self) -> nn.Module:
        """The sharded root."""
        module = self._module()
        if module is None:
            raise ShardStateError("The sharded model no longer exists.")
        return module

    @property
    def is_fsdp1(self) -> bool:
        """Whether the units are FullyShardedDataParallel instances."""
        return self.plan.engine == "fsdp1"

    def alias(self, wrapper: nn.Module) -> None:
        """Let ``wrapper`` stand for the model wherever a sharded model is asked for."""
        _sharded[wrapper] = self

    def reshard(self) -> None:
        """Free whatever is gathered. Not collective; ``fsdp1`` does so itself."""
        for reference in self._units:
            if (unit := reference()) is not None:
                unit.reshard()

    def owns(self, params: Iterable[torch.Tensor]) -> bool:
        """Tell whether any of ``params`` is a parameter of this model, sharded or gathered."""
        mine = {id(param) for param in _registered(self.module)} | self.stale(params)
        return any(id(param) in mine for param in params)

    def stale(self, params: Iterable[torch.Tensor]) -> set[int]:
        """Return the ``id`` of those ``params`` that are gathered copies of this model's shards."""
        return {id(param) for param in params if (ref := self.gathered.get(id(param))) is not None and ref() is param}

    def check_reduced(self, action: str) -> None:
        """Refuse to go on when the last backward ran inside `no_sync`.

        Raises:
            ShardStateError: It did.
        """
        if self.unreduced:
            raise ShardStateError(
                f"{action}, but the last forward ran inside no_sync(): its gradients were not reduced over ranks, and "
                "there is nothing to act on. Run the last micro-batch of an accumulation outside of no_sync()."
            )

    def before_forward(self) -> None:
        """Called as the root's forward begins."""
        self._in_forward += 1
        if torch.is_grad_enabled():
            self._set_sync(self.sync_gradients)
            self.unreduced = not self.sync_gradients

    def after_forward(self, error: BaseException | None) -> None:
        """Called as the root's forward ends, with the exception if it failed."""
        self._in_forward = max(self._in_forward - 1, 0)
        if error is not None:
            self._recover(error)
        elif not torch.is_grad_enabled():
            self.reshard()  # no backward will do it
        elif not self.is_fsdp1 and not self.gathered:
            whole = {id(param) for param in self._whole}
            self.gathered = {
                id(param): weakref.ref(param)
                for param in _registered(self.module)
                if not isinstance(param, DTensor) and id(param) not in whole
            }

    def _recover(self, error: BaseException) -> None:
        from mmfsdp.diagnostics import explain_forward_error

        self._in_forward = 0
        if self.is_fsdp1:
            return
        explain_forward_error(error, self)
        reset = getattr(self.module, "reset_iter_state", None)  # torch >= 2.13
        if reset is not None:
            reset()
        self.reshard()

    def _set_sync(self, sync: bool) -> None:
        module = self.module
        if not self.is_fsdp1:
            module.set_requires_gradient_sync(sync)  # type: ignore[operator]
        elif sync and self._fsdp1_no_sync is not None:
            self._fsdp1_no_sync.__exit__(None, None, None)
            self._fsdp1_no_sync = None
        elif not sync and self._fsdp1_no_sync is None and isinstance(module, FullyShardedDataParallel):
            # FSDP1 reads its flag in backward, which may run after the user's no_sync() block: the context
            # stays open until a forward outside of it.
            self._fsdp1_no_sync = FullyShardedDataParallel.no_sync(module)
            self._fsdp1_no_sync.__enter__()

    def average(self, param: torch.Tensor) -> None:
        """Average the gradient of a parameter held whole, as its unit's would be. Collective: every rank."""
        if param.grad is None or self.unreduced:
            return
        for dim in range(self.mesh.ndim):
            dist.all_reduce(param.grad, group=self.mesh.get_group(dim))
        param.grad.div_(self.plan.mesh.world_size)

    def parameters_are_settled(self) -> bool:
        """Whether neither forward nor backward is under way."""
        return not self._in_forward and not self._tracker.is_bw

    @property
    def whole_params(self) -> list[nn.Parameter]:
        """Parameters that every rank holds whole."""
        return self._whole


def _install(state: ShardedModel, module: nn.Module) -> None:
    from mmfsdp.guards import watch_optimizers

    me, root = weakref.ref(state), weakref.ref(module)

    def before(_: nn.Module, args: Any) -> None:
        if (live := me()) is not None:
            live.before_forward()

    def after(_: nn.Module, args: Any, output: Any) -> None:
        if (live := me()) is not None:
            # torch calls this hook from an except block when forward failed, with no output.
            live.after_forward(sys.exception() if output is None else None)

    module.register_forward_pre_hook(before, prepend=True)
    module.register_forward_hook(after, always_call=True)
    for param in state.whole_params:
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(functools.partial(_average, me))
    if not state.is_fsdp1:
        original = type(module).named_parameters

        def named_parameters(*args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
            live, this = me(), root()
            if live is not None and live.parameters_are_settled():
                live.reshard()
            return original(this, *args, **kwargs)  # type: ignore[arg-type]

        module.named_parameters = named_parameters  # type: ignore[method-assign]
        for name in state.plan.root.forward_methods:
            setattr(module, name, _as_forward(getattr(module, name), me))
    watch_optimizers()


def _as_forward(method: Any, me: weakref.ref[ShardedModel]) -> Any:
    """A method of the root that computes as forward does, but that no hook sees."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        live = me()
        if live is None:
            return method(*args, **kwargs)
        live.before_forward()
        try:
            output = method(*args, **kwargs)
        except Exception as error:
            live.after_forward(error)
            raise
        live.after_forward(None)
        return output

    return call


def _average(me: weakref.ref[ShardedModel], param: torch.Tensor) -> None:
    if (live := me()) is not None:
        live.average(param)


def _registered(module: nn.Module) -> Iterator[nn.Parameter]:
    """Every registered parameter as it is now, gathered or not."""
    for submodule in module.modules():
        yield from (param for param in submodule._parameters.values() if param is not None)


def _parameter(module: nn.Module, fqn: str) -> nn.Parameter:
    for name, param in module.named_parameters(remove_duplicate=False):
        if clean_fqn(name) == fqn:
            return param
    raise ShardStateError(f"The sharded model has no parameter {fqn!r}.", fqn=fqn)
