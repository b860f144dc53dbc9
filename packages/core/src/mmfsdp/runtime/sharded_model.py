"""The state of a sharded model while it trains: plan, mesh, gathered parameters, and whether gradients are reduced.

torch silently accepts several uses that leave weights untrained or let ranks drift apart. A sharded model prevents them
(`mmfsdp.runtime.hooks` installs the hooks):

- A forward before the optimizer is built, or an exception in one, leaves units gathered; an optimizer built then would
  train copies. Therefore ``parameters()`` of a sharded model always returns the shards. It changes nothing, so one rank
  may call it alone.
- Parameters gathered in an evaluation stay gathered if the strategy says so, until shards are written or trained.
- A backward reduces gradients if its forward ran outside of `no_sync`, as with DDP.
- Gradients that only some ranks have, and those of whole parameters, are averaged over all ranks
  (`mmfsdp.runtime.gradients`).

`mmfsdp.runtime.guards` refuses the remaining uses when an optimizer steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils.module_tracker import ModuleTracker

from mmfsdp.basics.text import clean_fqn
from mmfsdp.basics.torch_releases import discard_iteration
from mmfsdp.collective.lost_ranks import Waiting
from mmfsdp.errors import ShardStateError
from mmfsdp.planning.schema import ShardPlan
from mmfsdp.runtime.flat_params import free_flat_params
from mmfsdp.runtime.gradients import GradientAgreement
from mmfsdp.runtime.lost_writes import LostWrites
from mmfsdp.runtime.param_groups import (
    begin_root,
    computed_with,
    gathered_params,
    groups_of,
    shard_versions,
    shards_of,
)

__all__ = ["ShardedModel", "find_sharded_model", "live_models"]

_FSDP1_NO_SYNC = "_mmfsdp_open_no_sync"
_sharded: weakref.WeakKeyDictionary[nn.Module, ShardedModel] = weakref.WeakKeyDictionary()


def find_sharded_model(model: nn.Module) -> ShardedModel:
    """Return the state of a sharded model. Not collective.

    Args:
        model: The result of `apply_plan` or `shard`, or a wrapper around it.

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
    return [state for state in {id(state): state for state in [*_sharded.values()]}.values() if state.exists]


class ShardedModel:
    """A sharded model's plan and mesh, and its state while it trains.

    Args:
        module: The sharded root; only a weak reference is kept.
        plan: The plan that was applied.
        mesh: The mesh of its ranks.
        former: Weak references to the parameters that the model had before it was sharded.

    Attributes:
        sync_gradients: Whether gradients of the coming forwards are reduced; `no_sync` sets it to False.
        unreduced: Whether the gradients of the last backward were not reduced.
        whole_params: Parameters that every rank holds whole.
        shown: Where whole parameters are shown in place of shards (`mmfsdp.runtime.whole_params`): the ``id`` of the
            module that owns the parameter, and its own name, each with whether this rank shows it. The same places on
            every rank.
        lost_writes: Notices what is written to gathered parameters before the first step; None with engine ``fsdp1``,
            and where nothing is trained, as in a rehearsal.
        agreement: Completes gradients at the end of each backward; None with engine ``fsdp1`` without whole parameters.
    """

    def __init__(
        self, module: nn.Module, plan: ShardPlan, mesh: DeviceMesh, former: Iterable[weakref.ref[nn.Parameter]] = ()
    ) -> None:
        self.plan = plan
        self.mesh = mesh
        self.sync_gradients = True
        self.unreduced = False
        self.agreement: GradientAgreement | None = None
        self.lost_writes: LostWrites | None = None
        self._module = weakref.ref(module)
        self._groups = [weakref.ref(group) for group in groups_of(module.modules())]
        self._kept_from_evaluation: int | None = None
        self.whole_params = [_parameter(module, param.fqn) for param in plan.ignored_params]
        self.shown: dict[tuple[int, str], bool] = {}
        kept = {id(param) for param in _registered(module)}
        self._replaced = [known for known in former if (param := known()) is not None and id(param) not in kept]
        self._in_forward = 0
        self._tracker = ModuleTracker()
        _sharded[module] = self

    @property
    def exists(self) -> bool:
        """Whether the sharded root is still alive."""
        return self._module() is not None

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
        """Register ``wrapper``, so that functions that expect the sharded model accept it."""
        _sharded[wrapper] = self

    def reshard(self) -> None:
        """Free all gathered parameters. Not collective."""
        for group in self.groups:
            group.reshard()
        if self.is_fsdp1:
            free_flat_params(self.module)

    @property
    def groups(self) -> list[Any]:
        """The parameter groups of ``fully_shard``, see `mmfsdp.runtime.param_groups`; none with engine ``fsdp1``."""
        return [group for reference in self._groups if (group := reference()) is not None]

    def gathered(self) -> dict[int, tuple[nn.Parameter, nn.Parameter]]:
        """Return what is registered in place of shards: by ``id``, the parameter and its shard. Not with ``fsdp1``."""
        return gathered_params(self.groups)

    def owns(self, params: Iterable[torch.Tensor]) -> bool:
        """Return whether any of ``params`` is a parameter of this model: sharded, gathered, or from before."""
        if (module := self._module()) is None:
            return False  # garbage-collected since `live_models` listed it
        params = list(params)
        given = {id(param) for param in params}
        shards = (shard for group in self.groups for shard in shards_of(group))
        return any(id(param) in given for param in chain(shards, _registered(module))) or bool(
            self.stale(params) or self._replaced_among(params)
        )

    def stale(self, params: Iterable[torch.Tensor]) -> set[int]:
        """Return the ``id`` of each of ``params`` that is a gathered copy of one of this model's shards."""
        groups = self.groups
        return {id(param) for param in params if any(computed_with(group, param) for group in groups)}

    def check_trainable(self, params: Iterable[torch.Tensor], holder: str) -> None:
        """Check that training ``params`` trains this model.

        Args:
            params: Parameters, of this model or not.
            holder: What holds them, for the message.

        Raises:
            ShardStateError: One is a gathered copy of a shard, or a parameter that sharding replaced.
        """
        params = list(params)
        if self.stale(params):
            raise ShardStateError(
                f"{holder} holds gathered copies of sharded parameters: it was built from a submodule between a "
                "forward and its backward, and would train nothing. Build it from the sharded model's parameters(), "
                "best before the first forward."
            )
        if count := len(self._replaced_among(params)):
            raise ShardStateError(
                f"{holder} holds {count} of the parameters that the model had before it was sharded. Sharding has "
                "replaced them, so training them would change nothing. Build the optimizer from the sharded model's "
                "parameters(), after shard()."
            )

    def _replaced_among(self, params: Iterable[torch.Tensor]) -> set[int]:
        replaced = {id(param) for reference in self._replaced if (param := reference()) is not None}
        return {id(param) for param in params} & replaced

    def check_reduced(self, action: str) -> None:
        """Check that the gradients of the last backward were reduced.

        Args:
            action: What is about to happen, for the message.

        Raises:
            ShardStateError: The last forward ran inside `no_sync`.
        """
        if self.unreduced:
            raise ShardStateError(
                f"{action}, but the last forward ran inside no_sync(): its gradients were not reduced over ranks. "
                "Run the last micro-batch of an accumulation outside of no_sync()."
            )

    def before_forward(self) -> None:
        """Called when the root's forward begins."""
        self._in_forward += 1
        if torch.is_inference_mode_enabled() and isinstance(self.module, FSDPModule):
            begin_root(self.module)
        if self._kept_from_evaluation is not None and self._in_forward == 1:
            versions, self._kept_from_evaluation = self._kept_from_evaluation, None
            if torch.is_grad_enabled() or versions != shard_versions(self.groups):
                self.reshard()
        if torch.is_grad_enabled():
            self._set_sync(self.sync_gradients)
            self.unreduced = not self.sync_gradients

    def after_forward(self, *, failed: bool) -> None:
        """Called when the root's forward ends.

        Args:
            failed: Whether it raised.
        """
        self._in_forward = max(self._in_forward - 1, 0)
        if failed:
            self._recover()
        elif not torch.is_grad_enabled() and not self._in_forward:  # no enclosing method goes on computing
            if self.is_fsdp1:
                self.reshard()  # gathering changes its parameters themselves
            else:
                self._kept_from_evaluation = shard_versions(self.groups)

    def before_writing(self) -> None:
        """Free gathered parameters before shards are written other than by training. Call it on every rank."""
        self._kept_from_evaluation = None
        self.reshard()

    def before_mode(self) -> None:
        """Called by ``train()`` and ``eval()``: an evaluation may begin with other weights than the last one."""
        if self._kept_from_evaluation is not None:
            self._kept_from_evaluation = -1

    def _recover(self) -> None:
        self._in_forward = 0
        if self.is_fsdp1:
            return
        module = self.module
        assert isinstance(module, FSDPModule)
        discard_iteration(module)
        self.reshard()

    def _set_sync(self, sync: bool) -> None:
        module = self.module
        if not self.is_fsdp1:
            module.set_requires_gradient_sync(sync)  # type: ignore[operator]
        elif sync and _FSDP1_NO_SYNC in vars(module):
            vars(module).pop(_FSDP1_NO_SYNC).__exit__(None, None, None)
        elif not sync and _FSDP1_NO_SYNC not in vars(module) and isinstance(module, FullyShardedDataParallel):
            # FSDP1 reads its flag in backward, which may run after the user's no_sync() block: the context stays
            # open until a forward outside of it. It references the module, so only the module may reference it.
            vars(module)[_FSDP1_NO_SYNC] = context = FullyShardedDataParallel.no_sync(module)
            context.__enter__()

    def all_reduce(self, value: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce ``value`` in place over all ranks of the mesh. Collective: every rank."""
        with Waiting("reducing a value over all ranks"):
            for dim in range(self.mesh.ndim):
                dist.all_reduce(value, op, group=self.mesh.get_group(dim))

    @property
    def is_running(self) -> bool:
        """Whether the root's forward is running."""
        return self._in_forward > 0

    def parameters_are_settled(self) -> bool:
        """Return whether neither forward nor backward is running."""
        return not self.is_running and not self._tracker.is_bw


def _registered(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield every registered parameter, gathered or sharded."""
    for submodule in module.modules():
        yield from (param for param in submodule._parameters.values() if param is not None)


def _parameter(module: nn.Module, fqn: str) -> nn.Parameter:
    for name, param in module.named_parameters(remove_duplicate=False):
        if clean_fqn(name) == fqn:
            return param
    raise ShardStateError(f"The sharded model has no parameter {fqn!r}.", fqn=fqn)
