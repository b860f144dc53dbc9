"""The state of a sharded model while it trains: plan, mesh, gathered parameters, and whether gradients are reduced.

torch silently accepts several uses that leave weights untrained or let ranks drift apart. A sharded model prevents them
(`mmfsdp.runtime.hooks` installs the hooks):

- A forward before the optimizer is built, or an exception in one, leaves units gathered; an optimizer built then would
  train copies. Therefore ``parameters()`` of a sharded model always returns the shards. It changes nothing, so one rank
  may call it alone.
- Parameters gathered in an evaluation stay gathered if the strategy says so, until shards are written or trained.
- A backward reduces gradients if its forward ran outside of `no_sync`, as with DDP. Stages of torch's pipelines keep
  them in all backwards of a step, and reduce them after these, outside of autograd.
- Gradients that only some ranks have, and gradients of whole parameters, are averaged over all ranks
  (`mmfsdp.runtime.gradients.agreement`).

`mmfsdp.runtime.refusals.guards` refuses the remaining uses when an optimizer steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from mmfsdp.basics.text import clean_fqn
from mmfsdp.collective.lost_ranks import Waiting
from mmfsdp.collective.scopes import Scope, scope_of
from mmfsdp.errors import ShardStateError
from mmfsdp.planning.schema import ShardPlan
from mmfsdp.runtime.engine import Engine
from mmfsdp.runtime.gathered.copied_settings import CopiedSettings
from mmfsdp.runtime.gathered.lost_writes import LostWrites
from mmfsdp.runtime.gathered.other_weights import in_functional_call
from mmfsdp.runtime.gradients.agreement import GradientAgreement
from mmfsdp.runtime.gradients.backward import is_backward
from mmfsdp.runtime.roles import Roles, check_unseen, roles_of
from mmfsdp.runtime.torch_fsdp2.gathering import gathered_params
from mmfsdp.runtime.torch_fsdp2.param_groups import Group, groups_of, reduces

__all__ = ["ShardedModel", "find_sharded_model", "live_models"]

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
        engine: What sharded it.
        former: Weak references to the parameters that the model had before it was sharded.

    Attributes:
        sync_gradients: Whether gradients of the coming forwards are reduced; `no_sync` sets it to False.
        writes: How often shards were about to be written other than in backward: by steps of the optimizer, or loads.
        is_stage: Whether its mesh has a dimension for the stages of a pipeline, whose other ranks hold other stages.
        unreduced: Whether the gradients of the last backward were not reduced.
        whole_params: Parameters that every rank holds whole.
        shown: Where whole parameters are shown in place of shards (`mmfsdp.runtime.whole_params`): the ``id`` of the
            module that owns the parameter, and its own name, each with whether this rank shows it. The keys are
            the same on every rank.
        lost_writes: Notices writes to gathered parameters in the first steps; None after them, with engine
            ``fsdp1``, and where nothing is trained, as in a rehearsal.
        is_graph_checked: Whether the graph of a training forward was searched for shards (`check_graph_inputs`).
        copied_settings: Carries settings of gathered copies over to shards; has no subscribers with ``fsdp1``.
        agreement: Completes gradients at the end of each backward; None with engine ``fsdp1`` without whole parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: ShardPlan,
        mesh: DeviceMesh,
        engine: Engine[ShardedModel],
        former: Iterable[weakref.ref[nn.Parameter]] = (),
    ) -> None:
        self.plan, self.mesh, self.engine = plan, mesh, engine
        self.sync_gradients = True
        self.writes = 0
        self.unreduced = self.is_graph_checked = self.is_stage = False
        self.agreement: GradientAgreement | None = None
        self.lost_writes: LostWrites | None = None
        self.copied_settings = CopiedSettings()
        self._module = weakref.ref(module)
        self._groups = [weakref.ref(group) for group in groups_of(module.modules())]
        self._kept_from_evaluation: int | None = None
        self.whole_params = [_parameter(module, param.fqn) for param in plan.ignored_params]
        self.shown: dict[tuple[int, str], bool] = {}
        kept = {id(param) for param in _registered(module)}
        self._flat = [weakref.ref(param) for param in _registered(module)] if self.is_fsdp1 else []
        self._replaced = [known for known in former if (param := known()) is not None and id(param) not in kept]
        self._in_forward = 0
        self._was_trained, self._synced = False, True
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
    def scope(self) -> Scope:
        """The ranks of its mesh, and how they exchange messages. Collective when the mesh is met for the first time."""
        return scope_of(self.mesh)

    @property
    def is_fsdp1(self) -> bool:
        """Whether the units are FullyShardedDataParallel instances, and parameters pieces of flat ones."""
        return self.engine.is_flat

    def clip_flat(self, max_norm: float, norm_type: float) -> torch.Tensor | None:
        """Clip the gradients of flat parameters, and return their norm; None if there are none. Collective."""
        return self.engine.clip(self, max_norm, norm_type)

    def alias(self, wrapper: nn.Module) -> None:
        """Register ``wrapper``, so that functions that expect the sharded model accept it."""
        _sharded[wrapper] = self

    def reshard(self) -> None:
        """Free all gathered parameters. Not collective."""
        self.engine.free(self)

    @property
    def groups(self) -> list[Group]:
        """The parameter groups of ``fully_shard``, see `mmfsdp.runtime.torch_fsdp2`; none with engine ``fsdp1``."""
        return [group for reference in self._groups if (group := reference()) is not None]

    @property
    def reduces(self) -> bool:
        """Whether a backward that began now would reduce all gradients: torch's pipelines switch that off."""
        return all(reduces(group) for group in self.groups)

    def gathered(self) -> dict[int, tuple[nn.Parameter, nn.Parameter]]:
        """Return parameters registered in place of shards: by ``id``, each with its shard. Not with ``fsdp1``.

        Shards then have the settings that their copies were given, such as ``requires_grad``.
        """
        self.copied_settings.carry_over(self.groups)
        return gathered_params(self.groups)

    def roles(self, params: Iterable[torch.Tensor]) -> Roles:
        """Return the roles of tensors in this model; empty if none belongs to it. Not collective.

        Linear in the number of parameters: a step may ask.
        """
        if (module := self._module()) is None:
            return Roles()  # garbage-collected since `live_models` listed it
        flat = [param for reference in self._flat if (param := reference()) is not None]
        known = [*self.whole_params, *flat]
        return roles_of([*params], module, self.groups, known, self._replaced, shows_whole=bool(self.shown))

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
                "Run the last micro-batch of an accumulation outside of no_sync(), and where you use torch's "
                "set_requires_gradient_sync(), set it to True before."
            )

    def before_forward(self) -> None:
        """Called when the root's forward begins."""
        self._in_forward += 1
        if torch.is_inference_mode_enabled():
            self.engine.begin_root(self)
        if self._kept_from_evaluation is not None and self._in_forward == 1:
            versions, self._kept_from_evaluation = self._kept_from_evaluation, None
            if torch.is_grad_enabled() or versions != self.engine.version(self):
                self.reshard()
        if torch.is_grad_enabled():
            if self.sync_gradients != self._synced:  # otherwise the user's own setting stays
                self.engine.set_sync(self, self.sync_gradients)
            self._synced = self.sync_gradients
            self.unreduced = not self.sync_gradients
            if self._in_forward == 1:
                self._look_at_first_steps()

    def _look_at_first_steps(self) -> None:
        if not self._was_trained:
            self._was_trained = True
            # A unit of engine fsdp1 that ran before the root may show views instead of its parameters.
            trained = [param for param in _registered(self.module) if param.requires_grad and param.is_leaf]
            roles = self.roles(trained)
            if roles.unseen and not in_functional_call():
                check_unseen(roles, f"This {type(self.module).__name__}")
        if self.lost_writes is not None and self.lost_writes.count_forward():
            self.check_writes()

    def check_writes(self) -> None:
        """Check that nothing was written to gathered parameters in the first steps, and stop comparing.

        Not collective; waits for the device the first time, and is nothing after that.

        Raises:
            ShardStateError: A parameter was written while it was gathered.
        """
        if self.lost_writes is not None:
            lost_writes, self.lost_writes = self.lost_writes, None
            lost_writes.finish()

    def after_forward(self, *, failed: bool) -> None:
        """Called when the root's forward ends.

        Args:
            failed: Whether it raised.
        """
        self._in_forward = 0 if failed else max(self._in_forward - 1, 0)
        if failed:
            self.engine.discard_forward(self)
        elif not torch.is_grad_enabled() and not self._in_forward:  # no enclosing method goes on computing
            self._kept_from_evaluation = self.engine.version(self)
            if self._kept_from_evaluation is None:
                self.reshard()

    def settle(self) -> None:
        """Wait until all backwards are known to be right, as before a save. Not collective.

        Raises:
            RankMismatchError: Ranks gathered and reduced different units in one of them.
        """
        if self.agreement is not None:
            self.agreement.settle()

    def before_writing(self) -> None:
        """Free gathered parameters before anything but training writes shards. Call it on every rank."""
        self._kept_from_evaluation = None
        self.writes += 1
        self.reshard()

    def before_mode(self) -> None:
        """Called by ``train()`` and ``eval()``: an evaluation may begin with other weights than the last one."""
        if self._kept_from_evaluation is not None:
            self._kept_from_evaluation = -1

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
        return not self.is_running and not is_backward()


def _registered(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield every registered parameter, gathered or sharded."""
    for submodule in module.modules():
        yield from (param for param in submodule._parameters.values() if param is not None)


def _parameter(module: nn.Module, fqn: str) -> nn.Parameter:
    for name, param in module.named_parameters(remove_duplicate=False):
        if clean_fqn(name) == fqn:
            return param
    raise ShardStateError(f"The sharded model has no parameter {fqn!r}.", fqn=fqn)
